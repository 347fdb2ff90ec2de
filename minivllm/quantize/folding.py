"""Scales of inputs, put into a weight and taken out of what makes these inputs: a norm, or rows of another weight.

Which module makes them is seen in a forward pass, or known by its name.  That the layer computes what it did is seen in
another one: what changes it is not done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .layers import Inputs, LayerWeights

# linear module -> the one beside it whose outputs it is given, times or summed over something
BEFORE = {"o_proj": "v_proj", "out_proj": "v_proj", "dense": "v_proj", "down_proj": "up_proj", "w2": "w3"}
# relative, of a layer's output: norms are rounded to the checkpoint's dtype
APART: Mapping[torch.dtype, float] = {torch.float32: 1e-2, torch.bfloat16: 5e-2}
OFFSETS = (0.0, 1.0)  # of norms: they multiply by their weight, or by 1 + weight


class Fold(NamedTuple):
    """The module ``maker`` makes the inputs, each of its outputs for ``repeats`` of them: heads of keys and values have
    several heads of queries."""

    maker: str
    heads: int
    repeats: int

    def tied(self, x: Tensor) -> Tensor:
        """Means f32 [inputs] made equal for inputs that are made of one output."""
        if self.repeats == 1:
            return x
        by_head = x.view(self.heads, self.repeats, -1)
        return by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)

    def own(self, s: Tensor) -> Tensor:
        """Of such scales, one for each output."""
        return s if self.repeats == 1 else s.view(self.heads, self.repeats, -1)[:, 0].reshape(-1)


def find_fold(layer: nn.Module, inputs: Inputs, heads: int) -> Fold | None:
    """Where scales of these inputs can go, if that is known; ``heads`` of keys and values."""
    k = len(inputs.means)
    if inputs.made_by:
        weight = getattr(layer.get_submodule(inputs.made_by), "weight", None)
        if isinstance(weight, Tensor) and weight.shape == (k,):
            return Fold(inputs.made_by, 1, 1)
    parent, _, last = inputs.names[0].rpartition(".")
    maker = getattr(layer.get_submodule(parent), BEFORE.get(last, ""), None)
    if len(inputs.names) > 1 or type(maker) is not nn.Linear or k % maker.out_features:
        return None
    repeats = k // maker.out_features
    if repeats > 1 and maker.out_features % heads:
        return None
    return Fold(f"{parent}.{BEFORE[last]}", heads, repeats)


def fold_in(
    weights: LayerWeights, names: Sequence[str], fold: Fold, s: Tensor, sample: Tensor, before: Tensor, packed: set[str]
) -> bool:
    """Multiply inputs of the linear modules ``names`` by s [k], and divide outputs of the maker.  False, and nothing
    has changed, if the layer's output for ``sample`` is not ``before`` any more.  ``packed``: modules whose weight is
    rounded later; others are rounded to the checkpoint's dtype at once."""
    maker = weights.layer.get_submodule(fold.maker)
    known = dict(weights.changed)
    own, parameters = fold.own(s), [name for name, _ in maker.named_parameters(recurse=False)]
    touched = [*(f"{name}.weight" for name in names), *(f"{fold.maker}.{name}" for name in parameters)]
    scaled = {f"{name}.weight": weights.get(f"{name}.weight") * s for name in names}
    for offset in OFFSETS if isinstance(getattr(maker, "weight", None), Tensor) and maker.weight.dim() == 1 else (0.0,):
        divided = {}
        for name in parameters:
            whole, more = f"{fold.maker}.{name}", offset if name == "weight" else 0.0
            value = weights.restored(whole, known)
            value = (value + more) / (own if value.dim() == 1 else own[:, None]) - more
            if name != "weight" or fold.maker not in packed:
                value = value.to(weights.dtype(whole)).float()
            divided[whole] = value
        weights.set({**scaled, **divided})
        after = weights.run(sample)
        apart = (after.float() - before.float()).norm() / before.float().norm().clamp(min=1e-30)
        if float(apart) <= APART[weights.model.dtype]:
            return True
    weights.restore(touched, known)
    return False
