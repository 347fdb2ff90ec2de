"""Record the machine during a measurement: energy, power, clock, reasons for a slow clock, and other processes' load.

The counters are those of ``minivllm.runtime.energy``.  Without an energy counter the energy is None, and
``energy_unknown`` has the reason.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from minivllm.runtime.energy.counters import Meter, Nvml, Rapl, why

from . import Result, Row
from .statistics import percentile

TICKS = os.sysconf("SC_CLK_TCK")  # units of CPU time in /proc per second
LOOK = 0.05  # seconds between samples of the clock
CLOCKS_ALIKE = 0.03  # largest relative difference of the clocks of runs that are compared
REASONS = {
    0x2: "set by an application", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake", 0x100: "display",
}  # fmt: skip


def find_meter(device: str, devices: int = 1) -> Meter:
    """Return the energy counter of a device ("cpu", "cuda").

    Raise OSError with the reason if there is none, for instance for an engine on several GPUs: this process can read
    the counter of its own GPU only.
    """
    if device.startswith("cuda"):
        if devices > 1:
            raise OSError(f"the counter is that of one GPU, and {devices} are used")
        import torch

        return Nvml(f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")
    return Rapl()


class MachineWatch:
    """A context that records the state of the machine in ``found``.

    ``device`` None means that another machine is measured, so that only the load of this one is recorded.  ``devices``
    is the number of devices that compute.  ``pid`` is a process whose CPU time, with that of its children, belongs to
    the measurement, such as a server started for it, or None.
    """

    def __init__(self, device: str | None = "cpu", pid: int | None = None, devices: int = 1) -> None:
        self.found: Result = {}
        self.pid = pid
        self.meter: Meter | None = None
        self.why = "another process or machine is measured"
        self._samples: list[tuple[float, float, int]] = []  # MHz, watts, bits of ``REASONS``
        self._done = threading.Event()
        if device is not None:
            try:
                self.meter = find_meter(device, devices)
            except (OSError, ValueError) as exc:
                self.why = why(exc)

    def __enter__(self) -> MachineWatch:
        self._busy = _cpu_seconds(self.pid)
        self._start = time.perf_counter()
        self._joules = self.meter.joules() if self.meter else 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if isinstance(self.meter, Nvml):
            self._thread.start()
        return self

    def _watch(self) -> None:
        """Read the GPU's clock frequency, power and limits at intervals, in a thread, until the context ends."""
        while not self._done.wait(LOOK):
            try:
                self._samples.append(self.meter.look())  # type: ignore[union-attr]
            except OSError:
                return

    def __exit__(self, *_: Any) -> None:
        joules = self.meter.joules() - self._joules if self.meter else None
        seconds = time.perf_counter() - self._start
        self._done.set()
        machine, own = self._busy
        machine_now, own_now = _cpu_seconds(self.pid)
        others = None
        if machine:
            other_seconds = machine_now - machine - (own_now - own)
            others = round(max(0.0, other_seconds) / seconds, 2)
        self.found = {"seconds": seconds, "load_average": list(os.getloadavg()), "cores_of_others": others}
        self.found |= {"energy_joules": joules, "energy_by": self.meter.name if self.meter else None}
        if self.meter is None:
            self.found["energy_unknown"] = self.why
        self.found |= _clocks(self._samples)


def _clocks(samples: list[tuple[float, float, int]]) -> Result:
    """Return the median clock and power, and all reasons for a slow clock; {} without samples."""
    if not samples:
        return {}
    bits = 0
    for _, _, reasons in samples:
        bits |= reasons
    found: Result = {"mhz": percentile([mhz for mhz, _, _ in samples], 50)}
    found["watts"] = percentile([watts for _, watts, _ in samples], 50)
    found["throttled_by"] = [text for bit, text in REASONS.items() if bits & bit]
    return found


def _cpu_seconds(pid: int | None) -> tuple[float, float]:
    """Return the CPU seconds of the machine (0 without /proc), and the CPU seconds of the measured processes.

    The measured processes are this process, its ended children, and the process ``pid`` with all its descendants.
    """
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    try:
        first, _, _ = Path("/proc/stat").read_text().partition("\n")
        words = first.split()[1:]
    except OSError:
        return 0.0, own
    pids = [] if pid is None else [pid]
    while pids:
        folder = Path(f"/proc/{pids.pop()}")
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            for children in folder.glob("task/*/children"):
                pids += map(int, children.read_text().split())
        except OSError:
            continue  # the process has ended
        own += sum(map(int, fields[11:15])) / TICKS
    user, nice, system, _, _, irq, soft = map(int, words[:7])
    return (user + nice + system + irq + soft) / TICKS, own


def clocks_apart(a: Row, b: Row) -> bool:
    """Return whether the clocks of two states differ too much to compare their runs; unknown clocks do not."""
    one, two = a.get("mhz"), b.get("mhz")
    return bool(one and two and abs(one - two) > CLOCKS_ALIKE * max(one, two))
