"""What is simulated: a configuration on the machine that a table of costs was measured on, and bounds beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minivllm.config import Loaded
from minivllm.config.resolve import choose_seams
from minivllm.core.engine.engine import Engine
from minivllm.core.interfaces.executor import Part
from minivllm.errors import ConfigError
from minivllm.lab.replay.serve import ServeSizes, engine_for
from minivllm.lab.traces.trace import Trace, tokens_within
from minivllm.plugins.executor.clocks import ModelClock, RealClock
from minivllm.plugins.executor.costs import CostTable
from minivllm.registry import Catalog, build_part

from .device import UNSAID, Simulated
from .drive import TraceClock, TraceOutcome, drive
from .leap import leap, turn

SHORTEST = "shortest-job"


@dataclass(frozen=True)
class SimulatedCase:
    """One row of the table.  ``evictor`` None is Belady's rule; ``known``: the scheduler knows each answer's length.
    ``told``: the options of evictor and scheduler that were given beside their names, behind which they are shown."""

    label: str
    loaded: Loaded
    evictor: Part | None
    scheduler: Part
    sizes: ServeSizes
    told: tuple[str, str] = ("", "")
    known: bool = False

    @property
    def head(self) -> dict[str, Any]:
        short = lambda part: part.name.removeprefix("minivllm/")  # noqa: E731
        return {
            "config": self.label,
            "scheduler": short(self.scheduler) + (" (lengths known)" if self.known else self.told[1]),
            "evictor": "optimum" if self.evictor is None else short(self.evictor) + self.told[0],
        }


def cases(
    configs: Sequence[tuple[str, Loaded]],
    costs: CostTable,
    told: Callable[[str], None],
    oracles: bool = False,
    options: Sequence[tuple[str, str]] = (),
) -> list[SimulatedCase]:
    """Each configuration; ``oracles``: and each with Belady's evictor, and with the shortest answer first.
    ``options``: of each configuration what its runs show behind the names of evictor and scheduler."""
    found = []
    for (label, loaded), shown in zip(configs, options or [("", "")] * len(configs), strict=True):
        config, catalog = loaded.engine, Catalog.discover(allow_targets=loaded.engine.allow_targets)
        if config.drafter.name not in ("auto", "none"):
            raise ConfigError(f"{label}: drafts have no table of costs; set drafter=none")
        parts = choose_seams(config, catalog, ("evictor", "scheduler"), loaded.origins)
        sizes = sizes_of(label, loaded, costs, told)
        case = SimulatedCase(label, loaded, parts["evictor"], parts["scheduler"], sizes, shown)
        found.append(case)
        if oracles:
            found.append(replace(case, evictor=None))
            shortest = choose_seams(
                config.model_copy(update={"scheduler": type(config.scheduler)(name=SHORTEST)}),
                catalog,
                ("scheduler",),
                {},
            )
            found.append(replace(case, scheduler=shortest["scheduler"], known=True))
    decided = lambda case: (case.head, case.evictor, case.scheduler)  # noqa: E731
    return [case for i, case in enumerate(found) if decided(case) not in map(decided, found[:i])]  # bounds once


def sizes_of(label: str, loaded: Loaded, costs: CostTable, told: Callable[[str], None]) -> ServeSizes:
    """Of the configuration; what it leaves open is as it was where the table was measured."""
    config, measured = loaded.engine, costs.engine
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(config, name) > int(measured[name]):
            told(
                f"{label}: {name}={getattr(config, name)}, and the table was measured up to {measured[name]}: "
                "larger steps go on along its last slope"
            )
    block = config.kvcache_block_size or int(measured["kvcache_block_size"])
    fitted = int(measured["num_kvcache_blocks"]) * int(measured["kvcache_block_size"]) // block
    return ServeSizes(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len or int(measured["max_model_len"]),
        block,
        config.num_kvcache_blocks if config.num_kvcache_blocks > 0 else fitted,
        config.enable_prefix_caching,
        config.partial_prefix_hits,
        int(measured["depth"]) if config.run_ahead is None else config.run_ahead,
        tuple(measured["windows"]),
    )


def at_rate(trace: Trace, rate: float) -> Trace:
    """Arrivals ``rate`` times as fast; infinite: all at once."""
    return replace(trace, arrival=trace.arrival / rate)


def simulate(
    case: SimulatedCase, trace: Trace, costs: CostTable, answers: bool = True, leaping: bool = True
) -> TraceOutcome:
    """``answers``: later prompts hold the answers of earlier ones, where the trace says so.  ``leaping``: steps of
    which all is known are taken without turns of the loop, which decides nothing and saves a good part of the time."""
    clock, sent = ModelClock(), 0
    device = Simulated(trace, case.sizes, costs, clock, answers)
    evictor = None if case.evictor is None else _maker("evictor", case.evictor)
    engine = engine_for(device, case.sizes, _maker("scheduler", case.scheduler), evictor, clock.now, lambda: sent)

    def told(n: int) -> None:
        nonlocal sent
        sent = n

    fast: dict[str, Any] = {}
    if leaping:
        fast = {"leap": lambda until: leap(engine, device, clock, until), "turn": lambda: turn(engine, device)}
    run = drive(engine, trace, clock, trace.tokens, told, case.known, costs.add, **fast)
    return replace(run, busy=device.busy)


def _maker(seam: str, part: Part) -> Any:
    return lambda ctx: build_part(seam, part, ctx)


def run_really(engine: Engine, trace: Trace, clock: TraceClock | None = None) -> TraceOutcome:
    """The same requests on a real engine, at their real times (``clock``: the engine's own, if it has one).  Answers
    are the model's own, so no later prompt holds them.  Prompts are made before: that is no work of a server's."""
    width = min(engine.capacity.vocab_size, UNSAID)
    prompts = [tokens_within(trace.tokens(i), width) for i in range(len(trace))]
    return drive(engine, trace, clock or RealClock(), prompts.__getitem__)


def warm(engine: Engine, trace: Trace) -> None:
    """First calls allocate and compile: a few requests of other contents, which are gone when the trace begins."""
    few = trace.part(0, min(len(trace), 2 * engine.wiring.max_num_seqs, 32))
    other = replace(few, arrival=few.arrival * 0, output=np.minimum(few.output, 8))
    width = min(engine.capacity.vocab_size, UNSAID)
    drive(engine, other, RealClock(), lambda i: tokens_within(few.tokens(i) + 1_000_003, width))
