"""Scales of inputs, put into a weight and taken out of what makes these inputs: a norm, or rows of another weight.

Which module makes them is seen in a forward pass, or known by its name, and so is what else is given them.  That the
layer computes what it did is seen in another one: what changes it is not done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layers import Inputs, LayerWeights

# linear module -> the one beside it whose outputs it is given, times or summed over something
BEFORE = {"o_proj": "v_proj", "out_proj": "v_proj", "dense": "v_proj", "down_proj": "up_proj", "w2": "w3"}
# relative, of what a layer adds to its input, and of each module's output: norms are rounded to the checkpoint's dtype
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


class Uses(NamedTuple):
    """``beside``: by a module, all that are given the tensor it is given.  ``after``: by a module, all that are given
    its output.  Modules with parameters that have no modules inside, by their names in the layer."""

    beside: Mapping[str, set[str]]
    after: Mapping[str, set[str]]


def find_uses(layer: nn.Module, run: Callable[[Tensor], Tensor], sample: Tensor) -> Uses:
    """Seen while ``run`` puts a sample through the layer."""
    given: list[tuple[Tensor, set[str]]] = []  # tensors are kept, so that none has the place of another
    made: list[tuple[Tensor, str]] = []

    def takers(x: Tensor) -> set[str]:
        found = next((names for tensor, names in given if tensor is x), None)
        if found is None:
            given.append((x, found := set()))
        return found

    def hook(name: str) -> Callable[..., None]:
        def call(module: nn.Module, args: Any, more: Any, out: Any) -> None:
            for x in (*args, *more.values()):
                if isinstance(x, Tensor):
                    takers(x).add(name)
            if isinstance(out, Tensor):
                made.append((out, name))

        return call

    inner = {n: m for n, m in layer.named_modules() if n and next(m.children(), None) is None}
    inner = {n: m for n, m in inner.items() if next(m.parameters(), None) is not None}
    hooks = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in inner.items()]
    try:
        run(sample)
    finally:
        for one in hooks:
            one.remove()
    beside = {name: set[str]().union(*(names for _, names in given if name in names)) for name in inner}
    return Uses(beside, {name: set[str]().union(*(takers(x) for x, by in made if by == name)) for name in inner})


def find_fold(layer: nn.Module, inputs: Inputs, heads: int, uses: Uses) -> Fold | None:
    """Where scales of these inputs can go, if that is known; ``heads`` of keys and values.  None where a module that is
    not among the inputs' would be given other numbers, as one that is left out."""
    mine = set(inputs.names)
    if any(uses.beside[name] - mine for name in mine):
        return None
    fold = _known_fold(layer, inputs, heads)
    return None if fold is None or uses.after[fold.maker] - mine else fold


def _known_fold(layer: nn.Module, inputs: Inputs, heads: int) -> Fold | None:
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
    has changed, if what the layer adds to ``sample`` is not ``before - sample`` any more, or outputs of ``names`` are
    not what they were.  ``packed``: modules whose weight is rounded later; others are rounded to the checkpoint's dtype
    at once."""
    maker = weights.layer.get_submodule(fold.maker)
    known = dict(weights.changed)
    own, parameters = fold.own(s), [name for name, _ in maker.named_parameters(recurse=False)]
    touched = [*(f"{name}.weight" for name in names), *(f"{fold.maker}.{name}" for name in parameters)]
    scaled = {f"{name}.weight": weights.get(f"{name}.weight") * s for name in names}
    is_norm = isinstance(getattr(maker, "weight", None), Tensor) and maker.weight.dim() == 1
    with _outputs(weights.layer, names) as outputs:
        weights.run(sample)
        wanted, best, least = dict(outputs), dict[str, Tensor](), 1.0
        for offset in OFFSETS if is_norm else (0.0,):
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
            apart = max(_apart(after, before, sample), *(_apart(outputs[n], wanted[n]) for n in names))
            if apart <= least:
                best, least = divided, apart
    if best:
        weights.set({**scaled, **best})
    else:
        weights.restore(touched, known)
    return bool(best)


def _apart(after: Tensor, before: Tensor, beneath: Tensor | None = None) -> float:
    """The norm of the difference as a share of what it may be; ``beneath``: what ``before`` was added to, whose sum has
    been rounded."""
    allowed = APART[before.dtype]
    if beneath is None:
        room = allowed * before.float().norm()
    else:
        sums = before.float().norm() * torch.finfo(before.dtype).eps / 2
        room = allowed * (before.float() - beneath.float()).norm() + sums
    apart = float((after.float() - before.float()).norm() / room.clamp(min=1e-30))
    return apart if apart == apart else float("inf")


@contextlib.contextmanager
def _outputs(layer: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """What modules have made last."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, out: found.update({name: out})

    hooks = [layer.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()
