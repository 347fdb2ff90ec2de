"""Show the queue, the batch, the cache and the tokens per second of a running engine in the terminal, with rich.

The engine's thread only stores the last step.  A thread of rich draws the table.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rich.console import Console
from rich.live import Live as Display
from rich.progress_bar import ProgressBar
from rich.table import Table

from minivllm.runtime.hooks import EngineView, FinishedStep, Hooks, hookimpl

SPAN = 2.0  # seconds over which the rate is measured
SAMPLE = 0.1  # seconds between two samples
WIDTH = 30


class Live(Hooks):
    """A table in the terminal.

    It is written to standard error, because standard output has the results.  If that is no terminal, only the last
    table is written.  ``seen`` is replaced as a whole and never changed, so the drawing thread needs no lock.
    """

    def __init__(self, options: Any = None, console: Console | None = None) -> None:
        super().__init__(options)
        self.console = console
        self.display: Display | None = None
        # (time, number of generated tokens); only the engine's thread uses it
        self.samples: deque[tuple[float, int]] = deque()
        # (the last step, tokens per second now, tokens per second since the start)
        self.seen: tuple[FinishedStep, float, float] | None = None

    @hookimpl
    def minivllm_engine_started(self, engine: EngineView) -> None:
        self.engine = engine
        self.display = Display(
            get_renderable=self.table,
            console=self.console or Console(stderr=True),
            transient=not self.options.keep,
            refresh_per_second=self.options.refresh_per_second,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.display.start()

    @hookimpl
    def minivllm_step_finished(self, step: FinishedStep) -> None:
        now = step.time
        samples = self.samples
        sample = (now, step.generated)
        if not samples:
            self.first = sample
        if not samples or now - samples[-1][0] >= SAMPLE:
            samples.append(sample)
        while len(samples) > 1 and now - samples[0][0] > SPAN:
            samples.popleft()
        self.seen = step, _rate(samples[0], step), _rate(self.first, step)

    @hookimpl
    def minivllm_engine_stopped(self) -> None:
        if self.display is not None:
            self.display.stop()
            self.display = None

    def table(self) -> Table:
        """Return a table for the terminal: speed, queue, batch, cache and times of the newest finished step."""
        table = Table(show_header=False, box=None, padding=(0, 1))
        if self.seen is None:
            table.add_row("minivllm", f"{self.engine.model}: waiting for the first step")
            return table
        step, now, mean = self.seen
        used = step.blocks_total - step.blocks_free - step.blocks_cached
        hits = step.prefix_hits / step.prefix_queries if step.prefix_queries else 0.0
        prefill = int(step.q_len[step.q_len > 1].sum())
        table.add_row("tokens/s", f"{now:,.0f} now, {mean:,.0f} since the first step", f"{step.generated:,} generated")
        queue = f"{step.waiting:,} waiting, {step.finished:,} finished"
        table.add_row("queue", queue, f"{step.preemptions:,} preempted")
        slots = self.engine.max_num_seqs
        table.add_row("rows", _bar(step.running, slots), f"{step.running} of {slots}")
        table.add_row(
            "batch",
            _bar(step.tokens, self.engine.max_num_batched_tokens),
            f"{step.rows} rows, {step.tokens} tokens, {prefill} of them prefill",
        )
        table.add_row(
            "cache",
            _bar(used, step.blocks_total),
            f"{used:,} blocks in use, {step.blocks_cached:,} cached, {step.blocks_free:,} free; "
            f"{100 * hits:.0f} % prefix hits, {step.evictions:,} evicted",
        )
        parts = ("plan", "submit", "wait", "publish", "device")
        times = "  ".join(f"{part} {getattr(step, part + '_ms'):.2f}" for part in parts)
        table.add_row("ms", times, f"step {step.id:,}")
        return table


def _rate(since: tuple[float, int], step: FinishedStep) -> float:
    """Return the tokens per second between a sample and a step."""
    seconds = step.time - since[0]
    return (step.generated - since[1]) / seconds if seconds > 0 else 0.0


def _bar(value: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=value, width=WIDTH)
