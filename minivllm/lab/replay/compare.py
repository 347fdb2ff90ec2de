"""Compare several configurations on one trace: choose the cases, run them, and format the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minivllm.config import EngineConfig, Loaded, PluginChoice
from minivllm.config.resolve import DEFAULT_BLOCK, choose_seams
from minivllm.core.interfaces.executor import Part
from minivllm.errors import ConfigError
from minivllm.lab.traces.trace import Trace
from minivllm.registry import Catalog, build_part
from minivllm.runtime.hooks.figures import FIGURE

from .blocks import run_cache, run_optimum
from .serve import ServeRun, ServeSizes, serve

OPTIMUM = "optimum"
SEAMS = ("evictor", "scheduler")
NAMES = 3  # number of columns at the left of the table that hold names, which are aligned at the left

Results = list[dict[str, Any]]  # the results of a table, a row for each case


@dataclass(frozen=True)
class ComparedCase:
    """One row of the table: a configuration with an evictor and a scheduler.

    ``evictor`` None means Belady's optimum.  ``options`` are the texts of command-line options of the evictor and the
    scheduler; the table shows them after the names.
    """

    label: str
    evictor: Part | None
    scheduler: Part
    sizes: ServeSizes
    options: tuple[str, str] = ("", "")

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of the evictor and the scheduler as the table shows them."""
        evictor_options, scheduler_options = self.options
        scheduler = _short(self.scheduler.name) + scheduler_options
        if self.evictor is None:
            return OPTIMUM, scheduler
        return _short(self.evictor.name) + evictor_options, scheduler

    @property
    def head(self) -> dict[str, Any]:
        """Return the fields of a result that describe the case."""
        evictor, scheduler = self.names
        head: dict[str, Any] = {"config": self.label, "evictor": evictor, "scheduler": scheduler}
        head["blocks"] = self.sizes.blocks
        head["block_size"] = self.sizes.block
        return head


def _short(name: str) -> str:
    return name.removeprefix("minivllm/")


def cases(
    trace: Trace,
    configs: Sequence[tuple[str, Loaded]],
    evictors: Sequence[PluginChoice] = (),
    schedulers: Sequence[PluginChoice] = (),
    blocks: str = "",
    alone: bool = False,
    optimum: bool = False,
) -> list[ComparedCase]:
    """Return a case for each configuration, evictor and scheduler.

    Without ``evictors`` or ``schedulers`` those of the configuration are used.  ``blocks`` is the number of blocks, or
    a percentage of the trace's distinct blocks such as "10%".  ``alone`` means the cache without an engine, which may
    use the trace's block size.  ``optimum`` adds a case with Belady's optimum for each configuration and scheduler.
    """
    found: list[ComparedCase] = []
    distinct: dict[int, int] = {}
    for label, loaded in configs:
        sizes = _sizes(trace, loaded.engine, blocks, alone, distinct)
        catalog = Catalog.discover(allow_targets=loaded.engine.allow_targets)
        own = []
        for scheduler in schedulers or (None,):
            for evictor in evictors or (None,):
                parts = _chosen_parts(loaded, catalog, {"evictor": evictor, "scheduler": scheduler})
                options = (options_text(evictor), options_text(scheduler))
                own.append(ComparedCase(label, parts["evictor"], parts["scheduler"], sizes, options))
        found += own
        if optimum:
            by_scheduler: dict[str, ComparedCase] = {}
            for case in own:
                by_scheduler.setdefault(case.names[1], case)
            found += [replace(case, evictor=None) for case in by_scheduler.values()]
    return found


def _chosen_parts(loaded: Loaded, catalog: Catalog, choices: Mapping[str, PluginChoice | None]) -> dict[str, Part]:
    """Return the evictor and the scheduler of a configuration, replaced by choices of the command line."""
    config = loaded.engine
    replaced = {}
    for seam, choice in choices.items():
        if choice and not _is_configured(config, seam, choice):
            replaced[seam] = choice
    origins = {}
    for option, source in loaded.origins.items():
        seam = option.partition(".")[0]
        if seam not in replaced:
            origins[option] = source
    for seam in replaced:
        origins[seam] = f"--{seam}"
    return choose_seams(config.model_copy(update=replaced), catalog, SEAMS, origins)


