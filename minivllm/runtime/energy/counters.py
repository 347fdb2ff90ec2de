"""Counters of joules.  A GPU is asked through NVML (the library of its driver, by ctypes: no package is needed), a
CPU's energy is that of Linux's RAPL counters where they can be read.

What is counted is the whole GPU, or the CPU's packages (without the memory beside them where that has a domain of its
own), whoever made them work.  RAPL's counters move each millisecond, NVML's each 20 to 100.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

EVERY = 0.05  # seconds between readings of a counter that a thread reads
POWERCAP = Path("/sys/class/powercap")


class Meter(Protocol):
    """A counter of joules and, for a GPU, a clock."""

    name: str

    def joules(self) -> float:
        """Since a moment in the past; it never goes down.  OSError if it cannot be read (any more)."""


class Rapl:
    """Package domains of Linux's powercap; a counter that wraps is unwrapped by its range.  OSError where there are
    none or they may not be read."""

    name = "RAPL"

    def __init__(self, folder: Path | None = None) -> None:
        folder = POWERCAP if folder is None else folder
        domains = sorted(folder.glob("intel-rapl:[0-9]*"))
        self.files = [d / "energy_uj" for d in domains if d.name.count(":") == 1]
        if not self.files:
            raise OSError(f"no energy counter of this CPU (no RAPL under {folder})")
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


class Sum:
    """Several counters as one: of the GPUs that share a model."""

    def __init__(self, meters: list[Meter]) -> None:
        self.meters, self.name = meters, f"{meters[0].name} of {len(meters)} GPUs"

    def joules(self) -> float:
        return sum(meter.joules() for meter in self.meters)


class Polled:
    """A counter that takes milliseconds to read, as NVML's does: a thread reads it, and ``joules`` is what it found
    last, about ``EVERY`` seconds ago.  What it raises, ``joules`` raises.  ``close`` ends the thread."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.name = meter, meter.name
        self._last, self._error = meter.joules(), ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="minivllm-joules", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._done.wait(EVERY):
            try:
                self._last = self.meter.joules()
            except (OSError, ValueError) as e:
                self._error = str(e) or type(e).__name__
                return

    def joules(self) -> float:
        if self._error:
            raise OSError(self._error)
        return self._last

    def close(self) -> None:
        self._done.set()
        self._thread.join()


def open_counter(asked: str, devices: Callable[[], list[str]]) -> Meter:
    """The counter that the option ``energy`` names: "rapl", "rapl:FOLDER", or "on", that of the ``devices`` that
    compute ("cpu", or a GPU's UUID).  OSError says why there is none."""
    try:
        if asked.startswith("rapl"):
            folder = asked.partition(":")[2]
            return Rapl(Path(folder) if folder else None)
        names = list(dict.fromkeys(devices()))
        meters: list[Meter] = [Rapl() if name == "cpu" else Nvml(name) for name in names]
        meter = meters[0] if len(meters) == 1 else Sum(meters)
        return meter if names == ["cpu"] else Polled(meter)
    except (OSError, ValueError) as exc:
        raise OSError(why(exc)) from exc


def why(exc: Exception) -> str:
    """In words, why there is no counter."""
    if isinstance(exc, PermissionError):
        return f"the energy counter of this CPU may only be read by root ({exc.filename})"
    return str(exc)
