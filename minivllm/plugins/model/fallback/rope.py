"""Rotary embeddings of transformers' models that the engine can apply, while its attention writes q and k.

A layer qualifies by four tests.  Its forward calls the function ``apply_rotary_pos_emb`` of its file.  The results
reach attention unchanged.  A module computes cos and sin from positions.  With random numbers the function rotates as
the engine does.  The layer's forward is then given a function that returns q and k unchanged.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.core.interfaces.attention import QKPre
from minivllm.device.layers.rotary import prepare_qk

APPLY = "apply_rotary_pos_emb"


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of one layer.

    ``source`` is the name of the module that computes cos and sin, and ``args`` and ``kwargs`` are its arguments except
    the positions.
    """

    source: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dim: int  # number of rotated elements of a head


@dataclass(frozen=True)
class MadeTables:
    """A recorded call of a module that computes cos and sin from positions: its name, its arguments and its results."""

    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class RotatedCall:
    """A recorded call of a function ``apply_rotary_pos_emb``: the function, its arguments, and the rotated q and k."""

    function: Callable[..., Any]
    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    rotated: tuple[Tensor, Tensor]


def _is_pair(out: Any) -> bool:
    """Return whether a value is a tuple of two tensors."""
    return isinstance(out, tuple) and len(out) == 2 and all(isinstance(x, Tensor) for x in out)


class Ropes:
    """Records which rotary embeddings the modules of a model apply while a step is traced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.made: dict[int, MadeTables] = {}  # id of the tensor cos -> call that computed it
        self.turned: dict[nn.Module, RotatedCall] = {}
        self.known: dict[tuple[Any, int, int], bool] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record, inside this context, the cos and sin that modules compute and the rotations of q and k."""
        hooks, changed = [], []
        for name, module in self.model.named_modules():
            buffers = [key for key, _ in module.named_buffers(recurse=False)]
            if any(key.endswith("inv_freq") for key in buffers):
                hook = module.register_forward_hook(self._note(name), with_kwargs=True)
                hooks.append(hook)
            if applies(module):
                forward = with_apply(module, self._watched(module))
                module.forward = forward  # type: ignore[method-assign]
                changed.append(module)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module in changed:
                del module.__dict__["forward"]

    def _note(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            if _is_pair(out):
                cos, sin = out
                self.made[id(cos)] = MadeTables(name, args, kwargs, cos, sin)

        return hook

    def _watched(self, module: nn.Module) -> Callable[..., Any]:
        forward = inspect.unwrap(type(module).forward)
        function = forward.__globals__[APPLY]

        def apply(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            if len(args) == 4 and not kwargs and _is_pair(out):
                self.turned[module] = RotatedCall(function, *args, rotated=out)
            return out

        return apply

    def of(self, module: nn.Module, query: Tensor, key: Tensor) -> Rotation | None:
        """Return the rotation that the engine's attention can apply for a layer, None if the layer must rotate
        itself.
        """
        turn = self.turned.get(module)
        if turn is None or turn.rotated[0] is not query or turn.rotated[1] is not key:
            return None
        if turn.q.shape != query.shape or turn.k.shape != key.shape:
            return None  # cos and sin are longer than a head, so that torch repeats its elements
        made = self.made.get(id(turn.cos))
        if made is None or made.sin is not turn.sin or made.cos.dim() != 3:
            return None
        args = made.args[2:]
        kwargs = {name: value for name, value in made.kwargs.items() if name not in ("x", "position_ids")}
        if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            return None
        dim, turned = query.shape[3], made.cos.shape[2]
        case = turn.function, dim, turned
        if case not in self.known:
            self.known[case] = turns_as_here(turn.function, dim, turned)
        if not self.known[case]:
            return None
        return Rotation(made.module, args, tuple(kwargs.items()), turned)

    def given(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return q and k of a layer before their rotation."""
        turn = self.turned[module]
        return turn.q, turn.k


def applies(module: nn.Module) -> bool:
    """Return whether the forward of a module, without decorators, is a function that calls ``apply_rotary_pos_emb``."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        return False
    code = forward.__code__
    if code.co_freevars:
        return False
    return APPLY in code.co_names and APPLY in forward.__globals__


def with_apply(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a changed copy of a module's forward: it calls ``function`` where it called ``apply_rotary_pos_emb``."""

    def remade(old: types.FunctionType) -> types.FunctionType:
        inner = getattr(old, "__wrapped__", None)
        names = old.__globals__
        closure = old.__closure__
        if inner is None:
            names = {**names, APPLY: function}
        else:  # the closure of a decorator holds the decorated function
            cell_of_new = types.CellType(remade(inner))
            cells = (cell_of_new if cell.cell_contents is inner else cell for cell in closure or ())
            closure = tuple(cells)
        made = types.FunctionType(old.__code__, names, old.__name__, old.__defaults__, closure)
        made.__kwdefaults__ = old.__kwdefaults__
        return made

    return types.MethodType(remade(type(module).forward), module)


def leave(q: Tensor, k: Tensor, cos: Any, sin: Any) -> tuple[Tensor, Tensor]:
    """Return q and k unchanged; layers call this function in place of ``apply_rotary_pos_emb``."""
    return q, k


def turns_as_here(function: Callable[..., Any], dim: int, turned: int) -> bool:
    """Return whether ``apply_rotary_pos_emb`` rotates the first ``turned`` of ``dim`` elements as the engine does."""
    if turned > dim or turned % 2:
        return False
    tokens = 5
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, 2, dim, generator=generator)
    k = torch.randn(tokens, 1, dim, generator=generator)
    angle = torch.randn(tokens, turned // 2, generator=generator).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    heads_first = [x.transpose(0, 1)[None] for x in (q, k)]
    try:
        rotated = function(*heads_first, cos[None], sin[None])
        found = [x[0].transpose(0, 1) for x in rotated]
    except Exception:
        return False  # it expects other shapes of q, k, cos or sin
    wanted = prepare_qk(q, k, torch.arange(tokens), QKPre(cos, sin))
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape or not torch.allclose(a, b, atol=1e-5):
            return False
    return True


@torch.no_grad()
def tables(model: nn.Module, rotation: Rotation, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the model's cos and sin of the positions 0 to ``length - 1``, each float32 [length, dim]."""
    module = model.get_submodule(rotation.source)
    position = torch.arange(length, device=device)[None]
    like = torch.zeros(1, 1, 1, device=device)  # gives the dtype and device of the results
    kwargs = dict(rotation.kwargs)
    cos, sin = module(like, position, *rotation.args, **kwargs)
    cos, sin = cos[0].float(), sin[0].float()
    return cos.contiguous(), sin.contiguous()
