"""Build the engine of a configuration: choose the plug-ins, load the model, start the executor."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.finish import eos_within
from minivllm.core.interfaces.grammar import GrammarContext
from minivllm.core.timing import StartTimes
from minivllm.device import early
from minivllm.device.compile_processes import spare
from minivllm.errors import ConfigError, describe_error, start_fault

if TYPE_CHECKING:
    from minivllm.config import EngineConfig, Loaded
    from minivllm.config.resolved import Resolved
    from minivllm.core.engine.engine import Engine
    from minivllm.core.interfaces.executor import Capacity, Executor, Part, Wiring
    from minivllm.core.interfaces.predictor import Predictor, PredictorContext
    from minivllm.runtime.energy.account import EnergyAccount
    from minivllm.runtime.hooks.figures import PluginFigures
    from minivllm.runtime.images.reader import ImageReader
    from minivllm.runtime.structured.service import Grammars, NoGrammars
    from minivllm.runtime.text.tokenizer import Tokenizer

    Built = tuple[Engine, Resolved, Tokenizer | None]


log = logging.getLogger("minivllm")


def build_engine(loaded: Loaded, live: bool = False) -> Built:
    """Choose the plug-ins, load the model and start the executor.  Return the engine, the choices and the tokenizer
    (None with ``skip_tokenizer_init``).

    ``live`` means that clients use real time.  PluginError names an external plug-in that raises an unexpected
    exception."""
    times = StartTimes()
    config = loaded.engine
    local = config.executor.name in ("auto", "local", "minivllm/local") and config.tensor_parallel_size == 1
    parts: dict[str, Part] = {}
    try:
        with times.of("engine"), uncollected(), spare() as start:
            new = start if local and config.compile_ahead is not False else None
            early.open_driver(config.device, context=local and "torch" not in sys.modules, found=new)
            engine, resolved, tokenizer = _build(loaded, live, times, parts)
    except Exception as exc:
        fault = start_fault(exc, parts)
        if fault is not None:
            raise fault from exc
        raise
    engine.start_times = times.seconds
    return engine, resolved, tokenizer


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pause the automatic garbage collection of the process, which takes some tenths of a second of a start.

    The caller collects the garbage once the engine is ready."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _build(loaded: Loaded, live: bool, times: StartTimes, chosen: dict[str, Part]) -> Built:
    """Build the engine and return what ``build_engine`` returns, but pass exceptions of plug-ins on.  ``times`` records
    the seconds of each part of the start.  The chosen plug-ins are added to ``chosen``, by their seams."""
    with times.of("imports"):
        from minivllm.core.engine.engine import Engine
        from minivllm.core.engine.parts import CacheOptions, EngineParts, monotonic
        from minivllm.device.functions.host_rows import HostDraw
        from minivllm.device.worker.adapters import adapter_checks
        from minivllm.device.worker.build import make_processors
        from minivllm.registry import build_part
        from minivllm.runtime.hooks.bridge import EngineHooks
        from minivllm.runtime.hooks.figures import PluginFigures
        from minivllm.runtime.hooks.manager import HookManager

    resolved = choose_parts(loaded, times)
    chosen.update(parts_by_seam(resolved))
    with times.of("tokenizer"):
        tokenizer, eos_ids = open_tokenizer(resolved)
    config = loaded.engine
    # hooks are constructed before the model is loaded, so that their errors are reported early
    hooks = HookManager.make(resolved.hooks) if resolved.hooks else None
    grammars: Any = None
    executor, capacity, resolved = start_executor(resolved, eos_ids, live, times)
    try:
        parts, wiring = resolved.parts, resolved.wiring
        check_own_models(wiring, capacity, parts["executor"].name)
        grammars = make_grammars(config, parts.get("grammar"), tokenizer, eos_ids, capacity.vocab_size)
        figures = PluginFigures()
        engine = Engine(
            wiring,
            executor,
            capacity,
            EngineParts(
                policy=lambda ctx: figures.of("scheduler", build_part("scheduler", parts["scheduler"], ctx)),
                evictor=lambda ctx: figures.of("evictor", build_part("evictor", parts["evictor"], ctx)),
                predictor=predictor_of(parts["predictor"], figures),
                processors=figures.of_host(make_processors(wiring, capacity.vocab_size)),
                strategies=figures.each("strategy", [(p.name, build_part("strategy", p)) for p in resolved.strategies]),
                host_sampler=HostDraw,
                grammars=grammars,
                check_adapter=adapter_checks(wiring),
                now=executor.now or monotonic,
                energy=counter_of(config.energy, executor, parts["executor"].name),
            ),
            CacheOptions(windows_kept(resolved), config.enable_prefix_caching, config.partial_prefix_hits),
        )
        figures.watch(engine, lambda: vars(grammars).get("plugin"), hooks)
        listen(engine, resolved)
        resolved = replace(resolved, sampling=sampling_read(resolved.sampling, engine))
        # the named grammar plug-in is loaded now, so that its errors are reported early
        if config.grammar.name != "auto":
            grammars.warm()
        if hooks is not None:
            EngineHooks(hooks, {seam: part.name for seam, part in parts.items()}, engine).started()
    except BaseException:
        executor.stop()  # frees the memory
        if grammars is not None:
            grammars.close()
        raise
    return engine, resolved, tokenizer


def choose_parts(loaded: Loaded, times: StartTimes) -> Resolved:
    """Return the plug-ins chosen for a configuration, and record in ``times`` the seconds of each part of this work."""
    with times.of("imports"):
        from minivllm.config.resolve import resolve
        from minivllm.registry import Catalog

    with times.of("plug-ins"):
        resolved = resolve(loaded.engine, Catalog.discover(), loaded.origins)
        times.include({"device": resolved.device.seconds})
    return resolved


def parts_by_seam(resolved: Resolved) -> dict[str, Part]:
    """Return all chosen plug-ins by the name of their seam, with a number for the second and later ones of a seam."""
    lists = {"processor": resolved.wiring.processors, "strategy": resolved.strategies, "hooks": resolved.hooks}
    several = {f"{seam} {n + 1}": part for seam, parts in lists.items() for n, part in enumerate(parts)}
    return {**resolved.parts, **several}


def start_executor(
    resolved: Resolved, eos_ids: tuple[int, ...], live: bool, times: StartTimes
) -> tuple[Executor, Capacity, Resolved]:
    """Start an executor, and return it with its capacity and the choices, to which its notes are added.

    If the automatic choice of a drafter prevents the start, an executor without drafts is started.  ``live`` is that of
    ``build_engine``, and ``eos_ids`` are the end-of-sequence ids of the model.
    """
    from minivllm.config.auto_drafter import keep_none
    from minivllm.registry import build_part

    part, wiring = resolved.parts["executor"], replace(resolved.wiring, eos_ids=eos_ids)
    executor = refuse_own_clock(build_part("executor", part), part.name, live)
    try:
        capacity = started(executor, wiring, times)
    except BaseException as exc:
        executor.stop()  # frees the memory
        if resolved.without_head is None or not isinstance(exc, Exception):
            raise
        problem = describe_error(exc)
    else:
        notes = (*resolved.notes, *(("capacity", note) for note in capacity.notes))
        return executor, capacity, replace(resolved, wiring=wiring, notes=notes)
    gc.collect()  # frees the memory of objects in cycles
    log.warning("the engine starts again without the drafter mtp, which drafter=auto chose: %s", problem)
    return start_executor(keep_none(resolved.without_head, problem), eos_ids, live, times)


def started(executor: Executor, wiring: Wiring, times: StartTimes) -> Capacity:
    """Start an executor and return its capacity.  Record in ``times`` the seconds of the parts of the start that the
    executor reports.

    The rest of the time is recorded as the part "executor"."""
    with times.of("executor"):
        capacity = executor.start(wiring)
        with contextlib.suppress(NotImplementedError):
            times.include(executor.call("start_times"))
    return capacity


def predictor_of(part: Part, figures: PluginFigures) -> Callable[[PredictorContext], Predictor] | None:
    """Return a function that builds the predictor of an engine, or None for the built-in plug-in without
    predictions."""
    from minivllm.registry import build_part

    if part.name == "minivllm/none":
        return None
    return lambda ctx: figures.of("predictor", build_part("predictor", part, ctx))


def open_tokenizer(resolved: Resolved) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """Return the tokenizer, or None if none is needed, and the end-of-sequence ids.  ModelError or ConfigError."""
    from minivllm.config.places import end_ids
    from minivllm.runtime.text.pool import TokenizerPool
    from minivllm.runtime.text.tokenizer import load_tokenizer

    eos = end_ids(resolved.config, Path(resolved.wiring.model_dir))
    if resolved.tokenizer_dir is None:
        return None, tuple(eos or ())
    part = resolved.parts["tokenizer"]
    tokenizer = load_tokenizer(resolved.tokenizer_dir, resolved.config.chat_template, eos, part)
    tokenizer.pool = TokenizerPool(tokenizer, **resolved.config.tokenizer_pool)
    return tokenizer, tokenizer.eos_ids


def image_reader(resolved: Resolved, capacity: Capacity) -> ImageReader:
    """Return the reader of the images of requests, which refuses them if the engine reads none."""
    from minivllm.device.loading.hf_config import open_checkpoint
    from minivllm.runtime.images.reader import ImageReader

    wiring = resolved.wiring
    why_not = wiring.images.why_not
    if not why_not and not capacity.image_bytes:
        why_not = capacity.no_images or "the executor reads none"
    raw = {} if why_not else open_checkpoint(wiring.model_dir, overrides=wiring.hf_overrides).raw
    part = wiring.parts.get("encoder")
    return ImageReader(wiring.images, part, wiring.model_dir, raw, wiring.max_model_len, why_not)


def sampling_read(defaults: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Return the sampling defaults of generation_config.json that some plug-in of the engine reads.

    A request that sets a parameter which no plug-in reads is refused.  Dropped defaults are logged.
    """
    from minivllm.core.engine.strategies import own_names
    from minivllm.core.interfaces.params import PROCESSED

    reads = own_names(engine.strategies).union(*(processor.reads for _, processor in engine.processors))
    unread = [name for name in defaults if name in PROCESSED and name not in reads]
    if unread:
        log.warning("generation_config.json: no processor or sampler here reads %s: not applied", ", ".join(unread))
    return {name: value for name, value in defaults.items() if name not in unread}


