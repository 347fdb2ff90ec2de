"""Hidden states of the served model for every token in the KV cache, which the layers of a drafter read.

    states of a step  [T, W]  ──► place of each token in group 0 ──► memory [blocks, block, W]
    layers of the drafter  ◄── states of the tokens that they have not read ◄──┘

A token's states have the same index as its keys and values, so prefix hits, copies, forks and preemption need no
further tables.  The states of a rejected draft are overwritten by the next step before anything reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.core.interfaces.kvformat import KVLayout, TensorSpec
from minivllm.core.interfaces.model import state_points
from minivllm.errors import ConfigError, shown, suggest

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnMeta
    from minivllm.core.interfaces.model import Model

    from .state import DeviceState

NORM = "norm"  # name of the tap point whose values are the last hidden states, which a step returns


class TargetStates:
    """Memory for the hidden states of a model at the tap points ``points`` (named values of the model).

    It is divided into the blocks, of ``block`` tokens, of the first KV group.  ConfigError, which names the plug-in
    ``part``, for points that the model does not have."""

    def __init__(self, model: Model, points: Sequence[str], block: int, dtype: torch.dtype, part: str) -> None:
        known = state_points(model)
        for point in points:
            if point not in known:
                problem = f"{part} reads the hidden states {shown(point)} of the model, which has none of this name"
                raise ConfigError(f"{problem}; expected another drafter, such as ngram.{suggest(point, known)}")
        self.points = frozenset(points)
        self.first: dict[str, int] = {}  # tap point -> index of the first column of its values in the memory
        self.width = 0
        for point in points:
            self.first[point] = self.width
            self.width += known[point]
        name = str(dtype).removeprefix("torch.")
        self.layout = KVLayout(block, {"states": TensorSpec((block, self.width), name)})
        self.cache: Mapping[str, Tensor] = {}  # set by ``kv_memory.allocate``

    @property
    def memory(self) -> Tensor:
        """Return all stored hidden states [blocks * block, W], one row for each place of a token in the KV cache."""
        return self.cache["states"].view(-1, self.width)

    def watch(self, meta: AttnMeta) -> Watch:
        """Return the object that stores the hidden states of the tokens of a step with the attention metadata
        ``meta``."""
        return Watch(self, meta.slot_map[0])

    def at(self, state: DeviceState, slots: Tensor, position: Tensor) -> Tensor:
        """Return the stored hidden states [T, W] of the tokens at ``position`` i64 [T] in the sequences of ``slots``
        i64 [T]."""
        return self.memory[_places(state, slots, position)]


def _places(state: DeviceState, slots: Tensor, position: Tensor) -> Tensor:
    """Return the index i64 [T] of each token's place in the first KV group (block * tokens per block + offset)."""
    blocks = state.table[0][slots, position // state.block].long()
    return blocks * state.block + position % state.block


class Watch:
    """Stores the hidden states of one step (``model.StepWatch``).  ``places`` i64 [T] are the rows of ``states`` for
    the step's tokens."""

    def __init__(self, states: TargetStates, places: Tensor) -> None:
        self.states = states
        self.places = places
        self.points = states.points

    def __call__(self, point: str, x: Tensor) -> None:
        first = self.states.first[point]
        memory = self.states.memory[:, first : first + x.shape[1]]
        memory.index_copy_(0, self.places, x.to(memory.dtype))
