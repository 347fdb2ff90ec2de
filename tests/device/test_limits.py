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
        for name, text in {"proc/self/mountinfo": VERSION_2, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


TOP, OWN = "sys/fs/cgroup", "sys/fs/cgroup/box/inner"
GROUPS = {"proc/self/cgroup": "4:memory:/other\n0::/box/inner\n"}


def mounted(root, folder, kind, options):
    """Return a line of mountinfo."""
    return f"36 31 0:33 {root} /{TOP}{folder} rw,nosuid shared:9 - {kind} cgroup rw,{options}\n"


VERSION_2 = mounted("/", "", "cgroup2", "nsdelegate")
VERSION_1 = mounted("/", "/cpu,cpuacct", "cgroup", "cpu,cpuacct") + mounted("/", "/memory", "cgroup", "memory")
HYBRID = VERSION_1 + mounted("/", "/unified", "cgroup2", "nsdelegate")
# a container with the namespace of the machine, whose trees begin at its own groups
WITHIN = mounted("/pods/a", "/cpu,cpuacct", "cgroup", "cpu,cpuacct") + mounted("/pods/a", "/memory", "cgroup", "memory")


def v1(folder, quota):
    """Return the files of a group of version 1 that may use ``quota`` microseconds of CPU time in 0.1 s."""
    group = f"{TOP}/cpu,cpuacct{folder}"
    return {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"}


def tree(mounts, own):
    """Return the files that name the mounts and the process's own groups."""
    names = f"8:cpu,cpuacct:{own}\n3:memory:{own}\n1:name=systemd:/elsewhere\n0::{own}\n"
    return {"proc/self/mountinfo": mounts, "proc/self/cgroup": names}


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
    "version 1": ({**tree(VERSION_1, "/"), **v1("", 400000)}, 4),
    "version 1 without a limit": ({**tree(VERSION_1, "/"), **v1("", -1)}, 64),
    "the own group of version 1": ({**tree(VERSION_1, "/a/b"), **v1("", -1), **v1("/a/b", 300000)}, 3),
    "a parent of version 1": ({**tree(VERSION_1, "/a/b"), **v1("/a", 200000), **v1("/a/b", 300000)}, 2),
    "version 1 beside version 2": ({**tree(HYBRID, "/a"), **v1("/a", 500000)}, 5),
    "version 2 beside version 1": ({**tree(HYBRID, "/a"), f"{TOP}/unified/a/cpu.max": "600000 100000\n"}, 6),
    "a container that sees names of the machine": ({**tree(WITHIN, "/pods/a"), **v1("", 700000)}, 7),
    "a group in such a container": ({**tree(WITHIN, "/pods/a/b"), **v1("/b", 200000), **v1("", 700000)}, 2),
    "a container that sees no names": ({**tree(VERSION_2, "/"), f"{TOP}/cpu.max": "300000 100000\n"}, 3),
    "a name outside the tree": ({**tree(WITHIN, "/../x"), **v1("", 300000)}, 3),
    "no mounts": ({"proc/self/mountinfo": "", f"{TOP}/cpu.max": "100000 100000\n"}, 64),
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
    "a throttled container": (
        {
            f"{TOP}/memory.max": f"{8 * GIB}\n",
            f"{TOP}/memory.high": f"{7 * GIB}\n",
            f"{TOP}/memory.current": f"{6 * GIB}\n",
            f"{TOP}/memory.stat": STAT,
        },
        7 * GIB,
        2 * GIB,
    ),
    "a parent": (
        {
            **GROUPS,
            f"{TOP}/box/memory.max": f"{8 * GIB}\n",
            f"{TOP}/box/memory.current": f"{7 * GIB}\n",
            f"{TOP}/box/memory.stat": "anon 1\n",
            f"{OWN}/memory.max": f"{6 * GIB}\n",
            f"{OWN}/memory.current": f"{GIB}\n",
            f"{OWN}/memory.stat": "anon 1\n",
        },
        6 * GIB,
        GIB,
    ),
    "version 1": (
        {
            **tree(VERSION_1, "/"),
            f"{TOP}/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            f"{TOP}/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{TOP}/memory/memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB}\n",
        },
        4 * GIB,
        2 * GIB,
    ),
    "version 1 without a limit": (
        {
            **tree(VERSION_1, "/"),
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
