"""The machine while something is measured: energy, clock, watts, what slowed the clock, and the load of others.

A GPU is asked through NVML (the library of its driver, by ctypes: no package is needed), a CPU's energy is that of
Linux's RAPL counters where they can be read.  What no counter says is None, with the reason in ``energy_unknown``.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .statistics import percentile

RAPL = Path("/sys/class/powercap")
TICKS = os.sysconf("SC_CLK_TCK")  # of a CPU second in /proc
LOOK = 0.05  # seconds between looks at the clock
CLOCKS_ALIKE = 0.03  # runs whose clocks differ by more are not compared
REASONS = {
    0x2: "set by an application", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake", 0x100: "display",
}  # fmt: skip


class Meter(Protocol):
    """A counter of joules and, for a GPU, a clock."""

    name: str

    def joules(self) -> float: ...


class Rapl:
    """Package domains of Linux's powercap; a counter that wraps is unwrapped by its range."""

    name = "RAPL"

    def __init__(self, folder: Path = RAPL) -> None:
        domains = sorted(folder.glob("intel-rapl:[0-9]*"))
        self.files = [d / "energy_uj" for d in domains if d.name.count(":") == 1]
        if not self.files:
            raise OSError("no energy counter of this CPU (no RAPL under /sys/class/powercap)")
        self.ranges = [int((file.parent / "max_energy_range_uj").read_text()) for file in self.files]
        self.last, self.total = self._read(), 0

    def _read(self) -> list[int]:
        return [int(file.read_text()) for file in self.files]

    def joules(self) -> float:
        now = self._read()
        for before, after, wraps in zip(self.last, now, self.ranges, strict=True):
            self.total += (after - before) % (wraps + 1)
        self.last = now
        return self.total / 1e6


class Nvml:
    """One GPU, by its UUID.  OSError where there is no NVML or it does not count joules."""

    name = "NVML"

    def __init__(self, uuid: str) -> None:
        self.library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        self.library.nvmlInit_v2()
        if self.library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self.handle)):
            raise OSError(f"NVML knows no GPU {uuid}")
        self.joules()

    def _ask(self, name: str, value: Any, *given: Any) -> int:
        function = getattr(self.library, name, None)
        if function is None or function(self.handle, *given, ctypes.byref(value)):
            raise OSError(f"this GPU's driver does not answer {name}")
        return int(value.value)

    def joules(self) -> float:
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()) / 1e3

    def look(self) -> tuple[float, float, int]:
        """MHz of the multiprocessors, watts, reasons of throttling as bits."""
        return (
            float(self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint(), ctypes.c_uint(1))),
            self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint()) / 1e3,
            self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong()),
        )


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
                self.why = _why(exc)

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


def _why(exc: Exception) -> str:
    if isinstance(exc, PermissionError):
        return "the energy counter of this CPU may only be read by root (/sys/class/powercap/*/energy_uj)"
    return str(exc)


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
