"""Several configurations over one trace: what is chosen, what came of it, as a table or as JSON."""

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

from .blocks import CacheRun, run_cache, run_optimum
from .serve import ServeRun, ServeSizes, serve

OPTIMUM = "optimum"
SEAMS = ("evictor", "scheduler")


@dataclass(frozen=True)
class ComparedCase:
    """One row of the table.  ``evictor`` None is Belady's optimum.  ``told``: the options of evictor and scheduler that
    were given beside their names, behind which they are shown."""

    label: str
    evictor: Part | None
    scheduler: Part
    sizes: ServeSizes
    told: tuple[str, str] = ("", "")

    @property
    def names(self) -> tuple[str, str]:
        evictor = OPTIMUM if self.evictor is None else _short(self.evictor.name) + self.told[0]
        return evictor, _short(self.scheduler.name) + self.told[1]


def _short(label: str) -> str:
    return label.removeprefix("minivllm/")


def cases(
    trace: Trace,
    configs: Sequence[tuple[str, Loaded]],
    evictors: Sequence[PluginChoice] = (),
    schedulers: Sequence[PluginChoice] = (),
    blocks: str = "",
    alone: bool = False,
    optimum: bool = False,
) -> list[ComparedCase]:
    """Every configuration, with every evictor and scheduler that is named beside it.  ``blocks``: how many, or ``10%``
    of the trace's distinct ones.  ``alone``: the cache alone, which may count blocks as the trace does."""
    found: list[ComparedCase] = []
    distinct: dict[int, int] = {}
    for label, loaded in configs:
        config, catalog = loaded.engine, Catalog.discover(allow_targets=loaded.engine.allow_targets)
        sizes = _sizes(trace, config, blocks, alone, distinct)
        swaps = [(e, s) for s in tuple(schedulers) or (None,) for e in tuple(evictors) or (None,)]
        for evictor, scheduler in swaps:
            over = {k: v for k, v in (("evictor", evictor), ("scheduler", scheduler)) if v and not _own(config, k, v)}
            origins = {k: v for k, v in loaded.origins.items() if k.partition(".")[0] not in over}
            origins |= {seam: f"--{seam}" for seam in over}
            parts = choose_seams(config.model_copy(update=over), catalog, SEAMS, origins)
            told = (options_text(evictor), options_text(scheduler))
            found.append(ComparedCase(label, parts["evictor"], parts["scheduler"], sizes, told))
        if optimum:
            first: dict[str, ComparedCase] = {}
            for case in found:
                if case.label == label:
                    first.setdefault(case.names[1], case)
            found += [replace(case, evictor=None) for case in first.values()]
    return found


def _own(config: EngineConfig, seam: str, choice: PluginChoice) -> bool:
    """Whether a choice is a name alone, and the one that the configuration has."""
    return choice.model_fields_set == {"name"} and choice.name == getattr(config, seam).name


def options_text(choice: PluginChoice | None) -> str:
    """The options of a choice as they stand behind its name, "" if it has none."""
    given = choice.options if choice is not None else {}
    return f" ({', '.join(f'{key}={value}' for key, value in given.items())})" if given else ""


def _sizes(trace: Trace, config: EngineConfig, blocks: str, alone: bool, distinct: dict[int, int]) -> ServeSizes:
    block = config.kvcache_block_size or (trace.unit if alone and trace.unit else DEFAULT_BLOCK)
    return ServeSizes(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len or int((trace.prompt + trace.output).max()),
        block,
        _blocks(trace, config.num_kvcache_blocks, blocks, block, distinct),
        config.enable_prefix_caching,
        config.partial_prefix_hits,
    )


def _blocks(trace: Trace, configured: int, asked: str, block: int, distinct: dict[int, int]) -> int:
    if not asked:
        if configured > 0:
            return configured
        raise ConfigError(
            "num_kvcache_blocks is not set, and a replay has no device whose memory says how many fit: set it, or give "
            "--blocks N or --blocks 10% (of the distinct blocks in the trace)"
        )
    try:
        share = float(asked[:-1]) / 100 if asked.endswith("%") else 0.0
        count = 0 if share else int(asked)
    except ValueError:
        share, count = 0.0, 0
    if (not share and count < 1) or not 0 <= share <= 1:
        raise ConfigError(f"--blocks {asked}: want a positive number, or a percentage of the distinct blocks")
    if share:
        if block not in distinct:
            distinct[block] = len({key for i in range(len(trace)) for key in trace.chain(i, block)})
        count = max(1, int(share * distinct[block]))
    return count


def run_alone(trace: Trace, found: Sequence[ComparedCase]) -> list[dict[str, Any]]:
    """The cache alone, for each case; figures in blocks."""
    chains: dict[int, list[list[int]]] = {}
    rows = []
    for case in found:
        block = case.sizes.block
        if block not in chains:
            chains[block] = [trace.chain(i, block) for i in range(len(trace))]
        run: CacheRun
        if case.evictor is None:
            run = run_optimum(chains[block], case.sizes.blocks, block)
        else:
            run = run_cache(chains[block], case.sizes.blocks, block, _maker("evictor", case.evictor))
        rows.append(
            {
                **_head(case),
                "scheduler": "-",
                "hit_rate": run.rate,
                "hit_blocks": int(run.hits.sum()),
                "asked_blocks": int(run.asked.sum()),
                "evictions": run.evictions,
                "evictor_us_per_block": 1e6 * run.seconds / max(1, int(run.asked.sum())),
            }
        )
    return _of_optimum(rows)


