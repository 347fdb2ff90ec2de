"""Captures without a GPU, in which the operators and kernels of a step are recorded once and replayed on the same
tensors.

    record   run() ──► [operator, its tensors, its results] ...       kernels run under Triton's interpreter
    replay   each again, in order; results are written to the tensors of the recorded results

As in a replay of CUDA, no Python code runs again, every number is that of the recording, and a tensor has the current
content of its address.  An operator that would wait for the device ends the recording with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from minivllm.core.interfaces.attention import AttentionBackend, AttnLayer, AttnMeta
from minivllm.device.worker import graphs, runner
from minivllm.plugins.attention.spec import SDPA

aten = torch.ops.aten
WAITS = (
    aten.item,
    aten.is_nonzero,
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.equal,
)


class OnDevice(AttentionBackend):
    """Attention over all blocks of a row's table, which reads nothing on the host."""

    spec = replace(
        SDPA,
        impl=f"{__name__}:OnDevice",
        features=frozenset({"window"}),
        traits={"graph": "mixed", "plan": "device"},
        check=SDPA.check,
    )

    def forward(
        self,
        layer: AttnLayer,
        q: Tensor,
        meta: AttnMeta,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        table = meta.table[layer.group].index_select(0, meta.slots[meta.row]).long()
        k, v = self.ctx.kv_format.load(layer.cache, table, q.dtype)  # [T, n, kv_heads, D]
        kv_len, row = meta.kv_len[layer.group], meta.row  # a compressed row has more positions than keys
        before = (kv_len - meta.q_len - meta.cu_q[:-1])[row]
        at, last = torch.arange(k.shape[1]), (before + torch.arange(len(row))).clamp_min(0)[:, None]
        seen = (at <= last) if layer.spec.window is None else (at <= last) & (at > last - layer.spec.window)
        share = layer.spec.heads // layer.spec.kv_heads
        k, v = (torch.where(seen[:, :, None, None], x, 0.0).repeat_interleave(share, 2) for x in (k, v))
        s = torch.einsum("thd,tnhd->thn", q, k) * layer.spec.softmax_scale
        p = s.masked_fill(~seen[:, None], float("-inf")).softmax(dim=2)
        out.copy_(torch.einsum("thn,tnhd->thd", p, v))


def memory(value: Any) -> Iterator[int]:
    """Yield the storages of all tensors in a value."""
    if isinstance(value, Tensor):
        if not value.is_mkldnn:  # weights in the library's own order have no views
            yield value.untyped_storage()._cdata
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from memory(part)


class Recording(TorchDispatchMode):
    """A mode that records the operators that run under it; the graph is the list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mask = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in _indices(func, args))
        if func.overloadpacket in WAITS or mask:
            raise RuntimeError(f"{func} waits for the device while a step is captured")
        out = func(*args, **kwargs)
        writes = any(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)
        writes = writes or any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if writes:
            self.note(str(func), lambda: func(*args, **kwargs))
        elif not set(memory(out)) & set(memory([args, list(kwargs.values())])):
            self.note(str(func), lambda: put(func(*args, **kwargs), out))
        return out

    def note(self, name: str, call: Callable[[], Any]) -> None:
        self.names.append(name)
        self.calls.append(call)

    def replay(self) -> None:
        for call in self.calls:
            call()


def _indices(func: Any, args: Any) -> Any:
    return args[1] if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) else ()


def put(found: Any, where: Any) -> None:
    """Write the new result of an operator to the tensor of its recorded result."""
    if isinstance(where, Tensor):
        where.copy_(found)
    elif isinstance(where, (list, tuple)):
        for a, b in zip(found, where, strict=True):
            put(a, b)


class CpuRecorder:
    """A replacement of ``GraphRecorder``."""

    launch_ms = 1000.0  # time of separate launches, so that captures of all sizes save time
    recorded: list[Recording] = []  # recordings of all recorders, in order

    def capture(self, run: Callable[[], Any], before: Callable[[], Any] | None = None) -> tuple[Recording, Any]:
        (before or run)()
        recording = Recording()
        launch = InterpretedFunction.run

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
            recording.note(kernel.__name__, lambda: launch(kernel, *args, **kwargs))
            with _disable_current_modes():
                launch(kernel, *args, **kwargs)

        InterpretedFunction.run = launched
        try:
            with recording:
                result = run()
        finally:
            InterpretedFunction.run = launch
        self.recorded.append(recording)
        return recording, result


@contextmanager
def cpu_captures() -> Iterator[list[Recording]]:
    """Let engines that are made and run in this context capture their steps on a CPU."""
    kept = graphs.GraphRecorder, graphs.replay_ms, runner.has_kernels, runner.to_host
    graphs.GraphRecorder, graphs.replay_ms = CpuRecorder, lambda graph: 1.0
    runner.has_kernels = lambda wiring: True
    runner.to_host = lambda t: t.clone()
    CpuRecorder.recorded = []
    try:
        yield CpuRecorder.recorded
    finally:
        graphs.GraphRecorder, graphs.replay_ms, runner.has_kernels, runner.to_host = kept
