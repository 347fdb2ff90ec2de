"""The attention function that transformers' modules call.

It passes q, k and v of a layer to the engine's layer, or to a listener.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minivllm.core.interfaces.attention import QKPre
from minivllm.core.interfaces.model import StepTensors

# Name of ``attend`` in transformers' registry of attention functions.  The registry of mask functions has no function
# of this name, and so transformers makes no masks.
NAME = "minivllm"
SLOT = "minivllm_attends"  # attribute of an attention module that holds its ``Attends``
_listener: ContextVar[Callable[..., Any]] = ContextVar("minivllm_attention")


def register() -> None:
    """Add ``attend`` to transformers' registry of attention functions, unless it is there."""
    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention for a module of transformers.

    ``query`` is [1, heads, T, dim_qk], ``key`` and ``value`` are [1, kv_heads, T, dim]. The output is [1, T, heads,
    dim_v], and the second result None, as transformers expects.
    """
    found = module.__dict__.get(SLOT)
    if found is None:
        return _listener.get()(module, query, key, value, attention_mask, kwargs)
    return found(query, key, value)


@contextmanager
def listening(listener: Callable[..., Any]) -> Iterator[None]:
    """Set the function that ``attend`` calls in this context for modules without the attribute ``SLOT``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Current:
    """Holds the running step, whose data the engine's attention needs and transformers' modules do not pass on."""

    step: StepTensors


class Attends:
    """The attention of a module of transformers, computed by a layer of the engine."""

    def __init__(self, layer: Any, current: Current, pre: QKPre) -> None:
        self.layer = layer
        self.current = current
        self.pre = pre

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        q, k, v = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
        out = self.layer(q, k, v, self.current.step, self.pre)
        heads, tokens, dim_v = query.shape[1], query.shape[2], value.shape[3]
        return out.view(1, tokens, heads, dim_v), None