def _is_configured(config: EngineConfig, seam: str, choice: PluginChoice) -> bool:
    """Return whether a choice is a name without options, and the name that the configuration has."""
    return choice.model_fields_set == {"name"} and choice.name == getattr(config, seam).name


def options_text(choice: PluginChoice | None) -> str:
    """Return the text of a choice's options that is shown after its name, or ""."""
    if choice is None or not choice.options:
        return ""
    return f" ({', '.join(f'{key}={value}' for key, value in choice.options.items())})"


def _sizes(trace: Trace, config: EngineConfig, blocks: str, alone: bool, distinct: dict[int, int]) -> ServeSizes:
    """Return the sizes of a configuration.

    ``blocks`` and ``alone`` are described at ``cases``, and ``distinct`` at ``_blocks``.
    """
    trace_block = trace.unit if alone else 0
    block = config.kvcache_block_size or trace_block or DEFAULT_BLOCK
    longest = config.max_model_len or int((trace.prompt + trace.output).max())
    count = _blocks(trace, config.num_kvcache_blocks, blocks, block, distinct)
    checkpoints: int | None = config.num_state_checkpoints
    if config.num_state_checkpoints < 0:
        checkpoints = None
    return ServeSizes(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        longest,
        block,
        count,
        config.enable_prefix_caching,
        config.partial_prefix_hits,
        checkpoints=checkpoints,
    )


def _blocks(trace: Trace, configured: int, option: str, block: int, distinct: dict[int, int]) -> int:
    """Return the number of KV blocks of the option ``--blocks``, or of the configuration if the option is "".

    ``distinct`` caches the number of distinct blocks of the trace by block size.  Raise ConfigError if neither names a
    valid number.
    """
    if not option:
        if configured > 0:
            return configured
        raise ConfigError(
            "num_kvcache_blocks is not set, and a replay has no device memory to derive it from: set it, or give "
            "--blocks N or --blocks 10% (of the distinct blocks in the trace)"
        )
    share = 0.0
    count = 0
    try:
        if option.endswith("%"):
            share = float(option[:-1]) / 100
        else:
            count = int(option)
    except ValueError:
        pass
    if count >= 1:
        return count
    if not 0 < share <= 1:
        raise ConfigError(f"--blocks {option}: expected a positive number, or a percentage of the distinct blocks")
    if block not in distinct:
        keys = set()
        for chain in _chains(trace, block):
            keys.update(chain)
        distinct[block] = len(keys)
    return max(1, int(share * distinct[block]))


def _chains(trace: Trace, block: int) -> list[list[int]]:
    """Return the chain of block keys of each request."""
    return [trace.chain(i, block) for i in range(len(trace))]


def run_alone(trace: Trace, found: Sequence[ComparedCase]) -> Results:
    """Run each case on the cache without an engine and return its results, counted in blocks."""
    chains: dict[int, list[list[int]]] = {}  # by block size
    rows = []
    for case in found:
        block = case.sizes.block
        capacity = case.sizes.blocks
        if block not in chains:
            chains[block] = _chains(trace, block)
        if case.evictor is None:
            run = run_optimum(chains[block], capacity, block)
        else:
            make = constructor("evictor", case.evictor)
            run = run_cache(chains[block], capacity, block, make)
        requested = int(run.requested.sum())
        row = case.head
        row["scheduler"] = "-"
        row["hit_rate"] = run.rate
        row["hit_blocks"] = int(run.hits.sum())
        row["asked_blocks"] = requested
        row["evictions"] = run.evictions
        row["evictor_us_per_block"] = 1e6 * run.seconds / max(1, requested)
        rows.append(row)
    return _add_optimum_shares(rows)


def run_engine(
    trace: Trace, found: Sequence[ComparedCase], seconds_per_step: float, report: Callable[[str], None] = lambda _: None
) -> Results:
    """Run each case on the engine and return its results; ``report`` receives the name of each case before it runs."""
    rows = []
    for case in found:
        report(" ".join((case.label, *case.names)))
        evictor = None if case.evictor is None else constructor("evictor", case.evictor)
        scheduler = constructor("scheduler", case.scheduler)
        run = serve(trace, case.sizes, scheduler, evictor, seconds_per_step)
        rows.append(case.head | figures(run))
    return _add_optimum_shares(rows)


