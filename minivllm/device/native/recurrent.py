"""Layers with a recurrent state, computed by the native library in one call for each layer of a step.

``device.layers.delta_net.scan`` is the reference.  The bits of a token's result do not depend on the other tokens of
its step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .program import FORMATS, each
from .team import team

_INT, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class StateRows(ctypes.Structure):
    """The C struct ``recurrent.h:StateRows``: the rows of a step and their recurrent states."""

    _fields_ = [
        ("count", _INT),
        *each(_ADDRESS, "rows start behind cu_q drafts save_at save_to"),
    ]


class DeltaLayer(ctypes.Structure):
    """The C struct ``recurrent.h:DeltaLayer``: addresses and sizes of a gated delta net.  ``held`` keeps its tensors
    alive."""

    held: tuple[Tensor, ...]

    _fields_ = [
        *each(_INT, "key_heads heads key_dim value_dim width places format"),
        *each(_ADDRESS, "conv rates dt_bias state ring gates"),
    ]


class StepInputs(ctypes.Structure):
    """The C struct ``recurrent.h:StepInputs``: addresses and strides of a step's inputs and output."""

    _fields_ = [
        *each(_ADDRESS, "x ab out"),
        *each(_INT, "format x_stride ab_stride out_stride"),
    ]


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
    """Return the outputs of the delta rule [T, value heads, value dim], and update states and rings.

    ``x`` [T, channels] and ``ab`` [T, 2 * heads] are the arguments of ``device.layers.delta_net.scan``, in the dtype of
    the rings.  ``step`` is a ``core.interfaces.states.StepStates``.
    """
    heads, value_dim = layer.heads, layer.value_dim
    x, ab = _rows(x), _rows(ab)
    out = x.new_zeros(len(x), heads, value_dim)
    kind = FORMATS[x.dtype]
    rows, held = rows_of(step)
    strides = x.stride(0), ab.stride(0), heads * value_dim
    inputs = StepInputs(x.data_ptr(), ab.data_ptr(), out.data_ptr(), kind, *strides)
    team().run("delta", *map(ctypes.addressof, (layer, rows, inputs)))
    del held
    return out


def _rows(tensor: Tensor) -> Tensor:
    """Return ``tensor`` [T, width], copied if its rows are not contiguous."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()