def listen(engine: Engine, resolved: Resolved) -> None:
    """Start counting energy and usage, where they are enabled."""
    from minivllm.runtime import usage

    if engine.energy is not None:
        engine.energy.attach(engine, resolved.windows)
    if usage.is_on():
        lists = {"strategy": resolved.strategies, "hooks": resolved.hooks, "processor": resolved.wiring.processors}
        lists["kvstore"] = resolved.wiring.cache.stores
        lists["adapter"] = resolved.wiring.adapters.methods
        names = {seam: [part.name] for seam, part in resolved.parts.items()}
        names |= {seam: [part.name for part in parts] for seam, parts in lists.items()}
        usage.UsageCounter(engine, resolved.config.model, names)


def counter_of(option: str, executor: Executor, name: str) -> EnergyAccount | None:
    """Return the energy counter of an engine whose executor has started, or None with ``energy=off``.

    ConfigError if the machine has no such counter, because energy is never estimated.
    """
    if option == "off":
        return None
    from minivllm.runtime.energy.account import EnergyAccount
    from minivllm.runtime.energy.counters import open_counter

    try:
        return EnergyAccount(open_counter(option, lambda: executor.call("devices")))
    except NotImplementedError:
        problem = f"the executor {name} does not report its devices"
    except OSError as exc:
        problem = str(exc)
    expected = "energy=off, or rapl:FOLDER if Linux's powercap is mounted elsewhere"
    raise ConfigError(f"energy={option}: {problem}; set {expected}")


