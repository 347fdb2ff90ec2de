"""The machine while something is measured: energy, clock, watts, what slowed the clock, and the load of others.

Counters are those of ``minivllm.runtime.energy``.  What no counter says is None, with the reason in ``energy_unknown``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.runtime.energy.counters import Meter, Nvml, Rapl, why

from .statistics import percentile

TICKS = os.sysconf("SC_CLK_TCK")  # of a CPU second in /proc
LOOK = 0.05  # seconds between looks at the clock
CLOCKS_ALIKE = 0.03  # runs whose clocks differ by more are not compared
REASONS = {
    0x2: "set by an application", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake", 0x100: "display",
}  # fmt: skip


def find_meter(device: str, devices: int = 1) -> Meter:
    """The counter of a device ("cpu", "cuda").  OSError says why there is none, as where an engine computes on several
    GPUs: this process knows its own."""
    if device.startswith("cuda"):
        if devices > 1:
            raise OSError(f"the counter is that of one GPU, and {devices} are used")
        import torch

        return Nvml(f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")
    return Rapl()


class MachineWatch:
    """A context that notes the machine's state; ``found`` afterwards.  ``device`` None: another machine is measured,
    of which nothing is known here but this one's load.  ``devices``: how many of them compute.  ``pid``: a process that
    is no other's work, as a server that was started for the purpose, with those that it started."""

    def __init__(self, device: str | None = "cpu", pid: int | None = None, devices: int = 1) -> None:
        self.found: dict[str, Any] = {}
        self.pid = pid
        self.meter: Meter | None = None
        self.why = "another process or machine is measured"
        self._looks: list[tuple[float, float, int]] = []
        self._done = threading.Event()
        if device is not None:
            try:
                self.meter = find_meter(device, devices)
            except (OSError, ValueError) as exc:
                self.why = why(exc)

    def __enter__(self) -> MachineWatch:
        self._busy, self._start = _cpu_seconds(self.pid), time.perf_counter()
        self._joules = self.meter.joules() if self.meter else 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if isinstance(self.meter, Nvml):
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(LOOK):
            try:
                self._looks.append(self.meter.look())  # type: ignore[union-attr]
            except OSError:
                return

    def __exit__(self, *_: Any) -> None:
        joules = self.meter.joules() - self._joules if self.meter else None
        seconds = time.perf_counter() - self._start
        self._done.set()
        (whole, own), (whole_now, own_now) = self._busy, _cpu_seconds(self.pid)
        others = max(0.0, whole_now - whole - (own_now - own)) / seconds if whole else None
        self.found = {
            "seconds": seconds,
            "load_average": list(os.getloadavg()),
            "cores_of_others": None if others is None else round(others, 2),
            "energy_joules": joules,
            "energy_by": self.meter.name if self.meter else None,
            **({} if self.meter else {"energy_unknown": self.why}),
            **_clocks(self._looks),
        }


def _clocks(looks: list[tuple[float, float, int]]) -> dict[str, Any]:
    if not looks:
        return {}
    bits = 0
    for _, _, one in looks:
        bits |= one
    return {
        "mhz": percentile([mhz for mhz, _, _ in looks], 50),
        "watts": percentile([watts for _, watts, _ in looks], 50),
        "throttled_by": [word for bit, word in REASONS.items() if bits & bit],
    }


def _cpu_seconds(pid: int | None) -> tuple[float, float]:
    """CPU seconds of the whole machine (0 where nobody says) and of this process with its ended children, and those of
    the process ``pid`` with all below it."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0, own
    waiting = [] if pid is None else [pid]
    while waiting:
        one = waiting.pop()
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            waiting += [
                int(w) for list_ in Path(f"/proc/{one}/task").glob("*/children") for w in list_.read_text().split()
            ]
        except OSError:
            continue  # it has ended
        own += sum(map(int, fields[11:15])) / TICKS
    user, nice, system, _, _, irq, soft = map(int, words[:7])
    return (user + nice + system + irq + soft) / TICKS, own


def clocks_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states had clocks that differ too much for their runs to be compared; unknown clocks do not."""
    one, two = a.get("mhz"), b.get("mhz")
    return bool(one and two and abs(one - two) > CLOCKS_ALIKE * max(one, two))
