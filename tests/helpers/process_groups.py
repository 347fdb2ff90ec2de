"""Processes of a group, read from /proc."""

from __future__ import annotations

import os
from contextlib import suppress


def living(group, zombies=False):
    """Return the numbers of the processes of a group that have not ended.

    With ``zombies`` these are included: they have ended, and no process has waited for them."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat") as file:
            state, _, its = file.read().rpartition(")")[2].split()[:3]
            if int(its) == group and (zombies or state not in "ZX"):
                found.append(int(name))
    return found
