"""Layers with a recurrent state, computed by the native library in one call for each layer of a step.

``device.layers.delta_net.scan`` is the reference.  The bits of a token do not depend
on the other tokens of its step.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import ResourceError

from .library import ISAS, isa
from .program import FORMATS, declared, each

_INT, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class StateRows(ctypes.Structure):
    """``recurrent.h:StateRows``."""

    _fields_ = [
        ("count", _INT),
        *each(_ADDRESS, "rows start behind cu_q drafts save_at save_to"),
    ]


class DeltaLayer(ctypes.Structure):
    """``recurrent.h:DeltaLayer``.  ``held`` has the tensors whose addresses the fields are."""

    held: tuple[Tensor, ...]

    _fields_ = [
        *each(_INT, "key_heads heads key_dim value_dim width places format"),
        *each(_ADDRESS, "conv rates dt_bias state ring gates"),
    ]


class StepInputs(ctypes.Structure):
    """``recurrent.h:StepInputs``."""

    _fields_ = [
        *each(_ADDRESS, "x ab out"),
        *each(_INT, "format x_stride ab_stride out_stride"),
    ]


class _Team:
    """The threads that share the layers of this process.  ResourceError if the native library cannot be used."""

    def __init__(self) -> None:
        self.threads = torch.get_num_threads()
        self.process = os.getpid()
        self.busy = threading.Lock()  # a second engine of the process waits for a layer
        self._library = declared()
        self.address = self._library.minivllm_team(self.threads)
        if not self.address:
            raise ResourceError("no memory for the threads of the native part")

    def __del__(self) -> None:
        address = getattr(self, "address", None)
        if address and self.process == os.getpid():  # a fork of the process has no threads to wait for
            self._library.minivllm_free_team(address)


_teams: dict[int, _Team] = {}  # by process: a fork needs threads of its own
_MAKING = threading.Lock()


def _team() -> _Team:
    """Return the threads of this process, as many as torch uses."""
    with _MAKING:
        made = _teams.get(os.getpid())
        if made is None or made.threads != torch.get_num_threads():
            _teams.clear()
            made = _teams[os.getpid()] = _Team()
        return made


def rows_of(step: Any) -> tuple[StateRows, list[Tensor]]:
    """Return the rows of a step for the library, and the tensors whose addresses they hold.

    ``step`` is a ``core.interfaces.states.StepStates``."""
    held = [step.rows, step.start, step.behind, step.cu_q, step.drafts, step.save_at, step.save_to]
    held = [tensor.contiguous() for tensor in held]
    return StateRows(len(step.rows), *(tensor.data_ptr() for tensor in held)), held


def newest_first(weight: Tensor) -> Tensor:
    """Return the weight [channels, width] of a convolution as f32 [width, channels], with the newest input first."""
    return weight.float().flip(1).t().contiguous()


def delta_layer(
    conv: Tensor, rates: Tensor, dt_bias: Tensor, memory: Mapping[str, Tensor], sizes: tuple[int, int, int, int]
) -> DeltaLayer:
    """Return a gated delta net for the library, which holds addresses of the tensors.

    ``conv`` is the result of ``newest_first``; the other arguments are those of ``device.layers.delta_net.scan``."""
    ring = memory["ring"]
    tensors = conv, rates, dt_bias, memory["state"], ring, memory["gates"]
    addresses = [tensor.data_ptr() for tensor in tensors]
    layer = DeltaLayer(*sizes, len(conv), ring.shape[1], FORMATS[ring.dtype], *addresses)
    layer.held = tensors
    return layer


def scan(layer: DeltaLayer, x: Tensor, ab: Tensor, step: Any) -> Tensor:
    """Return the outputs of the delta rule [T, value heads, value dim], and bring states and rings up to date.

    ``x`` [T, channels] and ``ab`` [T, 2 * heads] are those of ``device.layers.delta_net.scan``, in the dtype of the
    rings.  ``step`` is a ``core.interfaces.states.StepStates``."""
    heads, value_dim = layer.heads, layer.value_dim
    x, ab = _rows(x), _rows(ab)
    out = x.new_zeros(len(x), heads, value_dim)
    kind = FORMATS[x.dtype]
    rows, held = rows_of(step)
    strides = x.stride(0), ab.stride(0), heads * value_dim
    inputs = StepInputs(x.data_ptr(), ab.data_ptr(), out.data_ptr(), kind, *strides)
    _call(layer, rows, inputs)
    del held
    return out


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor [T, width] whose rows are contiguous."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _call(*structures: Any) -> None:
    """Run a layer on the threads of the process."""
    team = _team()
    with team.busy:
        team._library.minivllm_delta(team.address, ISAS.index(isa()), *map(ctypes.addressof, structures))
