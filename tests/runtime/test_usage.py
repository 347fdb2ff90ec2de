"""Statistics of use: off unless switched on, sums alone, whole whoever writes, bounded, and never in a run's way."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.runtime import usage

SIM = {"device": "cpu", "num_kvcache_blocks": 64, "max_num_seqs": 4, "executor": "sim"}
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def ran(count: int = 1, **options) -> None:
    with LLM("pocket", **SIM, **options) as llm:
        for _ in range(count):
            llm.generate("a secret of mine", PARAMS, use_tqdm=False)


def kept() -> dict:
    return json.loads(usage.path().read_text())


def test_nothing_is_kept_before_it_is_switched_on(home, capsys):
    ran()
    assert list(home.iterdir()) == []
    assert main(["stats"]) == 0
    assert capsys.readouterr().out.startswith("usage statistics: off; nothing is kept; nothing leaves this machine\n")
    assert list(home.iterdir()) == [] and main(["stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["on"] is False and list(home.iterdir()) == []


def test_runs_are_summed_by_model_day_and_part_without_a_word_of_what_was_asked(home, capsys):
    assert main(["stats", "on"]) == 0
    ran(2)
    ran(1, scheduler="prefill-first")
    found = kept()
    whole = found["totals"]
    assert (whole["runs"], whole["requests"], whole["output_tokens"]) == (2, 3, 15) and whole["seconds"] > 0
    assert found["models"] == {"pocket": whole} and list(found["days"].values()) == [whole]
    assert found["parts"]["scheduler"] == {
        "minivllm/fcfs": {"runs": 1, "output_tokens": 10},
        "minivllm/prefill-first": {"runs": 1, "output_tokens": 5},
    }
    assert "minivllm/penalties" in found["parts"]["processor"] and "secret" not in usage.path().read_text()
    assert stat.S_IMODE(os.stat(usage.path()).st_mode) == 0o600
    capsys.readouterr()
    assert main(["stats"]) == 0
    reported = capsys.readouterr().out
    assert (
        "usage statistics: on" in reported
        and "2 runs, 3 requests" in reported
        and "minivllm/prefill-first 5" in reported
    )


def test_switched_off_nothing_is_added_and_deleted_nothing_is_left(home, capsys):
    main(["stats", "on"])
    ran()
    main(["stats", "off"])
    before = kept()
    ran()
    assert kept() == before and before["totals"]["runs"] == 1 and before["on"] is False
    main(["stats", "on"])
    with LLM("pocket", **SIM) as llm:
        llm.generate("x", PARAMS, use_tqdm=False)
        assert main(["stats", "delete"]) == 0
    assert list(home.iterdir()) == []  # a running process does not create it again
    assert main(["stats", "delete"]) == 0 and capsys.readouterr().out.endswith("nothing was kept\n")


def test_processes_that_write_at_once_lose_nothing():
    usage.switch(True)
    code = (
        "from minivllm import usage\n"
        "for _ in range(25):\n"
        "    with usage._locked(60) as held:\n"
        "        kept = usage.read()\n"
        "        usage.add(kept, dict.fromkeys(usage.SUMS, 1), 'm', {'scheduler': ['s']})\n"
        "        usage._write(kept)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    while any(one.poll() is None for one in running):
        assert usage.read() is not None  # whole at any moment
    assert [one.returncode for one in running] == [0] * 4 and kept()["totals"]["runs"] == 100


def test_a_run_writes_meanwhile_and_counts_nothing_twice(monkeypatch):
    monkeypatch.setattr(usage, "EVERY", 0.0)
    usage.switch(True)
    with LLM("pocket", **SIM) as llm:
        for number in range(1, 4):
            llm.generate("x", PARAMS, use_tqdm=False)
            assert kept()["totals"]["requests"] == number
    assert kept()["totals"]["output_tokens"] == 15 and kept()["totals"]["runs"] == 1


def test_the_file_is_bounded_and_what_is_used_least_becomes_others():
    found = usage.empty()
    for number in range(3 * usage.MOST):
        sums = dict.fromkeys(usage.SUMS, number)
        usage.add(found, sums, "x" * 500 + f"model {number}", {"evictor": [f"e{number}"]})
    found["days"] = {f"{2000 + n // 300:04}-{n % 300:03}": {} for n in range(2 * usage.DAYS)}
    usage.add(found, dict.fromkeys(usage.SUMS, 0), "m", {})
    assert len(found["models"]) == usage.MOST and len(found["parts"]["evictor"]) == usage.MOST
    assert len(found["days"]) == usage.DAYS and max(map(len, found["models"])) == usage.LONGEST
    whole = sum(range(3 * usage.MOST))
    assert sum(sums["output_tokens"] for sums in found["models"].values()) == whole == found["totals"]["output_tokens"]
    assert sum(sums["output_tokens"] for sums in found["parts"]["evictor"].values()) == whole


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', '{"format": "minivllm-usage", "version": 9}'])
def test_a_file_that_is_none_of_ours_is_named_and_ends_no_run(text, caplog, capsys):
    usage.path().parent.mkdir()
    usage.path().write_text(text)
    ran()
    assert "usage is not counted" in caplog.text and usage.path().read_text() == text
    assert main(["stats"]) == 2 and str(usage.path()) in capsys.readouterr().err
    assert main(["stats", "delete"]) == 0


def test_a_folder_that_cannot_be_written_is_refused_by_the_command_and_ends_no_run(home, monkeypatch, capsys):
    (home / "minivllm").write_text("a file where a folder is wanted")
    assert main(["stats", "on"]) == 2 and "usage statistics cannot be kept there" in capsys.readouterr().err
    ran()
    (home / "minivllm").unlink()
    usage.switch(True)
    monkeypatch.setattr(usage, "_write", lambda kept: (_ for _ in ()).throw(OSError("disk full")))
    ran()


def test_a_relative_data_folder_counts_not(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usage.path() == tmp_path / ".local" / "share" / "minivllm" / "usage.json"
