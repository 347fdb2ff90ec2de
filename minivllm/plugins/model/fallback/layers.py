"""The engine's replacements for modules of transformers, which accept and return the shapes of the modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.device.layers.fused import Normed


class Replaced(nn.Module):
    """A module of the engine in place of a module of transformers, whose call runs its forward directly.

    It has no hooks, which torch would check in each of hundreds of calls per step.
    """

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Projection(Replaced):
    """A linear layer of the engine that maps [..., in] to [..., out]."""

    def __init__(self, linear: Any, inp: int, out: int) -> None:
        super().__init__()
        self.linear = linear
        self.in_features = inp
        self.out_features = out

    def __call__(self, x: Tensor) -> Tensor:
        out = self.linear(x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """Return the weight, for code that reads its dtype or multiplies by it."""
        return self.linear.tensors["weight"]

    @property
    def bias(self) -> Tensor | None:
        return self.linear.tensors.get("bias")


class Shared:
    """Several matrices that are multiplied by the same tensor, as one product.

    ``piece`` returns the output of one matrix.  The product is computed at the first call for an input.
    """

    def __init__(self, linear: Any, inp: int, sizes: Sequence[int]) -> None:
        self.linear = linear
        self.inp = inp
        self.sizes = list(sizes)
        self.given: Tensor | None = None
        self.pieces: list[Tensor | None] = []

    def piece(self, i: int, x: Tensor) -> Tensor:
        """Return the output [..., out] of matrix i for an input [..., in], and release it here."""
        if self.given is not x or self.pieces[i] is None:
            rows = self.linear(x.reshape(-1, self.inp))
            out = rows.view(*x.shape[:-1], rows.shape[-1])
            self.given = x
            self.pieces = list(out.split(self.sizes, dim=-1))
        found = self.pieces[i]
        assert found is not None
        self.pieces[i] = None
        if all(piece is None for piece in self.pieces):
            self.given = None
        return found


class SharedPiece(Replaced):
    """The module that replaces one of the matrices whose products with an input ``Shared`` computes together."""

    def __init__(self, shared: Shared, i: int) -> None:
        super().__init__()
        self.shared = shared
        self.i = i
        self.in_features = shared.inp
        self.out_features = shared.sizes[i]

    def __call__(self, x: Tensor) -> Tensor:
        return self.shared.piece(self.i, x)


class Gated(Replaced):
    """An MLP with a gate that maps [..., hidden] to [..., hidden]."""

    def __init__(self, up: Callable[[Normed], Tensor], down: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        rows = Normed(x.reshape(-1, x.shape[-1]))
        inner = self.up(rows)
        return self.down(inner).view(x.shape)


class Routed:
    """Replaces the forward of a layer's experts by the engine's kernels on a GPU.

    transformers' own forward reads on the host how many tokens each expert has, unless the dtype is bfloat16.  The
    weights stay in the module.  ``fixed`` is described at ``ExpertProducts``.
    """

    def __init__(self, module: Any, activation: str, fixed: bool) -> None:
        self.module = module
        self.activation = activation
        self.fixed = fixed
        self.products: Any = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum [T, H] of the outputs of each token's experts.

        ``hidden_states`` is [T, H]; ``top_k_index`` and ``top_k_weights`` [T, k] are the ids and weights of the
        experts.
        """
        if self.products is None:  # created at the first call, when the weights are loaded
            self.products = self._make_products()
        ids = top_k_index.int().contiguous()
        weights = top_k_weights.float().contiguous()
        return self.products(hidden_states, ids, weights)[0]

    def _make_products(self) -> Any:
        from minivllm.device.kernels.experts import ExpertProducts

        names = ("gate_up_proj", "down_proj")
        weights = [getattr(self.module, name) for name in names]
        biases = [getattr(self.module, f"{name}_bias", None) for name in names]
        return ExpertProducts(*weights, *biases, self.activation, fixed=self.fixed)


class Norming(Replaced):
    """A norm of the engine that maps [..., dim] to [..., dim]."""

    def __init__(self, norm: Any, dim: int) -> None:
        super().__init__()
        self.norm = norm
        self.dim = dim

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.dim)
        return self.norm(rows)[0].view(x.shape)

    @property
    def weight(self) -> Tensor:
        return self.norm.weight


class Passing(Replaced):
    """The identity, in place of a norm that the engine's attention applies."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


class FallbackHead(Replaced):
    """The output layer on the engine's head, which maps [1, N, hidden] to logits [1, N, V]; a bias is transformers'
    parameter.
    """

    def __init__(self, head: Any, bias: Tensor | None, inp: int, out: int) -> None:
        super().__init__()
        self.head = head
        self.bias = bias
        self.in_features = inp
        self.out_features = out

    def __call__(self, x: Tensor) -> Tensor:
        rows = self.head(x.reshape(-1, self.in_features))
        out = rows.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out.add_(self.bias)


class Outputs:
    """The output of a model's body, with hidden states [1, N, hidden].  All other attributes are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, i: int) -> Tensor:
        return self.last_hidden_state if i == 0 else ()[i]


class GivenBody(nn.Module):
    """A stand-in for the model's body while only the head runs; it returns hidden states that were computed before.

    A submodule of the body that the model calls itself, such as OPT's decoder, is replaced too.
    """

    hidden: Tensor

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body  # stored in __dict__, so that torch does not register the module as a submodule

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["body"], name)
        is_body = isinstance(found, nn.Module) and hasattr(found, "get_input_embeddings")
        return self if is_body else found

    def __call__(self, *args: Any, **kwargs: Any) -> Outputs:
        return Outputs(self.hidden)


def own(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make ``tensor`` the parameter or buffer of a module, which transformers' initialization then leaves alone."""
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    value = getattr(module, name)
    value._is_hf_initialized = True


def place(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = module


def fill_buffers(model: Any, device: str) -> list[str]:
    """Compute buffers that are not in checkpoints, such as rotary frequencies, as transformers does when it loads a
    model.

    Return the names of the buffers that it does not compute.
    """
    made = []
    for name, module in model.named_modules():
        buffers = module._buffers
        empty = [key for key, buffer in buffers.items() if buffer is not None and buffer.is_meta]
        for key in empty:
            old = buffers[key]
            fill = torch.nan if old.is_floating_point() else 0
            buffers[key] = torch.full_like(old, fill, device=device)
            made.append((f"{name}.{key}", buffers, key))
        if empty:
            model._init_weights(module)
    return [name for name, buffers, key in made if bool(buffers[key].isnan().any())]
