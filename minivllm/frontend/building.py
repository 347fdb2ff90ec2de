"""The engine of a configuration: the parts are chosen, the model is loaded, the executor started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.finish import eos_within
from minivllm.core.interfaces.grammar import GrammarContext
from minivllm.errors import ConfigError, part_fault

if TYPE_CHECKING:
    from minivllm.config import EngineConfig, Loaded
    from minivllm.config.resolve import Resolved
    from minivllm.core.engine.engine import Engine
    from minivllm.core.interfaces.executor import Capacity, Part, Wiring
    from minivllm.structured.service import Grammars, NoGrammars
    from minivllm.text.tokenizer import Tokenizer


def build_engine(loaded: Loaded, live: bool = False) -> tuple[Engine, Resolved, Tokenizer | None]:
    """Choose the parts, load the model, start the executor.  ``live``: for clients whose time is the real one.
    PluginError names a part of another package that raises meanwhile."""
    try:
        return _build(loaded, live)
    except Exception as exc:
        if fault := part_fault(exc):
            raise fault from exc
        raise


def _build(loaded: Loaded, live: bool) -> tuple[Engine, Resolved, Tokenizer | None]:
    from minivllm.config.resolve import resolve
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.parts import CacheOptions, EngineParts, monotonic
    from minivllm.core.functions.host_rows import HostDraw
    from minivllm.core.worker.build import make_processors
    from minivllm.hooks.bridge import EngineHooks
    from minivllm.hooks.manager import HookManager
    from minivllm.registry import Catalog, build_part
    from minivllm.text.tokenizer import load_tokenizer

    from .energy import counter_of
    from .figures import PluginFigures

    config = loaded.engine
    resolved = resolve(config, Catalog.discover(), loaded.origins)
    model_dir, folder = resolved.wiring.model_dir, resolved.tokenizer_dir
    eos = end_ids(config, Path(model_dir))
    tokenizer = None if folder is None else load_tokenizer(folder, config.chat_template, eos)
    eos_ids = tuple(eos or ()) if tokenizer is None else tokenizer.eos_ids
    wiring = replace(resolved.wiring, eos_ids=eos_ids)
    parts = resolved.parts
    hooks = HookManager.make(resolved.hooks) if resolved.hooks else None  # a wrong one is refused before a model loads
    grammars: Any = None
    executor = refuse_own_clock(build_part("executor", parts["executor"]), parts["executor"].name, live)
    try:
        capacity = executor.start(wiring)
        check_own_models(wiring, capacity, parts["executor"].name)
        notes = (*resolved.notes, *(("capacity", note) for note in capacity.notes))
        resolved = replace(resolved, wiring=wiring, notes=notes)
        grammars = make_grammars(config, parts.get("grammar"), tokenizer, eos_ids, capacity.vocab_size)
        figures = PluginFigures()
        engine = Engine(
            wiring,
            executor,
            capacity,
            EngineParts(
                policy=lambda ctx: figures.of("scheduler", build_part("scheduler", parts["scheduler"], ctx)),
                evictor=lambda ctx: figures.of("evictor", build_part("evictor", parts["evictor"], ctx)),
                processors=figures.of_host(make_processors(wiring, capacity.vocab_size)),
                strategies=figures.each("strategy", [(p.name, build_part("strategy", p)) for p in resolved.strategies]),
                host_sampler=HostDraw,
                grammars=grammars,
                now=executor.now or monotonic,
                energy=counter_of(config.energy, executor, parts["executor"].name),
            ),
            CacheOptions(windows_kept(resolved), config.enable_prefix_caching, config.partial_prefix_hits),
        )
        figures.watch(engine, lambda: vars(grammars).get("plugin"), hooks)
        listen(engine, resolved)
        if config.grammar.name != "auto":  # who names one means to use it
            grammars.warm()
        if hooks is not None:
            EngineHooks(hooks, {seam: part.name for seam, part in parts.items()}, engine).started()
    except BaseException:
        executor.stop()  # what it had taken is given back
        if grammars is not None:
            grammars.close()
        raise
    return engine, resolved, tokenizer


def end_ids(config: EngineConfig, model_dir: Path) -> list[int] | None:
    """Return the end-of-sequence ids that ``hf_overrides`` or the model's files configure; None: those of the
    tokenizer's directory.  ModelError."""
    from minivllm.text.tokenizer import configured_eos, token_ids

    if (own := config.hf_overrides.get("eos_token_id")) is not None:
        return token_ids(own, "hf_overrides")
    return configured_eos(model_dir) or None


def listen(engine: Engine, resolved: Resolved) -> None:
    """What counts joules, and use if the machine's owner has switched that on, begins to listen."""
    from minivllm import usage

    if engine.energy is not None:
        engine.energy.attach(engine, resolved.windows)
    if usage.is_on():
        several = {"strategy": resolved.strategies, "hooks": resolved.hooks, "processor": resolved.wiring.processors}
        parts = {seam: [part.name] for seam, part in resolved.parts.items()}
        parts |= {seam: [part.name for part in found] for seam, found in several.items()}
        usage.UsageCounter(engine, resolved.config.model, parts)


def check_own_models(wiring: Wiring, capacity: Capacity, name: str) -> None:
    """ConfigError for a processor with a model of its own where the executor runs none."""
    if wiring.own_models and not capacity.own_models:
        who = f"{next(iter(wiring.own_models))}: it has a model of its own"
        raise ConfigError(f"{who}, which the executor {name} runs not; use another executor")


def refuse_own_clock(executor: Any, name: str, live: bool) -> Any:
    """The executor, which has not started; ConfigError where clients live in real time and it does not."""
    if live and executor.now is not None:
        raise ConfigError(
            f"executor={name} has a clock of its own, and servers and AsyncLLM keep real time: "
            "want an executor without one; set clock=real among its options, or use LLM or `minivllm simulate`"
        )
    return executor


def windows_kept(resolved: Resolved) -> tuple[int | None, ...]:
    """The window of each KV group.  Where second models keep their KV in the blocks of the first group, it has none."""
    wiring, (first, *others) = resolved.wiring, resolved.windows
    shared = wiring.own_models or wiring.speculation.draft_model is not None
    return (None if shared else first, *others)


def make_grammars(
    config: EngineConfig, part: Part | None, tokenizer: Tokenizer | None, eos_ids: Sequence[int], width: int
) -> Grammars | NoGrammars:
    """Who compiles for structured output, or says why nobody does."""
    from minivllm.config.resolve import NO_GRAMMAR
    from minivllm.structured.service import Grammars, NoGrammars, default_threads
    from minivllm.text.vocabulary import token_bytes

    eos = eos_within(eos_ids, width)
    if part is None:
        return NoGrammars(NO_GRAMMAR)
    if tokenizer is None:
        return NoGrammars("needs the vocabulary of the tokenizer; drop skip_tokenizer_init")
    if not eos:
        return NoGrammars("needs an end-of-sequence token, by which an answer ends, and the model names none")

    def context() -> GrammarContext:
        return GrammarContext(token_bytes(tokenizer, width), width, eos, default_threads())

    return Grammars(
        part,
        context,
        config.grammar_compile_seconds,
        config.grammar_compile_mb,
        config.grammar_cache_mb << 20,
        config.grammar_workers,
    )
