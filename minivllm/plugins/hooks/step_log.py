"""Write a line of figures for each step, as CSV or JSON lines, for analysis after an experiment."""

from __future__ import annotations

import csv
import json
import time
from typing import IO, Any

from minivllm import files
from minivllm.errors import ConfigError
from minivllm.runtime.hooks import EngineView, FinishedStep, Hooks, hookimpl

# fields of FinishedStep that are written under the same names
FIGURES = (
    "plan_ms", "submit_ms", "wait_ms", "publish_ms", "device_ms", "running", "waiting", "blocks_total", "blocks_free",
    "blocks_cached", "finished", "generated", "preemptions", "evictions", "prefix_queries", "prefix_hits", "error",
)  # fmt: skip
COLUMNS = ("step", "seconds", "rows", "tokens", "prefill_tokens", "accepted", *FIGURES)


class StepLog(Hooks):
    """A log in the file ``options.path``, which is written line by line and can be read while the engine runs.

    ``seconds`` are counted from the start of the engine.  ``prefill_tokens`` are the tokens of rows with more than one
    token.  ``accepted`` is the number of tokens that were drawn and kept.
    """

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.file: IO[str] | None = None

    @hookimpl
    def minivllm_engine_started(self, engine: EngineView) -> None:
        self.start = time.monotonic()
        path = self.options.path
        files.check_output(path, name=f"hooks step_log: {path}")
        try:
            self.file = open(path, "w", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115
        except OSError as exc:
            raise ConfigError(f"hooks step_log: {path}: {exc.strerror}") from None
        self.writer = csv.writer(self.file) if path.endswith(".csv") else None
        if self.writer is not None:
            self.writer.writerow(COLUMNS)

    @hookimpl
    def minivllm_step_finished(self, step: FinishedStep) -> None:
        if step.id % self.options.every or self.file is None:
            return
        chunks = step.q_len[step.q_len > 1]
        seconds = round(step.time - self.start, 6)
        values = [step.id, seconds, step.rows, step.tokens, int(chunks.sum()), int(step.count.sum())]
        values += [_short(getattr(step, name)) for name in FIGURES]
        if self.writer is not None:
            self.writer.writerow(values)
        else:
            line = dict(zip(COLUMNS, values, strict=True))
            self.file.write(json.dumps(line) + "\n")

    @hookimpl
    def minivllm_engine_stopped(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
