"""Fold AWQ's scales into a layer: a weight is multiplied by scales of its inputs, and the module that computes these
inputs, a norm or another linear module, is divided by them.

The producing module is found in a forward pass, or by its name, and so are the other modules that read its output.  A
second forward pass checks that the layer computes the same outputs as before.  A fold that changes them is undone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layers import Inputs, LayerWeights

# linear module -> the sibling module whose multiplied or averaged outputs it reads
BEFORE = {"o_proj": "v_proj", "out_proj": "v_proj", "dense": "v_proj", "down_proj": "up_proj", "w2": "w3"}
# allowed relative change of a layer's contribution and of a module's output, since norms are rounded to their dtype
APART: Mapping[torch.dtype, float] = {torch.float32: 1e-2, torch.bfloat16: 5e-2}
OFFSETS = (0.0, 1.0)  # a norm multiplies by its weight plus this offset


class Fold(NamedTuple):
    """A module ``maker`` that computes the inputs of other modules, so that their scales can be folded into it.

    Each output is used as ``repeats`` inputs, because a head of keys and values serves several heads of queries.
    ``heads`` is the number of heads of keys and values.
    """

    maker: str
    heads: int
    repeats: int

    def tied(self, x: Tensor) -> Tensor:
        """Return x f32 [inputs] with each value replaced by the mean over the inputs from the same output of ``maker``.

        x has a statistic of each input, such as the mean of its absolute values.
        """
        if self.repeats == 1:
            return x
        by_head = x.view(self.heads, self.repeats, -1)
        return by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)

    def own(self, s: Tensor) -> Tensor:
        """Return the factor of each output of ``maker`` [inputs / repeats].

        s [inputs] has the factors of the inputs; they are equal for inputs from the same output.
        """
        if self.repeats == 1:
            return s
        by_head = s.view(self.heads, self.repeats, -1)
        return by_head[:, 0].reshape(-1)


class Uses(NamedTuple):
    """The modules of a layer that share inputs, by name.  Only modules with parameters and without submodules are
    included.

    ``beside`` maps a module to all modules that read the same tensors, including itself.  ``after`` maps a module to
    all modules that read its output.
    """

    beside: Mapping[str, set[str]]
    after: Mapping[str, set[str]]


def find_uses(layer: nn.Module, run: Callable[[Tensor], Tensor], sample: Tensor) -> Uses:
    """Return the modules that share inputs, found by hooks while ``run`` computes the layer for a sample."""
    readers: list[tuple[Tensor, set[str]]] = []  # tensors are kept alive, so that each is a different object
    outputs: list[tuple[Tensor, str]] = []

    def readers_of(x: Tensor) -> set[str]:
        for tensor, names in readers:
            if tensor is x:
                return names
        names = set[str]()
        readers.append((x, names))
        return names

    def hook(name: str) -> Callable[..., None]:
        def call(module: nn.Module, args: Any, more: Any, out: Any) -> None:
            for x in (*args, *more.values()):
                if isinstance(x, Tensor):
                    readers_of(x).add(name)
            if isinstance(out, Tensor):
                outputs.append((out, name))

        return call

    leaves = {
        name: module
        for name, module in layer.named_modules()
        if name and next(module.children(), None) is None and next(module.parameters(), None) is not None
    }
    hooks = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in leaves.items()]
    try:
        run(sample)
    finally:
        for one in hooks:
            one.remove()
    beside = {name: set[str]() for name in leaves}
    after = {name: set[str]() for name in leaves}
    for _, names in readers:
        for name in names:
            beside[name] |= names
    for out, name in outputs:
        after[name] |= readers_of(out)
    return Uses(beside, after)


def find_fold(layer: nn.Module, inputs: Inputs, heads: int, uses: Uses) -> Fold | None:
    """Return the fold for scales of ``inputs``, or None if there is none.

    ``heads`` is the number of heads of keys and values.  There is no fold if the module that computes the inputs is
    unknown, or if a further module, such as one that is not quantized, reads the same tensor.
    """
    names = set(inputs.names)
    if any(uses.beside[name] - names for name in names):
        return None
    fold = _known_fold(layer, inputs, heads)
    return None if fold is None or uses.after[fold.maker] - names else fold


def _known_fold(layer: nn.Module, inputs: Inputs, heads: int) -> Fold | None:
    """Return a fold into the norm that computed the inputs in the forward pass, or into the sibling in ``BEFORE``.

    Return None if there is no such module, or if it cannot be divided by the scales.
    """
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
    """Multiply the inputs of the linear modules ``names`` by s [k] and divide the outputs of the fold's module.

    ``before`` is the layer's output for ``sample``.  Return False and restore the weights if the layer's contribution
    (its output minus ``sample``) or an output of ``names`` changes by more than ``APART``.  ``packed`` names the
    modules that are quantized later; other weights are rounded to the checkpoint's dtype at once.
    """
    maker = weights.layer.get_submodule(fold.maker)
    parameters = [name for name, _ in maker.named_parameters(recurse=False)]
    known = dict(weights.changed)
    scaled = {f"{name}.weight": weights.get(f"{name}.weight") * s for name in names}
    is_norm = isinstance(getattr(maker, "weight", None), Tensor) and maker.weight.dim() == 1
    best: dict[str, Tensor] = {}
    least = 1.0
    with _outputs(weights.layer, names) as outputs:
        weights.run(sample)
        expected = dict(outputs)
        for offset in OFFSETS if is_norm else (0.0,):
            divided = _divide(weights, parameters, fold, s, offset, known, packed)
            weights.set({**scaled, **divided})
            after = weights.run(sample)
            changes = [_change(outputs[name], expected[name]) for name in names]
            change = max(_change(after, before, sample), *changes)
            if change <= least:
                best = divided
                least = change
    if best:
        weights.set({**scaled, **best})
    else:
        weights.restore([*scaled, *(f"{fold.maker}.{name}" for name in parameters)], known)
    return bool(best)


def _divide(
    weights: LayerWeights,
    parameters: Sequence[str],
    fold: Fold,
    s: Tensor,
    offset: float,
    known: Mapping[str, Tensor],
    packed: set[str],
) -> dict[str, Tensor]:
    """Return the parameters of the fold's module, divided by the scales of its outputs.

    ``offset`` is the number that a norm adds to its weight.  ``known`` are the weights changed by earlier folds.
    """
    divisor = fold.own(s)
    divided = {}
    for name in parameters:
        whole = f"{fold.maker}.{name}"
        added = offset if name == "weight" else 0.0
        value = weights.restored(whole, known) + added
        rows = divisor if value.dim() == 1 else divisor[:, None]
        value = value / rows - added
        if name != "weight" or fold.maker not in packed:
            value = value.to(weights.dtype(whole)).float()
        divided[whole] = value
    return divided


def _change(after: Tensor, before: Tensor, residual: Tensor | None = None) -> float:
    """Return the norm of ``after - before`` as a share of the allowed change; infinite if it is not a number.

    If ``before`` contains a residual stream, pass it: the change is then compared with the contribution
    ``before - residual``, and the rounding of the sum is allowed too.
    """
    allowed = APART[before.dtype]
    if residual is None:
        room = allowed * before.float().norm()
    else:
        rounding = before.float().norm() * torch.finfo(before.dtype).eps / 2
        room = allowed * (before.float() - residual.float()).norm() + rounding
    difference = (after.float() - before.float()).norm()
    change = float(difference / room.clamp(min=1e-30))
    return float("inf") if math.isnan(change) else change


@contextlib.contextmanager
def _outputs(layer: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that holds the latest output of each named module while the context is open."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, out: found.update({name: out})

    hooks = [layer.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()
