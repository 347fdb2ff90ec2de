"""The base class of layers with a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.states import Recurrent, StepStates
from minivllm.errors import PluginError


@dataclass
class StateLayer:
    """A layer with a recurrent state.  ``memory`` is filled when the memory of states is taken."""

    state: Recurrent
    memory: dict[str, Tensor] = field(default_factory=dict)  # name -> [states, (ring,) *shape]


def states_of(step: StepTensors) -> StepStates:
    """Return the recurrent states of a step.  PluginError if the step has none."""
    if step.states is None:
        raise PluginError("a model with recurrent layers was called without StepTensors.states")
    return step.states
