"""Times of a step by seam (kind of plug-in), measured with torch's profiler.

The steps are separate launches with labelled regions.

Calls of plug-ins are labelled only while a profile runs, so other steps cost nothing.  A kernel or an operator counts
for the innermost region in which it was started.  A kernel that fuses the work of several seams counts for the seam
that starts it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from minivllm.core.interfaces.quantizer import WeightScheme
from minivllm.device.worker.capture import synchronize
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.device.worker.runner import Runner

PREFIX = "seam "
OTHER = "engine"  # name for the time in which no plug-in runs: columns, gathers and copies
UNKNOWN = "unknown"  # name for kernels whose launch is not in the profile
# launches by the runtime or the driver, such as cudaLaunchKernel and cuLaunchKernelEx
CALL = re.compile(r"(cu|cuda|hip)[A-Z]")


class SeamProfile:
    """A profile of everything that a runner does until ``stop``."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._undo: list[Any] = []
        self.cuda = runner.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        self._profile = profile(activities=activities, acc_events=True)
        for name in ("forward", "sample"):
            self._label(runner, OTHER, name)
        self._set(runner, "model", _Labelled(runner.model))
        backend = runner.backend
        self._label(backend, "attention", "plan", "write", "forward")
        self._label(backend.ctx.kv_format, "kvformat", "store", "load")
        for scheme in schemes(runner.model):
            self._label(scheme, "quantizer", "apply")
        for seam, made in zip(runner.chain.seam_names, runner.processors, strict=True):
            self._label(made, seam, "apply", "commit", *(["draw"] if made is runner.sampler else []))
        self._profile.__enter__()

    def _label(self, made: Any, seam: str, *methods: str) -> None:
        for name in methods:
            self._set(made, name, _labelled(seam, getattr(made, name)))

    def _set(self, made: Any, name: str, value: Any) -> None:
        had = name in vars(made)
        self._undo.append((made, name, had, vars(made).get(name)))
        object.__setattr__(made, name, value)

    def stop(self, trace: str = "") -> dict[str, float]:
        """Return the milliseconds of each seam: device time on CUDA, else time of the computing thread.

        ``trace`` names a file to write as a Chrome trace; "" writes none.
        """
        if self.cuda:
            synchronize()
        self._profile.__exit__(None, None, None)
        for made, name, had, value in reversed(self._undo):
            if had:
                object.__setattr__(made, name, value)
            else:
                object.__delattr__(made, name)
        if trace:
            try:
                self._profile.export_chrome_trace(trace)
            except OSError as exc:
                raise RequestError(f"{trace}: {exc.strerror}") from None
        if self.cuda:
            return device_shares(self._profile.profiler.kineto_results.events())  # type: ignore[union-attr]
        return cpu_shares(self._profile.events())


def cpu_shares(events: Any) -> dict[str, float]:
    """Return the milliseconds of the computing thread by the innermost label around each operator.

    Operators without a label are left out.
    """
    spent: dict[str, float] = {}
    for event in events:
        label = _seam_of(event)
        if label is not None and event.self_cpu_time_total:
            spent[label] = spent.get(label, 0.0) + event.self_cpu_time_total / 1e3
    return spent


def device_shares(events: Iterable[Any]) -> dict[str, float]:
    """Return the milliseconds of the device by the innermost label at the launch of each kernel or copy.

    ``events`` are those of Kineto.  They link a kernel to the call of the runtime or driver that launched it by a
    correlation number.  torch's own events contain launches of torch's operators only, not those of Triton.
    """
    labels: list[tuple[int, int, str]] = []
    launched: dict[int, int] = {}
    device: list[tuple[int, float]] = []
    for event in events:
        name = event.name()
        if event.device_type() != DeviceType.CPU:
            if not (event.is_user_annotation() or name.startswith(PREFIX)):
                device.append((event.correlation_id(), event.duration_ns() / 1e6))
        elif name.startswith(PREFIX):
            labels.append(
                (
                    event.start_ns(),
                    event.start_ns() + event.duration_ns(),
                    name.removeprefix(PREFIX),
                )
            )
        elif CALL.match(name):
            launched[event.correlation_id()] = event.start_ns()
    spent: dict[str, float] = {}
    labels.sort()
    starts = [start for start, _, _ in labels]
    for correlation, ms in device:
        label = UNKNOWN
        if correlation in launched:
            label = _innermost(labels, starts, launched[correlation])
        spent[label] = spent.get(label, 0.0) + ms
    return spent


def _innermost(labels: list[tuple[int, int, str]], starts: list[int], at: int) -> str:
    """Return the label that began last among the labels open at ``at``.  Labels of a thread are nested."""
    for i in range(bisect_right(starts, at) - 1, -1, -1):
        if labels[i][1] >= at:
            return labels[i][2]
    return OTHER


def _seam_of(event: Any) -> str | None:
    while event is not None:
        if event.name.startswith(PREFIX):
            return event.name.removeprefix(PREFIX)
        event = event.cpu_parent
    return None


def _labelled(seam: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        with record_function(PREFIX + seam):
            return call(*args, **named)

    return run


class _Labelled:
    """Wraps a model, so that its calls appear under a label in the profile."""

    def __init__(self, model: Any) -> None:
        self._model, self.logits = model, _labelled("model", model.logits)

    def __call__(self, *args: Any, **named: Any) -> Any:
        with record_function(PREFIX + "model"):
            return self._model(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def schemes(model: Any) -> Iterator[WeightScheme]:
    """Yield the weight schemes inside a model."""
    seen = set()
    stack = [model]
    while stack:
        found = stack.pop()
        if id(found) in seen or isinstance(found, (str, bytes, int, float, torch.Tensor, type)):
            continue
        seen.add(id(found))
        if isinstance(found, WeightScheme):
            yield found
        if isinstance(found, dict):
            stack += found.values()
        elif isinstance(found, (list, tuple, set, frozenset)):
            stack += found
        elif hasattr(found, "__dict__"):
            stack += vars(found).values()
