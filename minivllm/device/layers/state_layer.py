"""The memory of recurrent states that a layer reads and writes.

A layer such as ``DeltaNet`` or ``ShortConvolution`` makes a ``StateLayer`` when it is built.  The worker allocates the
memory of all layers at once, after the weights are loaded (``device/worker/recurrent.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.states import Recurrent, StepStates
from minivllm.errors import PluginError


@dataclass
class StateLayer:
    """The memory of the recurrent states of one layer, for all sequences.

    ``state`` describes the tensors of one sequence.  ``memory`` has each of them for all sequences, by name: a tensor
    [states, *shape], or [states, places, *shape] for a ring.  It is empty until the worker allocates it."""

    state: Recurrent
    memory: dict[str, Tensor] = field(default_factory=dict)


def states_of(step: StepTensors) -> StepStates:
    """Return the recurrent states of a step.  PluginError if the step has none."""
    if step.states is None:
        raise PluginError("a model with recurrent layers was called without StepTensors.states")
    return step.states