def constructor(seam: str, part: Part) -> Any:
    """Return a function that constructs a plug-in from its context."""
    return lambda ctx: build_part(seam, part, ctx)


def figures(run: ServeRun) -> dict[str, Any]:
    """Return the results of a run: counts, shares, distributions in steps, and host microseconds per step."""
    served = run.queued >= 0

    def per_step(seconds: float) -> float:
        return 1e6 * seconds / max(1, run.steps)

    found: dict[str, Any] = {"requests": int(served.sum())}
    found["refused"] = run.refused
    found["steps"] = run.steps
    found["hit_rate"] = run.hit_rate
    found["computed_tokens"] = run.computed
    found["evictions"] = run.evictions
    found["preemptions"] = run.preemptions
    found["queue_steps"] = _distribution(run.queued[served])
    found["first_token_steps"] = _distribution(run.first[served])
    found["last_token_steps"] = _distribution(run.done[served])
    found["host_us_per_step"] = {name: per_step(s) for name, s in run.part_s.items() if name != "wait"}
    found["seam_us_per_step"] = {name: per_step(s) for name, s in sorted(run.seam_s.items())}
    found["seconds"] = run.seconds
    found["cpu_seconds"] = run.cpu_s
    for name, value in run.figures.items():
        found[FIGURE + name] = value
    return found


def _distribution(steps: np.ndarray) -> dict[str, float]:
    """Return the mean, two percentiles and the maximum of some counts, {} if there are none."""
    if not len(steps):
        return {}
    p50, p99 = np.percentile(steps, [50, 99])
    return {"mean": float(steps.mean()), "p50": float(p50), "p99": float(p99), "max": float(steps.max())}


def _add_optimum_shares(rows: Results) -> Results:
    """Add hit rate / hit rate of the optimum to rows whose configuration and scheduler also ran with the optimum."""
    best = {_bound_key(row): row["hit_rate"] for row in rows if row["evictor"] == OPTIMUM}
    for row in rows:
        rate = best.get(_bound_key(row))
        if rate:
            row["of_optimum"] = row["hit_rate"] / rate
    return rows


def _bound_key(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the configuration and the scheduler of a row, which share an optimum."""
    return row["config"], row["scheduler"]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as text.  Every line has all columns, so that it can be quoted alone."""
    with_optimum = any("of_optimum" in row for row in rows)
    with_refused = any(row.get("refused") for row in rows)
    lines = []
    for row in rows:
        cells = {"config": row["config"], "scheduler": row["scheduler"], "evictor": row["evictor"]}
        cells["blocks"] = f"{row['blocks']} x {row['block_size']}"
        cells["hits"] = f"{100 * row['hit_rate']:.2f} %"
        if with_optimum:
            cells["of optimum"] = f"{100 * row['of_optimum']:.1f} %" if "of_optimum" in row else "-"
        cells["evicted"] = str(row["evictions"])
        if "steps" in row:
            cells |= _engine_cells(row)
            if with_refused:
                cells["refused"] = str(row["refused"])
        else:
            cells["us a block"] = f"{row['evictor_us_per_block']:.1f}"
        lines.append(cells)
    titles = list(lines[0])
    texts = [titles, *(list(cells.values()) for cells in lines)]
    columns = []
    for number, column in enumerate(zip(*texts, strict=True)):
        width = max(map(len, column))
        align = str.ljust if number < NAMES else str.rjust
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _engine_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a run of the engine, by column."""
    host = row["host_us_per_step"]
    seams = row["seam_us_per_step"]
    cells = {"preempted": str(row["preemptions"]), "steps": str(row["steps"])}
    cells["queued p50 p99 max"] = _percentile_cell(row["queue_steps"])
    cells["first token"] = _percentile_cell(row["first_token_steps"])
    for part in ("plan", "publish"):
        cells[f"{part} us"] = f"{host[part]:.0f}"
    for seam in ("scheduler", "evictor"):
        cells[f"{seam} us"] = f"{seams.get(seam, 0):.1f}"
    cells["cpu s"] = f"{row['cpu_seconds']:.1f}"
    return cells


def _percentile_cell(steps: Mapping[str, float]) -> str:
    return f"{steps['p50']:.0f} {steps['p99']:.0f} {steps['max']:.0f}" if steps else "-"
