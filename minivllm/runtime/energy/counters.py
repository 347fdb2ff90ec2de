"""Counters of joules: NVML for a GPU, and Linux's RAPL counters for a CPU, if they can be read.

NVML is the library of the GPU's driver, called through ctypes, so no package is needed.

A counter covers the whole GPU, or the CPU's packages (without the memory, if it has its own domain), including the work
of other programs.  RAPL's counters change every millisecond, NVML's every 20 to 100 ms.
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
    """A counter of joules."""

    name: str

    def joules(self) -> float:
        """Return the joules since some time in the past.  They never decrease.  OSError if they cannot be read."""


class Rapl:
    """The counters of all CPU packages, from Linux's powercap.  OSError if there are none, or they cannot be read."""

    name = "RAPL"

    def __init__(self, folder: Path | None = None) -> None:
        folder = POWERCAP if folder is None else folder
        domains = sorted(folder.glob("intel-rapl:[0-9]*"))
        self.files = [d / "energy_uj" for d in domains if d.name.count(":") == 1]
        if not self.files:
            raise OSError(f"no energy counter of this CPU (no RAPL under {folder})")
        self.ranges = [int((file.parent / "max_energy_range_uj").read_text()) for file in self.files]
        self.last = self._read()
        self.total = 0  # microjoules

    def _read(self) -> list[int]:
        """Return the counters in microjoules."""
        return [int(file.read_text()) for file in self.files]

    def joules(self) -> float:
        """Return the joules since the object was created.  A counter that reaches the end of its range restarts at
        0."""
        now = self._read()
        for before, after, wraps in zip(self.last, now, self.ranges, strict=True):
            self.total += (after - before) % (wraps + 1)
        self.last = now
        return self.total / 1e6


class Nvml:
    """The counter of the GPU with a UUID.  OSError if there is no NVML, or the GPU does not count joules."""

    name = "NVML"

    def __init__(self, uuid: str) -> None:
        self.library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        self.library.nvmlInit_v2()
        if self.library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self.handle)):
            raise OSError(f"NVML has no GPU {uuid}")
        self.joules()

    def _query(self, name: str, value: Any, *arguments: Any) -> int:
        """Call a function of NVML that stores its result in ``value``, and return the result.  OSError if NVML lacks
        the function or reports an error."""
        function = getattr(self.library, name, None)
        if function is None or function(self.handle, *arguments, ctypes.byref(value)):
            raise OSError(f"NVML's function {name} is missing or failed for this GPU")
        return int(value.value)

    def joules(self) -> float:
        """Return the joules since the driver was loaded."""
        return self._query("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()) / 1e3

    def look(self) -> tuple[float, float, int]:
        """Return the clock of the multiprocessors in MHz, the power in watts, and the reasons of throttling as bits."""
        return (
            float(self._query("nvmlDeviceGetClockInfo", ctypes.c_uint(), ctypes.c_uint(1))),
            self._query("nvmlDeviceGetPowerUsage", ctypes.c_uint()) / 1e3,
            self._query("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong()),
        )


class Sum:
    """The sum of several counters, for the GPUs that share a model."""

    def __init__(self, meters: list[Meter]) -> None:
        self.meters = meters
        self.name = f"{meters[0].name} of {len(meters)} GPUs"

    def joules(self) -> float:
        """Return the sum."""
        return sum(meter.joules() for meter in self.meters)


class Polled:
    """A counter that a thread reads every ``EVERY`` seconds, because a reading takes milliseconds, as with NVML.

    ``close`` ends the thread."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.name = meter.name
        self._last = meter.joules()
        self._error = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="minivllm-joules", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        """Read the counter until ``close`` is called or a reading fails."""
        while not self._done.wait(EVERY):
            try:
                self._last = self.meter.joules()
            except (OSError, ValueError) as e:
                self._error = str(e) or type(e).__name__
                return

    def joules(self) -> float:
        """Return the joules of the last reading.  OSError if a reading has failed."""
        if self._error:
            raise OSError(self._error)
        return self._last

    def close(self) -> None:
        """End the thread."""
        self._done.set()
        self._thread.join()


def open_counter(source: str, devices: Callable[[], list[str]]) -> Meter:
    """Return the counter for a value of the option ``energy``: "rapl", "rapl:FOLDER" or "on".

    "on" means the counters of the ``devices`` that compute ("cpu", or the UUID of a GPU).  OSError if there is no
    counter."""
    try:
        if source.startswith("rapl"):
            folder = source.partition(":")[2]
            return Rapl(Path(folder) if folder else None)
        names = list(dict.fromkeys(devices()))
        meters: list[Meter] = [Rapl() if name == "cpu" else Nvml(name) for name in names]
        meter = meters[0] if len(meters) == 1 else Sum(meters)
        return meter if names == ["cpu"] else Polled(meter)
    except (OSError, ValueError) as exc:
        raise OSError(why(exc)) from exc


def why(exc: Exception) -> str:
    """Return the reason why there is no counter."""
    if isinstance(exc, PermissionError):
        return f"the energy counter of this CPU may only be read by root ({exc.filename})"
    return str(exc)