def run_engine(
    trace: Trace, found: Sequence[ComparedCase], seconds_per_step: float, told: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """The engine for each case; ``told`` hears of each before it runs."""
    rows = []
    for case in found:
        told(" ".join((case.label, *case.names)))
        evictor = None if case.evictor is None else _maker("evictor", case.evictor)
        run = serve(trace, case.sizes, _maker("scheduler", case.scheduler), evictor, seconds_per_step)
        rows.append({**_head(case), **figures(run)})
    return _of_optimum(rows)


def _maker(seam: str, part: Part) -> Any:
    return lambda ctx: build_part(seam, part, ctx)


def _head(case: ComparedCase) -> dict[str, Any]:
    evictor, scheduler = case.names
    return {
        "config": case.label,
        "evictor": evictor,
        "scheduler": scheduler,
        "blocks": case.sizes.blocks,
        "block_size": case.sizes.block,
    }


def figures(run: ServeRun) -> dict[str, Any]:
    """A run in numbers: steps, shares, host microseconds a step."""
    served = run.queued >= 0
    us = lambda seconds: 1e6 * seconds / max(1, run.steps)  # noqa: E731
    return {
        "requests": int(served.sum()),
        "refused": run.refused,
        "steps": run.steps,
        "hit_rate": run.hit_rate,
        "computed_tokens": run.computed,
        "evictions": run.evictions,
        "preemptions": run.preemptions,
        "queue_steps": _spread(run.queued[served]),
        "first_token_steps": _spread(run.first[served]),
        "last_token_steps": _spread(run.done[served]),
        "host_us_per_step": {name: us(s) for name, s in run.part_s.items() if name != "wait"},
        "seam_us_per_step": {name: us(s) for name, s in sorted(run.seam_s.items())},
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_s,
        **{f"{FIGURE}{name}": value for name, value in run.figures.items()},
    }


def _spread(steps: np.ndarray) -> dict[str, float]:
    if not len(steps):
        return {}
    p50, p99 = np.percentile(steps, [50, 99])
    return {"mean": float(steps.mean()), "p50": float(p50), "p99": float(p99), "max": float(steps.max())}


def _of_optimum(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each hit rate as a share of the optimum's in the same place, if that was asked for."""
    place = lambda row: (row["config"], row["scheduler"])  # noqa: E731
    best = {place(row): row["hit_rate"] for row in rows if row["evictor"] == OPTIMUM}
    for row in rows:
        if best.get(place(row)):
            row["of_optimum"] = row["hit_rate"] / best[place(row)]
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text; what every row has in common is not left out, so that a line can be quoted alone."""
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("config", lambda r: r["config"]),
        ("scheduler", lambda r: r["scheduler"]),
        ("evictor", lambda r: r["evictor"]),
        ("blocks", lambda r: f"{r['blocks']} x {r['block_size']}"),
        ("hits", lambda r: f"{100 * r['hit_rate']:.2f} %"),
    ]
    if any("of_optimum" in r for r in rows):
        columns.append(("of optimum", lambda r: f"{100 * r['of_optimum']:.1f} %" if "of_optimum" in r else "-"))
    columns.append(("evicted", lambda r: str(r["evictions"])))
    if "steps" in rows[0]:
        pair = lambda d: f"{d['p50']:.0f} {d['p99']:.0f} {d['max']:.0f}" if d else "-"  # noqa: E731
        columns += [
            ("preempted", lambda r: str(r["preemptions"])),
            ("steps", lambda r: str(r["steps"])),
            ("queued p50 p99 max", lambda r: pair(r["queue_steps"])),
            ("first token", lambda r: pair(r["first_token_steps"])),
            ("plan us", lambda r: f"{r['host_us_per_step']['plan']:.0f}"),
            ("publish us", lambda r: f"{r['host_us_per_step']['publish']:.0f}"),
            ("scheduler us", lambda r: f"{r['seam_us_per_step'].get('scheduler', 0):.1f}"),
            ("evictor us", lambda r: f"{r['seam_us_per_step'].get('evictor', 0):.1f}"),
            ("cpu s", lambda r: f"{r['cpu_seconds']:.1f}"),
        ]
        if any(r["refused"] for r in rows):
            columns.append(("refused", lambda r: str(r["refused"])))
    else:
        columns.append(("us a block", lambda r: f"{r['evictor_us_per_block']:.1f}"))
    lines = [[title for title, _ in columns], *([cell(r) for _, cell in columns] for r in rows)]
    width = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    pad = lambda i, cell: cell.ljust(width[i]) if i < 3 else cell.rjust(width[i])  # noqa: E731
    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(line)).rstrip() for line in lines)
