"""One thing off at a time: which parts of a configuration can be taken away, and by which setting.

Each is an existing switch or plug-in, so what is measured is the engine itself.  Only the KV cache has no switch: it is
taken away by the requests, each of whose tokens is asked for in a request of its own whose prompt is all before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minivllm.config import files as files_of_config
from minivllm.errors import ConfigError, shown, suggest

from . import offline
from .answers import TimedAnswer
from .workload import BenchAsk


@dataclass(frozen=True)
class Ablation:
    """``sets`` take the part away; ``why_not(llm)`` says why the engine of a configuration has nothing there to take
    away, "" if it has; ``recompute``: it is the requests that take it away."""

    name: str
    sets: tuple[str, ...]
    means: str
    why_not: Callable[[Any], str]
    recompute: bool = False


def _part(llm: Any, seam: str) -> str:
    part = llm.resolved.parts.get(seam)
    return "none" if part is None else part.name.removeprefix("minivllm/")


def _prefix(llm: Any) -> str:
    return "" if llm.config.enable_prefix_caching else "enable_prefix_caching is false"


def _partial(llm: Any) -> str:
    return _prefix(llm) or ("" if llm.config.partial_prefix_hits else "partial_prefix_hits is false")


def _continuous(llm: Any) -> str:
    return "the scheduler is static already" if _part(llm, "scheduler") == "static" else ""


def _chunked(llm: Any) -> str:
    name = _part(llm, "scheduler")
    return f"the scheduler is {name}, which mixes nothing" if name in ("static", "prefill-first") else ""


def _captured(llm: Any) -> str:
    if llm.engine.wiring.steps.graph == "off":
        return "steps are not captured: graph is off"
    runner = getattr(llm.engine.executor, "runner", None)
    if runner is not None and getattr(runner, "graphs", None) is None:
        said = [note for note in llm.engine.capacity.notes if "captured" in note]
        return said[0] if said else "this device or these parts capture no steps"
    return ""


def _fused(which: str, llm: Any) -> str:
    if not llm.engine.wiring.device.startswith("cuda"):
        return "fused kernels are those of a GPU, and the device is a CPU"
    if which in llm.config.unfused:
        return f"unfused has {which} already"
    return "" if llm.config.fuse else "fuse is false"


def _ahead(llm: Any) -> str:
    return "" if llm.engine.capacity.depth else "no step runs ahead of the one before it here"


def _quantized(llm: Any) -> str:
    name = _part(llm, "quantizer")
    if name == "none":
        return "the weights are not quantized"
    own = llm.config.quantizer.name == "auto"
    return f"the checkpoint itself is quantized ({name}): there are no other weights to run" if own else ""


def _kv_format(llm: Any) -> str:
    return (
        "kv_format is auto: the cache holds what the model computes in" if llm.config.kv_format.name == "auto" else ""
    )


def _speculating(llm: Any) -> str:
    return "nothing is drafted: drafter is none" if _part(llm, "drafter") == "none" else ""


def _invariant(llm: Any) -> str:
    return "" if llm.config.batch_invariant else "batch_invariant is false"


def _cached(llm: Any) -> str:
    return ""


FUSIONS = (
    ("pairs", "products of few rows without their norm or gate"),
    ("norms", "additions and norms as torch's operations"),
    ("gate", "the gate of the MLP as torch's operations"),
    ("draw", "samplers and penalties as torch's operations"),
)
PARTS = (
    Ablation("kv-cache", ("enable_prefix_caching=false",), "every token computes all before it again", _cached, True),
    Ablation("continuous-batching", ("scheduler=static",), "a batch runs to its end before the next", _continuous),
    Ablation("chunked-prefill", ("scheduler=prefill-first",), "no step has both prompts and decodes", _chunked),
    Ablation("prefix-cache", ("enable_prefix_caching=false",), "equal prefixes are computed again", _prefix),
    Ablation("partial-hits", ("partial_prefix_hits=false",), "only whole blocks of a prefix are found", _partial),
    Ablation("captured-steps", ("graph=off",), "each operation of a step is launched on its own", _captured),
    Ablation("fusion", ("fuse=false",), "torch's operations one by one", partial(_fused, "")),
    *(Ablation(f"fusion-{which}", (f'unfused=["{which}"]',), text, partial(_fused, which)) for which, text in FUSIONS),
    Ablation("run-ahead", ("run_ahead=0",), "a step waits for the one before it", _ahead),
    Ablation("quantization", ("quantizer=none",), "weights as the checkpoint has them", _quantized),
    Ablation("kv-format", ("kv_format=auto",), "keys and values as the model computes them", _kv_format),
    Ablation("speculation", ("drafter=none",), "one token a step", _speculating),
    Ablation("batch-invariance", ("batch_invariant=false",), "sums depend on the batch", _invariant),
)


def defined(texts: Sequence[str], path: str) -> list[Ablation]:
    """Return the user's own parts: of ``NAME:KEY=VALUE`` texts, and of a TOML or YAML file with a table for each part.

    A part's settings are those that take it away.  Several texts of one name are one part.  ConfigError for a text of
    another form, for a table that is empty or holds no settings, and for the name of a built-in part.
    """
    found: dict[str, list[str]] = {}
    if path:
        for name, table in files_of_config.read_file(path).values.items():
            if not isinstance(table, Mapping) or not table:
                raise ConfigError(f"{path}: {shown(name)}: want a table of settings that take the part away")
            found[str(name)] = [f"{key}={json.dumps(value)}" for key, value in _leaves(table)]
    for text in texts:
        name, colon, setting = text.partition(":")
        if not colon or not name.strip() or "=" not in setting:
            raise ConfigError(f"--define {shown(text)}: want NAME:KEY=VALUE, as small-batches:max_num_seqs=2")
        found.setdefault(name.strip(), []).append(setting.strip())
    built_in = {part.name for part in PARTS} | {"baseline", "nothing (again)"}
    if taken := sorted(built_in & found.keys()):
        raise ConfigError(f"{shown(taken[0])}: the name of a built-in part; want another name")
    return [Ablation(name, tuple(sets), "defined by the user", _cached) for name, sets in found.items()]


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def chosen(
    llm: Any, names: Sequence[str], own: Sequence[Ablation] = ()
) -> tuple[list[Ablation], list[tuple[str, str]]]:
    """Return the parts that are measured, and the names of the others with the reason.

    ``own``: parts of the user; where there are some and no ``names``, those alone are measured.  ConfigError of an
    unknown name, or of a part that was asked for and that cannot be taken away.
    """
    known = {part.name: part for part in (*PARTS, *own)}
    names = names or [part.name for part in own]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--part {shown(name)}: no such part.{suggest(name, known)} There are: {', '.join(known)}"
            )
        if why := known[name].why_not(llm):
            raise ConfigError(f"--part {name}: there is nothing to take away: {why}")
    parts = [known[name] for name in dict.fromkeys(names)] or list(PARTS)
    found = [(part, part.why_not(llm)) for part in parts]
    return [part for part, why in found if not why], [(part.name, why) for part, why in found if why]


def recompute(llm: Any, asks: Sequence[BenchAsk], temperature: float, seed: int) -> tuple[list[TimedAnswer], float]:
    """What ``offline.generate`` does, without keeping keys and values from one token to the next: the tokens of all
    requests that still want one are asked for together, in requests whose prompts are all that is known.  Draws have
    the seeds of ``offline.generate`` but another position, so that sampled tokens differ; greedy ones do not."""
    known: list[list[int]]
    known = [llm.tokenizer.encode(a.prompt) if isinstance(a.prompt, str) else list(a.prompt) for a in asks]
    answers = [TimedAnswer(prompt_tokens=len(ids)) for ids in known]
    seconds, left = 0.0, list(range(len(asks)))
    while left:
        turn = [BenchAsk(tuple(known[i]), 1) for i in left]
        found, took = offline.generate(llm, turn, temperature, seed)
        for i, one in zip(left, found, strict=True):
            answers[i].ttft = answers[i].ttft or seconds + one.ttft
            answers[i].latency = seconds + one.latency
            answers[i].token_ids += one.token_ids
            answers[i].output_tokens += 1
            known[i] += one.token_ids
        seconds += took
        left = [i for i in left if answers[i].output_tokens < asks[i].max_tokens]
    return answers, seconds
