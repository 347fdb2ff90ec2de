"""The cores and the memory that control groups allow."""

from __future__ import annotations

import os

import pytest

from minivllm import limits
from minivllm.device import hardware

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that writes files of a machine with 64 cores, by their paths."""
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    monkeypatch.setattr(limits, "_cores", lambda: 64)

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


TOP, OWN = "sys/fs/cgroup", "sys/fs/cgroup/box/inner"
GROUPS = {"proc/self/cgroup": "4:memory:/other\n0::/box/inner\n"}
CORES = {
    "no control groups": ({}, 64),
    "no limit": ({f"{TOP}/cpu.max": "max 100000\n"}, 64),
    "a container": ({f"{TOP}/cpu.max": "200000 100000\n"}, 2),
    "a part of a core": ({f"{TOP}/cpu.max": "50000 100000\n"}, 1),
    "one and a half": ({f"{TOP}/cpu.max": "150000 100000\n"}, 2),
    "more than the machine has": ({f"{TOP}/cpu.max": "9000000 100000\n"}, 64),
    "the own group": ({**GROUPS, f"{OWN}/cpu.max": "300000 100000\n"}, 3),
    "a parent": ({**GROUPS, f"{OWN}/cpu.max": "max 100000\n", f"{TOP}/box/cpu.max": "500000 100000\n"}, 5),
    "another group": ({**GROUPS, f"{TOP}/elsewhere/cpu.max": "100000 100000\n"}, 64),
    "version 1": ({f"{TOP}/cpu/cpu.cfs_quota_us": "400000\n", f"{TOP}/cpu/cpu.cfs_period_us": "100000\n"}, 4),
    "version 1 without a limit": (
        {f"{TOP}/cpu/cpu.cfs_quota_us": "-1\n", f"{TOP}/cpu/cpu.cfs_period_us": "100000\n"},
        64,
    ),
    "unreadable": ({f"{TOP}/cpu.max": "?\n"}, 64),
}


@pytest.mark.parametrize("case", CORES)
def test_usable_cores_are_those_that_every_control_group_allows(case, machine):
    files, cores = CORES[case]
    machine(**files)
    assert limits.usable_cores() == cores


def test_usable_cores_without_control_groups_are_those_of_the_affinity(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    assert limits.usable_cores() == len(os.sched_getaffinity(0))


def test_openmp_has_a_thread_for_each_allowed_core_unless_the_user_gives_a_number(machine):
    environ: dict[str, str] = {}
    limits.limit_threads(environ)
    assert not environ and not limits.threads_given(environ)
    machine(**{f"{TOP}/cpu.max": "200000 100000\n"})
    limits.limit_threads(environ)
    assert environ == {"OMP_NUM_THREADS": "2"} and not limits.threads_given(environ)
    environ = {"OMP_NUM_THREADS": "5"}
    limits.limit_threads(environ)
    assert environ == {"OMP_NUM_THREADS": "5"} and limits.threads_given(environ)


STAT = "anon 5\ninactive_file 1073741824\nactive_file 7\n"
MEMORY = {
    "no control groups": ({}, None, None),
    "no limit": (
        {f"{TOP}/memory.max": "max\n", f"{TOP}/memory.current": "5\n", f"{TOP}/memory.stat": STAT},
        None,
        None,
    ),
    "a container": (
        {f"{TOP}/memory.max": f"{8 * GIB}\n", f"{TOP}/memory.current": f"{6 * GIB}\n", f"{TOP}/memory.stat": STAT},
        8 * GIB,
        3 * GIB,
    ),
    "version 1": (
        {
            f"{TOP}/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            f"{TOP}/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{TOP}/memory/memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB}\n",
        },
        4 * GIB,
        2 * GIB,
    ),
    "version 1 without a limit": (
        {
            f"{TOP}/memory/memory.limit_in_bytes": "9223372036854771712\n",
            f"{TOP}/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{TOP}/memory/memory.stat": "cache 1\n",
        },
        None,
        None,
    ),
}


@pytest.mark.parametrize("case", MEMORY)
def test_allowed_memory_is_the_limit_without_what_is_in_use(case, machine):
    files, limit, allowed = MEMORY[case]
    machine(**files)
    assert limits.memory_limit() == limit and limits.allowed_memory() == allowed


def test_free_memory_is_at_most_what_the_control_group_allows(machine):
    free = hardware.free_ram()
    assert free > 64 << 20
    total = {f"{TOP}/memory.max": f"{64 << 20}\n", f"{TOP}/memory.current": "0\n", f"{TOP}/memory.stat": "anon 0\n"}
    machine(**total)
    assert hardware.free_ram() == 64 << 20
    assert hardware.find_device("cpu").memory == 64 << 20
