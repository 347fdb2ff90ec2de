"""Threads that compute matrix products and layers of the native CPU library, for steps that do not run as one call
(``parts.cpp``)."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from minivllm.errors import ResourceError

from . import program
from .library import ISAS


class Team:
    """The threads of this process for native products, as many as torch uses.

    ResourceError if the native library cannot be used.
    """

    def __init__(self) -> None:
        self.threads = torch.get_num_threads()
        self.process = os.getpid()
        # held while an engine uses the threads, because only one engine may use them at a time
        self.busy = threading.Lock()
        self._library = program.declared()
        self.address = self._library.minivllm_team(self.threads)
        if not self.address:
            raise ResourceError("no memory for the threads of the native part")

    def __del__(self) -> None:
        address = getattr(self, "address", None)
        # the threads belong to the process that made them; a forked child has none to end
        if address and self.process == os.getpid():
            self._library.minivllm_free_team(address)

    def run(self, function: str, *arguments: Any) -> None:
        """Call a function of ``parts.cpp`` with the threads, the instruction set and further ``arguments``."""
        with self.busy:
            getattr(self._library, f"minivllm_{function}")(self.address, ISAS.index(program.isa()), *arguments)


_teams: dict[int, Team] = {}  # process id -> team, because a forked process has no threads of its parent
_MAKING = threading.Lock()


def team() -> Team:
    """Return the threads of this process, as many as torch uses.  ResourceError as for ``Team``."""
    with _MAKING:
        made = _teams.get(os.getpid())
        if made is None or made.threads != torch.get_num_threads():
            _teams.clear()
            made = _teams[os.getpid()] = Team()
        return made
