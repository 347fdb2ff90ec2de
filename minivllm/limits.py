"""CPU cores and memory that this process may use: its affinity, and the limits of its control groups.

A container limits its processes by control groups, while ``os.cpu_count`` and ``/proc/meminfo`` describe the whole
machine.  Version 2 has one tree of groups, version 1 a tree for each controller, and a machine may have both.  In both
versions the limits of all parents hold too.  ``cpuset`` changes the affinity.

Source: the kernel's documentation, ``admin-guide/cgroup-v2``, ``admin-guide/cgroup-v1`` and ``proc_pid_mountinfo``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")  # of the files that are read
THREADS = "OMP_NUM_THREADS"  # variable with the number of OpenMP's threads, which torch reads when it is imported


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1; a part of a core counts as one."""
    allowed = [math.ceil(quota / period) for quota, period in _quotas()]
    return max(1, min([_cores(), *allowed]))


def limit_threads(environ: MutableMapping[str, str]) -> None:
    """Set the number of OpenMP's threads in ``environ`` if control groups allow fewer cores than the machine has.

    OpenMP, and torch with it, would start a thread for each core of the machine.  A number of the user is kept."""
    if usable_cores() < _cores():
        environ.setdefault(THREADS, str(usable_cores()))


def threads_given(environ: Mapping[str, str]) -> bool:
    """Return whether the user has set the number of OpenMP's threads, and not ``limit_threads``."""
    own = str(usable_cores()) if usable_cores() < _cores() else None
    return environ.get(THREADS, own) != own


def memory_limit() -> int | None:
    """Return the largest number of bytes that the control groups of this process allow, None for no limit."""
    return min((limit for limit, _ in _memories()), default=None)


def allowed_memory() -> int | None:
    """Return the bytes of memory that the control groups still allow, None for no limit.

    Pages of files that were not used lately count as free, because the kernel drops them first."""
    return min((max(0, limit - used) for limit, used in _memories()), default=None)


def _cores() -> int:
    """Return the number of cores in the affinity of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas() -> Iterator[tuple[int, int]]:
    """Yield the CPU time in microseconds that each control group may use in a period, and the period."""
    for group in _groups("cpu"):
        with suppress(OSError, ValueError):  # ValueError for "max", which means no limit
            quota, period = (group / "cpu.max").read_text("ascii").split()
            yield int(quota), int(period)
        with suppress(OSError, ValueError):
            quota_us = _number(group / "cpu.cfs_quota_us")  # of version 1; -1 means no limit
            if quota_us > 0:
                yield quota_us, _number(group / "cpu.cfs_period_us")


def _memories() -> Iterator[tuple[int, int]]:
    """Yield the limits of the memory of each control group, and the bytes in use without inactive pages of files.

    Above ``memory.high`` the kernel slows the processes of a group down and takes their pages away."""
    for group in _groups("memory"):
        for name in ("memory.max", "memory.high"):
            with suppress(OSError, ValueError):  # ValueError for "max", which means no limit
                limit = _number(group / name)
                yield limit, _number(group / "memory.current") - _inactive(group / "memory.stat", "inactive_file")
        with suppress(OSError, ValueError):
            limit = _number(group / "memory.limit_in_bytes")
            if limit < 1 << 60:  # a larger number means no limit
                inactive = _inactive(group / "memory.stat", "total_inactive_file")
                yield limit, _number(group / "memory.usage_in_bytes") - inactive


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups of this process that may limit ``controller``, and of their parents.

    A container may see a group of the machine as the root of its tree.  Its name in the tree then begins with the name
    of that root."""
    names = {}  # controller, or "" for version 2 -> name of the own group
    with suppress(OSError, ValueError):
        for line in (ROOT / "proc/self/cgroup").read_text("utf-8", "replace").splitlines():
            _, limited, name = line.split(":", 2)
            names.update(dict.fromkeys(limited.split(","), name))
    for version, root, top, controllers in _mounts():
        if version == 1 and controller not in controllers:
            continue
        name = names.get("" if version == 2 else controller, root)
        within = name.removeprefix(root.rstrip("/")) if name.startswith(root) else ""
        own = top / within.strip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _mounts() -> Iterator[tuple[int, str, Path, list[str]]]:
    """Yield (version, name of the group at the root, folder, options) of each tree of control groups."""
    with suppress(OSError, ValueError):
        for line in (ROOT / "proc/self/mountinfo").read_text("utf-8", "replace").splitlines():
            place, _, source = line.partition(" - ")
            kind, _, options = source.split(" ", 2)
            if kind in ("cgroup", "cgroup2"):
                _, _, _, root, folder, *_ = place.split(" ")
                yield 1 + (kind == "cgroup2"), root, ROOT / folder.strip("/"), options.split(",")


def _inactive(file: Path, name: str) -> int:
    """Return the bytes of a field of a ``memory.stat`` file, 0 if there is no such field."""
    fields = (line.split() for line in file.read_text("ascii").splitlines())
    return next((int(value) for field, value in fields if field == name), 0)


def _number(file: Path) -> int:
    """Return the whole number in a file.  ValueError for "max"."""
    return int(file.read_text("ascii"))