def check_own_models(wiring: Wiring, capacity: Capacity, name: str) -> None:
    """Raise ConfigError for a processor with a second model if the executor does not support that."""
    if wiring.own_models and not capacity.own_models:
        processor = next(iter(wiring.own_models))
        problem = f"it has a model of its own, which the executor {name} does not run"
        raise ConfigError(f"{processor}: {problem}; use another executor")


def refuse_own_clock(executor: Any, name: str, live: bool) -> Any:
    """Return the executor, which has not started.  ConfigError if clients use real time and the executor does not."""
    if live and executor.now is not None:
        raise ConfigError(
            f"executor={name} has a clock of its own, and servers and AsyncLLM keep real time: "
            "use an executor without one; set clock=real among its options, or use LLM or `minivllm simulate`"
        )
    return executor


def windows_kept(resolved: Resolved) -> tuple[int | None, ...]:
    """Return for each KV group (the layers that share one block table) how many tokens back its layers attend, None for
    all.

    If second models, such as a draft model, store their keys and values in the blocks of the first group, the entry of
    that group is None."""
    wiring, (first, *others) = resolved.wiring, resolved.windows
    shared = wiring.own_models or wiring.speculation.draft_model is not None
    return (None if shared else first, *others)


def make_grammars(
    config: EngineConfig, part: Part | None, tokenizer: Tokenizer | None, eos_ids: Sequence[int], width: int
) -> Grammars | NoGrammars:
    """Return the service that compiles grammars, or an object that explains why there is none."""
    from minivllm.config.resolve import NO_GRAMMAR
    from minivllm.runtime.structured.service import Grammars, NoGrammars, default_threads
    from minivllm.runtime.text.vocabulary import token_bytes

    eos = eos_within(eos_ids, width)
    if part is None:
        return NoGrammars(NO_GRAMMAR)
    if tokenizer is None:
        return NoGrammars("needs the vocabulary of the tokenizer; drop skip_tokenizer_init")
    if not eos:
        return NoGrammars("needs an end-of-sequence token, by which an answer ends, and the model names none")

    def context() -> GrammarContext:
        """Return the vocabulary.  It is computed at its first use, because this takes long."""
        return GrammarContext(token_bytes(tokenizer, width), width, eos, default_threads())

    return Grammars(
        part,
        context,
        config.grammar_compile_seconds,
        config.grammar_compile_mb,
        config.grammar_cache_mb << 20,
        config.grammar_workers,
    )
