"""The progress of loading and capturing: reports from every process, bars on a terminal, lines in a log."""

import io
import logging
import sys
import time

import pytest

from minivllm import LLM
from minivllm.core import progress
from minivllm.frontend import progress_display
from minivllm.frontend.progress_display import Bars, LogLines, shown


def test_reports_reach_the_newest_listener_until_its_block_ends():
    first, second = [], []
    progress.report("a", 0, 1)
    with progress.listening(lambda *found: first.append(found)):
        progress.report("a", 1, 2)
        with progress.listening(lambda *found: second.append(found)):
            assert list(progress.counted("b", "xy")) == ["x", "y"]
        progress.report("a", 2, 2)
    progress.report("a", 3, 3)
    assert first == [("a", 1, 2), ("a", 2, 2)] and second == [("b", 0, 2), ("b", 1, 2), ("b", 2, 2)]


def test_thinned_reports_have_the_first_and_the_last_of_each_stage():
    found = []
    listener = progress.thinned(lambda *report: found.append(report))
    for stage in ("a", "b"):
        for done in range(1001):
            listener(stage, done, 1000)
    for stage in ("a", "b"):
        mine = [report for report in found if report[0] == stage]
        assert mine[0] == (stage, 0, 1000) and mine[-1] == (stage, 1000, 1000) and len(mine) < 100


@pytest.mark.parametrize("executor", ["local", "process", "multiprocess"])
def test_the_weights_are_counted_to_their_size_in_every_executor(executor):
    found = []
    with progress.listening(lambda *report: found.append(report)):
        LLM(model="pocket", device="cpu", executor=executor, max_num_seqs=2, num_kvcache_blocks=20).close()
    weights = [(done, total) for stage, done, total in found if stage == progress.WEIGHTS]
    assert weights[0][0] == 0 and weights[-1][0] == weights[-1][1] > 1_000_000
    assert weights == sorted(weights) and len({total for _, total in weights}) == 1


def test_a_bar_shows_the_bytes_and_is_removed_at_the_end(monkeypatch):
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", out)
    with shown(quiet=False):
        for done in range(0, 5 << 20, 1 << 20):
            progress.report(progress.WEIGHTS, done, 4 << 20)
            time.sleep(0.12)
        progress.report(progress.CAPTURES, 1, 3)
    assert "weights:  75%" in out.getvalue() and "3.00M/4.00M" in out.getvalue() and "captures:  33%" in out.getvalue()
    assert out.getvalue().endswith("\r") and not out.getvalue().split("\r")[-2].strip()


def test_log_lines_are_not_mixed_with_a_bar(monkeypatch):
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", out)
    logger = logging.getLogger("minivllm")
    handler = logging.StreamHandler(out)
    monkeypatch.setattr(logger, "handlers", [handler])
    with shown(quiet=False):
        progress.report(progress.WEIGHTS, 1, 4)
        logger.warning("a note")
    assert logger.handlers == [handler]
    assert any(line.strip("\r ") == "a note" for line in out.getvalue().replace("\r", "\n").split("\n"))


def test_quiet_commands_and_pipes_show_nothing(monkeypatch):
    for terminal, quiet in ((False, False), (True, True)):
        out = io.StringIO()
        out.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stderr", out)
        with shown(quiet):
            progress.report(progress.WEIGHTS, 1, 4)
        assert out.getvalue() == ""


def test_a_log_gets_the_end_of_a_stage_and_a_line_now_and_then(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    display = LogLines(lambda message, **values: lines.append((message, values)))
    for done in range(26):
        display.show("weights", done, 25)
        now[0] += 1
    assert [(values["done"], values["seconds"]) for _, values in lines] == [(10, 10.0), (20, 20.0), (25, 25.0)]
    assert lines[-1][1]["sentence"] == "weights: 100 % after 25.0 s"


def test_a_stage_with_another_total_gets_a_bar_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    bars = Bars()
    bars.show("weights", 1, 4)
    bars.show("weights", 1, 8)
    assert bars._bars["weights"].total == 8
    bars.close()
    assert not bars._bars


def test_a_short_stage_leaves_no_line_in_a_log():
    lines = []
    display = LogLines(lambda message, **values: lines.append(values))
    for done in range(3):
        display.show("weights", done, 2)
    assert not lines
