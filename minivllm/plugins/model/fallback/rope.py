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
    """The rotary embedding of one layer: the module that computes cos and sin (``source``), and its arguments except
    the positions.
    """

    source: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dim: int  # number of rotated elements of a head


class Ropes:
    """Records the rotary embeddings of a traced step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # id of cos -> module name, arguments and output
        self.made: dict[int, tuple[str, tuple[Any, ...], Mapping[str, Any], Any]] = {}
        self.turned: dict[nn.Module, tuple[Tensor, Tensor, Any, dict[str, Any]]] = {}
        self.known: dict[tuple[Any, int, int], bool] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks, changed = [], []
        for name, module in self.model.named_modules():
            if any(key.endswith("inv_freq") for key, _ in module.named_buffers(recurse=False)):
                hooks.append(module.register_forward_hook(self._note(name), with_kwargs=True))
            if applies(module):
                module.forward = with_apply(module, self._watched(module))  # type: ignore[method-assign]
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
            if isinstance(out, tuple) and len(out) == 2 and all(isinstance(x, Tensor) for x in out):
                self.made[id(out[0])] = (name, args, kwargs, out)

        return hook

    def _watched(self, module: nn.Module) -> Callable[..., Any]:
        function = inspect.unwrap(type(module).forward).__globals__[APPLY]

        def apply(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            if len(args) == 4 and not kwargs and isinstance(out, tuple) and len(out) == 2:
                q, k, cos, sin = args
                self.turned[module] = (*out, cos, {"sin": sin, "function": function, "given": (q, k)})
            return out

        return apply

    def of(self, module: nn.Module, query: Tensor, key: Tensor) -> Rotation | None:
        """Return the rotation that the engine's attention can apply for a layer, None if the layer must rotate
        itself.
        """
        q, k, cos, more = self.turned.get(module, (None, None, None, {}))
        made = self.made.get(id(cos))
        if q is not query or k is not key or made is None or made[3][1] is not more["sin"]:
            return None
        name, args, kwargs, _ = made
        values = tuple(args[2:]), {k: v for k, v in kwargs.items() if k not in ("x", "position_ids")}
        if any(isinstance(v, Tensor) for v in (*values[0], *values[1].values())) or cos.dim() != 3:
            return None
        key_ = more["function"], query.shape[3], cos.shape[2]
        if key_ not in self.known:
            self.known[key_] = turns_as_here(*key_)
        return Rotation(name, values[0], tuple(values[1].items()), cos.shape[2]) if self.known[key_] else None

    def given(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return q and k of a layer before their rotation."""
        return self.turned[module][3]["given"]


def applies(module: nn.Module) -> bool:
    """Return whether the forward of a module, without decorators, is a function that calls ``apply_rotary_pos_emb``."""
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, types.FunctionType) and (
        APPLY in forward.__code__.co_names and not forward.__code__.co_freevars and APPLY in forward.__globals__
    )


def with_apply(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a module that calls ``function`` instead of ``apply_rotary_pos_emb`` of its file."""

    def remade(old: types.FunctionType) -> types.FunctionType:
        inner, names, closure = getattr(old, "__wrapped__", None), old.__globals__, old.__closure__
        if inner is None:
            names = {**names, APPLY: function}
        else:  # the closure of a decorator holds the decorated function
            new = remade(inner)
            cells = (types.CellType(new) if cell.cell_contents is inner else cell for cell in closure or ())
            closure = tuple(cells)
        made = types.FunctionType(old.__code__, names, old.__name__, old.__defaults__, closure)
        made.__kwdefaults__ = old.__kwdefaults__
        return made

    return types.MethodType(remade(type(module).forward), module)


def leave(q: Tensor, k: Tensor, cos: Any, sin: Any) -> tuple[Tensor, Tensor]:
    """Return q and k unchanged, in place of ``apply_rotary_pos_emb``."""
    return q, k


def turns_as_here(function: Callable[..., Any], dim: int, turned: int) -> bool:
    """Return whether ``apply_rotary_pos_emb`` rotates the first ``turned`` of ``dim`` elements as the engine does."""
    if turned > dim or turned % 2:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, heads, dim, generator=generator) for heads in (2, 1))
    angle = torch.randn(5, turned // 2, generator=generator).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    try:
        found = function(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        found = [x[0].transpose(0, 1) for x in found]
    except Exception:
        return False  # the function expects other shapes
    wanted = prepare_qk(q, k, torch.arange(5), QKPre(cos, sin))
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


@torch.no_grad()
def tables(model: nn.Module, rotation: Rotation, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the model's cos and sin of all positions, float32 [length, dim]."""
    module = model.get_submodule(rotation.source)
    position = torch.arange(length, device=device)[None]
    cos, sin = module(torch.zeros(1, 1, 1, device=device), position, *rotation.args, **dict(rotation.kwargs))
    return cos[0].float().contiguous(), sin[0].float().contiguous()
