"""``minivllm doctor``: what it finds is told, and what is wrong is named, with an exit code."""

from __future__ import annotations

import re

import pytest

from minivllm.cli import doctor, main


def run_doctor(capsys, *words):
    code = main(["doctor", "--device", "cpu", *words])
    out, err = capsys.readouterr()
    return code, out + err


def test_it_tells_versions_device_memory_and_the_way_to_a_process_and_back(capsys):
    code, out = run_doctor(capsys, "--ranks", "1")
    assert code == 0 and "FAILED" not in out
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == [
        "versions",
        "device",
        "memory",
        "processes",
    ]
    assert 1 < float(re.search(r"to one and back: (\d+) us", out)[1]) < 100_000


@pytest.mark.slow
def test_ranks_meet_and_their_sums_are_right_and_timed(capsys):
    code, out = run_doctor(capsys, "--ranks", "3")
    assert code == 0 and "3 met by gloo" in out and "sums are right" in out
    assert all(0 < float(ms) < 10_000 for ms in re.findall(r": ([\d.]+) ms", out))


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_a_fault_that_is_told_within_seconds(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    code, out = run_doctor(capsys, "--seconds", "5")
    assert code == 5 and re.search(r"processes +FAILED: rank \d of 2: LostRank: the 2 ranks have not met by gloo", out)


@pytest.mark.parametrize("ranks", ["0", "9"])
def test_a_number_of_ranks_that_cannot_be_is_refused(capsys, ranks):
    assert run_doctor(capsys, "--ranks", ranks) == (5, f"minivllm: error: --ranks {ranks}: expected 1 to 8\n")


def test_a_process_that_dies_is_told_with_its_last_words_and_the_other_checks_go_on(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE", "minivllm.plugins.executor.nowhere:main")
    monkeypatch.setattr(doctor, "SIZE", 1 << 20)
    code, out = run_doctor(capsys)
    assert code == 5 and "memory     shared" in out
    assert re.search(
        r"processes +FAILED: the worker process \d+ has ended, exit code 1; its last words: .*nowhere", out
    )
