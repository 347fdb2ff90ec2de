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


@dataclass(frozen=True)
class ComparedCase:
    """One row of the table: a configuration with an evictor and a scheduler.

    ``evictor`` None means Belady's optimum.  ``options`` are texts of the options that the command line gives to the
    evictor and the scheduler; the table shows them behind the names.
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
        sizes = {"blocks": self.sizes.blocks, "block_size": self.sizes.block}
        return {"config": self.label, "evictor": evictor, "scheduler": scheduler, **sizes}


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
                replaced = {}
                for seam, choice in (("evictor", evictor), ("scheduler", scheduler)):
                    if choice and not _is_configured(loaded.engine, seam, choice):
                        replaced[seam] = choice
                origins = {key: file for key, file in loaded.origins.items() if key.partition(".")[0] not in replaced}
                origins |= {seam: f"--{seam}" for seam in replaced}
                parts = choose_seams(loaded.engine.model_copy(update=replaced), catalog, SEAMS, origins)
                options = (options_text(evictor), options_text(scheduler))
                own.append(ComparedCase(label, parts["evictor"], parts["scheduler"], sizes, options))
        found += own
        if optimum:
            by_scheduler: dict[str, ComparedCase] = {}
            for case in own:
                by_scheduler.setdefault(case.names[1], case)
            found += [replace(case, evictor=None) for case in by_scheduler.values()]
    return found


def _is_configured(config: EngineConfig, seam: str, choice: PluginChoice) -> bool:
    """Return whether a choice is a name without options, and the name that the configuration has."""
    return choice.model_fields_set == {"name"} and choice.name == getattr(config, seam).name


def options_text(choice: PluginChoice | None) -> str:
    """Return the options of a choice as shown behind its name, "" if it has none."""
    if choice is None or not choice.options:
        return ""
    return f" ({', '.join(f'{key}={value}' for key, value in choice.options.items())})"


def _sizes(trace: Trace, config: EngineConfig, blocks: str, alone: bool, distinct: dict[int, int]) -> ServeSizes:
    """Return the sizes of a configuration; for ``blocks``, ``alone`` see ``cases``, for ``distinct`` ``_blocks``."""
    trace_block = trace.unit if alone else 0
    block = config.kvcache_block_size or trace_block or DEFAULT_BLOCK
    longest = config.max_model_len or int((trace.prompt + trace.output).max())
    count = _blocks(trace, config.num_kvcache_blocks, blocks, block, distinct)
    limits = (config.max_num_seqs, config.max_num_batched_tokens, longest)
    copies = config.num_state_checkpoints
    checkpoints = copies if copies >= 0 else None
    prefix, partial = config.enable_prefix_caching, config.partial_prefix_hits
    return ServeSizes(*limits, block, count, prefix, partial, checkpoints=checkpoints)


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
        distinct[block] = len({key for i in range(len(trace)) for key in trace.chain(i, block)})
    return max(1, int(share * distinct[block]))


def run_alone(trace: Trace, found: Sequence[ComparedCase]) -> list[dict[str, Any]]:
    """Run each case on the cache alone and return its results, counted in blocks."""
    chains: dict[int, list[list[int]]] = {}  # by block size
    rows = []
    for case in found:
        block = case.sizes.block
        if block not in chains:
            chains[block] = [trace.chain(i, block) for i in range(len(trace))]
        if case.evictor is None:
            run = run_optimum(chains[block], case.sizes.blocks, block)
        else:
            run = run_cache(chains[block], case.sizes.blocks, block, constructor("evictor", case.evictor))
        asked = int(run.asked.sum())
        row = {**case.head, "scheduler": "-", "hit_rate": run.rate}
        row |= {"hit_blocks": int(run.hits.sum()), "asked_blocks": asked, "evictions": run.evictions}
        row["evictor_us_per_block"] = 1e6 * run.seconds / max(1, asked)
        rows.append(row)
    return _add_optimum_shares(rows)


def run_engine(
    trace: Trace, found: Sequence[ComparedCase], seconds_per_step: float, report: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run each case on the engine and return its results; ``report`` receives the name of each case before it runs."""
    rows = []
    for case in found:
        report(" ".join((case.label, *case.names)))
        evictor = None if case.evictor is None else constructor("evictor", case.evictor)
        run = serve(trace, case.sizes, constructor("scheduler", case.scheduler), evictor, seconds_per_step)
        rows.append({**case.head, **figures(run)})
    return _add_optimum_shares(rows)


def constructor(seam: str, part: Part) -> Any:
    """Return a function that constructs a plug-in from its context."""
    return lambda ctx: build_part(seam, part, ctx)


def figures(run: ServeRun) -> dict[str, Any]:
    """Return the results of a run: counts, shares, distributions in steps, and host microseconds per step."""
    served = run.queued >= 0

    def per_step(seconds: float) -> float:
        return 1e6 * seconds / max(1, run.steps)

    return {
        "requests": int(served.sum()),
        "refused": run.refused,
        "steps": run.steps,
        "hit_rate": run.hit_rate,
        "computed_tokens": run.computed,
        "evictions": run.evictions,
        "preemptions": run.preemptions,
        "queue_steps": _distribution(run.queued[served]),
        "first_token_steps": _distribution(run.first[served]),
        "last_token_steps": _distribution(run.done[served]),
        "host_us_per_step": {name: per_step(s) for name, s in run.part_s.items() if name != "wait"},
        "seam_us_per_step": {name: per_step(s) for name, s in sorted(run.seam_s.items())},
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_s,
        **{f"{FIGURE}{name}": value for name, value in run.figures.items()},
    }


def _distribution(steps: np.ndarray) -> dict[str, float]:
    """Return the mean, two percentiles and the maximum of some counts, {} if there are none."""
    if not len(steps):
        return {}
    p50, p99 = np.percentile(steps, [50, 99])
    return {"mean": float(steps.mean()), "p50": float(p50), "p99": float(p99), "max": float(steps.max())}


def _add_optimum_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each hit rate as a share of the optimum's, where a row of the same configuration and scheduler has it."""
    best = {(row["config"], row["scheduler"]): row["hit_rate"] for row in rows if row["evictor"] == OPTIMUM}
    for row in rows:
        rate = best.get((row["config"], row["scheduler"]))
        if rate:
            row["of_optimum"] = row["hit_rate"] / rate
    return rows


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
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    aligned = []
    for line in texts:
        names = [cell.ljust(width) for cell, width in zip(line[:3], widths[:3], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(line[3:], widths[3:], strict=True)]
        aligned.append("  ".join([*names, *numbers]).rstrip())
    return "\n".join(aligned)


def _engine_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a run of the engine, by column."""
    host = row["host_us_per_step"]
    seams = row["seam_us_per_step"]
    return {
        "preempted": str(row["preemptions"]),
        "steps": str(row["steps"]),
        "queued p50 p99 max": _percentile_cell(row["queue_steps"]),
        "first token": _percentile_cell(row["first_token_steps"]),
        "plan us": f"{host['plan']:.0f}",
        "publish us": f"{host['publish']:.0f}",
        "scheduler us": f"{seams.get('scheduler', 0):.1f}",
        "evictor us": f"{seams.get('evictor', 0):.1f}",
        "cpu s": f"{row['cpu_seconds']:.1f}",
    }


def _percentile_cell(steps: Mapping[str, float]) -> str:
    return f"{steps['p50']:.0f} {steps['p99']:.0f} {steps['max']:.0f}" if steps else "-"
