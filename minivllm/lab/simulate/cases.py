"""Simulate configurations on the machine that a table of costs was measured on, and bounds to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minivllm.config import Loaded
from minivllm.config.resolve import choose_seams
from minivllm.core.engine.engine import Engine
from minivllm.core.interfaces.executor import Part
from minivllm.errors import ConfigError
from minivllm.lab.replay.compare import constructor
from minivllm.lab.replay.serve import ServeSizes, engine_for
from minivllm.lab.traces.trace import Trace, tokens_within
from minivllm.plugins.executor.clocks import ModelClock, RealClock
from minivllm.plugins.executor.costs import CostTable
from minivllm.registry import Catalog

from .device import UNSAID, Simulated
from .drive import TraceClock, TraceOutcome, drive
from .leap import leap, turn

SHORTEST = "shortest-job"


@dataclass(frozen=True)
class SimulatedCase:
    """One row of the table: a configuration with an evictor and a scheduler.

    ``evictor`` None means Belady's rule.  ``options`` are the texts of command-line options of the evictor and the
    scheduler; the table shows them after the names.  ``known`` passes the length of each answer to the scheduler.
    ``predictor`` predicts the lengths of answers; None means no predictions.
    """

    label: str
    loaded: Loaded
    evictor: Part | None
    scheduler: Part
    sizes: ServeSizes
    options: tuple[str, str] = ("", "")
    known: bool = False
    predictor: Part | None = None

    @property
    def head(self) -> dict[str, Any]:
        """Return the fields of a result that describe the case."""
        evictor_options, scheduler_options = self.options
        scheduler = self.scheduler.name.removeprefix("minivllm/")
        scheduler += " (lengths known)" if self.known else scheduler_options
        if self.predictor is not None:
            name = self.predictor.name.removeprefix("minivllm/")
            scheduler += f" + {name}"
            scheduler += _shown(self.predictor.options)
        evictor = "optimum"
        if self.evictor is not None:
            evictor = self.evictor.name.removeprefix("minivllm/") + evictor_options
        return {"config": self.label, "scheduler": scheduler, "evictor": evictor}


def cases(
    configs: Sequence[tuple[str, Loaded]],
    costs: CostTable,
    warn: Callable[[str], None],
    oracles: bool = False,
    options: Sequence[tuple[str, str]] = (),
) -> list[SimulatedCase]:
    """Return a case for each configuration.

    ``oracles`` adds for each a case with Belady's evictor, and a case whose scheduler runs the shortest answer first.
    ``options`` holds the shown options of each configuration (``SimulatedCase``).  ``warn`` receives warnings about
    sizes beyond the table of costs.  Raise ConfigError for a configuration with a drafter.
    """
    found: list[SimulatedCase] = []
    texts = options or [("", "")] * len(configs)
    for (label, loaded), shown in zip(configs, texts, strict=True):
        config = loaded.engine
        catalog = Catalog.discover(allow_targets=config.allow_targets)
        if config.drafter.name not in ("auto", "none"):
            raise ConfigError(f"{label}: drafts have no table of costs; set drafter=none")
        parts = choose_seams(config, catalog, ("evictor", "scheduler", "predictor"), loaded.origins)
        predictor: Part | None = parts["predictor"]
        if parts["predictor"].name == "minivllm/none":
            predictor = None
        sizes = sizes_of(label, loaded, costs, warn)
        case = SimulatedCase(label, loaded, parts["evictor"], parts["scheduler"], sizes, shown, predictor=predictor)
        found.append(case)
        if oracles:
            found.append(replace(case, evictor=None))
            choice = type(config.scheduler)(name=SHORTEST)
            shortest = config.model_copy(update={"scheduler": choice})
            parts = choose_seams(shortest, catalog, ("scheduler",), {})
            found.append(replace(case, scheduler=parts["scheduler"], known=True, predictor=None))
    # configurations that differ only in other plug-ins have equal bounds, which one run gives
    distinct: dict[str, SimulatedCase] = {}
    for case in found:
        key = (case.head, case.evictor, case.scheduler, case.predictor)
        distinct.setdefault(repr(key), case)
    return list(distinct.values())


def _shown(options: Mapping[str, Any]) -> str:
    """Return the options of a plug-in as ``{name: value}``, "" if there are none."""
    if not options:
        return ""
    texts = [f"{name}: {value}" for name, value in options.items()]
    inner = ", ".join(texts)
    return "{" + inner + "}"


def sizes_of(label: str, loaded: Loaded, costs: CostTable, warn: Callable[[str], None]) -> ServeSizes:
    """Return the sizes of a configuration.  Missing sizes are those of the engine that was measured for the table.

    ``warn`` is called with a warning if a step can be larger than all steps that were measured for the table.
    """
    config = loaded.engine
    measured = costs.engine
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(config, name) > int(measured[name]):
            warn(
                f"{label}: {name}={getattr(config, name)}, and the table was measured up to {measured[name]}: "
                "the costs of larger steps are extrapolated from its last two points"
            )
    measured_block = int(measured["kvcache_block_size"])
    block = config.kvcache_block_size or measured_block
    blocks = config.num_kvcache_blocks
    if blocks <= 0:
        tokens = int(measured["num_kvcache_blocks"]) * measured_block
        blocks = tokens // block
    depth = config.run_ahead
    if depth is None:
        depth = int(measured["depth"])
    checkpoints = measured.get("state_checkpoints")
    if config.num_state_checkpoints >= 0:
        if checkpoints is None:
            raise ConfigError(
                f"{label}: num_state_checkpoints={config.num_state_checkpoints}: the table was measured with a model "
                "without recurrent states; remove the option"
            )
        checkpoints = config.num_state_checkpoints
    if checkpoints is not None:
        checkpoints = int(checkpoints)
    return ServeSizes(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len or int(measured["max_model_len"]),
        block,
        blocks,
        config.enable_prefix_caching,
        config.partial_prefix_hits,
        depth,
        tuple(measured["windows"]),
        checkpoints,
        config.tpot_target_ms,
    )


def at_rate(trace: Trace, rate: float) -> Trace:
    """Return the trace with arrivals ``rate`` times as fast; an infinite rate means that all arrive at once."""
    return replace(trace, arrival=trace.arrival / rate)


def simulate(
    case: SimulatedCase, trace: Trace, costs: CostTable, answers: bool = True, leaping: bool = True
) -> TraceOutcome:
    """Simulate a case on a trace, and return its results.

    ``answers`` means that prompts which contain earlier answers find them in the cache.  ``leaping`` simulates
    predictable steps without turns of the engine's loop, which is much faster and gives the same results.
    """
    clock = ModelClock()
    sent = 0
    device = Simulated(trace, case.sizes, costs, clock, answers)
    evictor = None if case.evictor is None else constructor("evictor", case.evictor)
    scheduler = constructor("scheduler", case.scheduler)
    predictor = None if case.predictor is None else constructor("predictor", case.predictor)
    engine = engine_for(device, case.sizes, scheduler, evictor, clock.now, lambda: sent, predictor)

    def set_sent(n: int) -> None:
        nonlocal sent
        sent = n

    fast: dict[str, Any] = {}
    learns = engine.planner.budget is not None or engine.predictions is not None  # from every step
    if leaping and not learns:
        fast["leap"] = lambda until: leap(engine, device, clock, until)
        fast["turn"] = lambda: turn(engine, device)
    run = drive(engine, trace, clock, trace.tokens, set_sent, case.known, costs.add, **fast)
    return replace(run, busy=device.busy)


def run_really(engine: Engine, trace: Trace, clock: TraceClock | None = None) -> TraceOutcome:
    """Run the trace on a real engine in real time, and return its results.

    ``clock`` is the engine's own clock if it has one.  The model's tokens differ from the trace's, so prompts do not
    find earlier answers in the cache.  All prompts are built before the run, because a server does not do this work.
    """
    width = min(engine.capacity.vocab_size, UNSAID)
    prompts = [tokens_within(trace.tokens(i), width) for i in range(len(trace))]
    return drive(engine, trace, clock or RealClock(), prompts.__getitem__)


def warm(engine: Engine, trace: Trace) -> None:
    """Run a few requests with other prompts, since the first calls of an engine allocate memory and compile kernels."""
    most = min(len(trace), 2 * engine.wiring.max_num_seqs, 32)
    few = trace.part(0, most)
    other = replace(few, arrival=few.arrival * 0, output=np.minimum(few.output, 8))
    width = min(engine.capacity.vocab_size, UNSAID)
    drive(engine, other, RealClock(), lambda i: tokens_within(few.tokens(i) + 1_000_003, width))
