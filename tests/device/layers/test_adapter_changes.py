"""The changes of adapters that the layers of a step call."""

import pytest
import torch

from minivllm.device.layers.adapters import ActiveMethods, LayerAdapters


class Memory:
    """The memory of a method that changes some layers."""

    def __init__(self, **changes):
        self.changes = changes

    def layer(self, name):
        return self.changes.get(name)


class Change:
    """A change whose ``gated`` returns the change of the following layer that it receives."""

    def __call__(self, product, x):
        return product(x)

    def gated(self, product, x, activation, following):
        return [following]


def plain(product, x):
    return product(x)


@pytest.mark.parametrize("active", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("gate", [(Change(), None), (None, Change()), (Change(), Change()), (plain, None)])
@pytest.mark.parametrize("down", [(Change(), None), (None, Change()), (Change(), Change()), (None, None)])
def test_the_gate_of_a_method_receives_the_following_change_of_the_same_method_alone(active, gate, down):
    running = ActiveMethods()
    running.numbers, running.tokens = active, 3
    memories = [Memory(gate=gate[n], down=down[n]) for n in (0, 1)]
    first, second = (LayerAdapters(name, running, memories) for name in ("gate", "down"))
    found = first.gated(None, torch.zeros(3, 2), "silu", second)
    of_gate, of_down = ([n for n in active if pair[n] is not None] for pair in (gate, down))
    if len(of_gate) != 1 or gate[of_gate[0]] is plain:
        assert found is None
    else:
        assert found == [down[of_gate[0]] if of_down == of_gate else None]
