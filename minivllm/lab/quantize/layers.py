"""transformers' modules of a model, of which one layer at a time has weights.

transformers has a module for every architecture it knows, and its layers are called in the same way: hidden states in,
hidden states out, and beside them what no layer changes.  So one piece of code runs them all.  The engine's own layers
are made for batches of a KV cache, and of all of a model at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.device.loading.hf_config import Checkpoint
from minivllm.device.loading.tensor_files import Header, checkpoint_headers, opened
from minivllm.errors import ModelError, describe_error

LAYERS = ("layers", "h", "blocks")  # what lists of layers are called
KEPT = 0.125  # of a device's free memory: what hidden states may take of it


@dataclass
class Inputs:
    """Of linear modules that are given the same tensor [tokens, k]."""

    names: list[str]
    moments: Tensor  # f32 [k, k]: the mean of x xᵀ
    means: Tensor  # f32 [k]: of absolute values
    tokens: int = 0
    made_by: str = ""  # the module whose output the tensor is, if one's is


class _Enough(Exception):
    """The layers have been met."""


class LayerModel:
    """Layers without weights, but those that ``filled`` fills.  ModelError if transformers does not know the model, its
    layers are none of those above, or the checkpoint lacks their tensors."""

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, torch.device(device), dtype
        self.keeps = torch.device("cpu")  # hidden states of the samples
        self.headers: Mapping[str, Header] = checkpoint_headers(checkpoint.folder)
        self.model = _without_weights(checkpoint, dtype)
        self.prefix, self.layers = _layers(self.model)
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)
        self._calls: dict[int, tuple[list[Any], dict[str, Any]]] = {}
        for number, layer in enumerate(self.layers):
            self._check(number, layer)

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    def name(self, number: int, module: str = "") -> str:
        """ "model.layers.3.self_attn.q_proj" of "self_attn.q_proj"."""
        return f"{self.prefix}.{number}" + (f".{module}" if module else "")

    def linears(self, number: int) -> dict[str, nn.Linear]:
        """Those of a layer by their names in it."""
        return {n: m for n, m in self.layers[number].named_modules() if type(m) is nn.Linear}

    def tensor(self, name: str) -> Tensor:
        """Of the checkpoint, as it is there."""
        header = self.headers[name]
        with opened(header.path) as file:
            return file.get_tensor(header.name)

    def _check(self, number: int, layer: nn.Module) -> None:
        for name, p in layer.named_parameters():
            whole = self.name(number, name)
            header = self.headers.get(whole)
            if header is None:
                raise ModelError(
                    f"{self.checkpoint.folder}: transformers' {type(self.model).__name__} has {whole}, and the "
                    "checkpoint none of that name: its layers are not plain (experts, or tensors by other names), and "
                    "that is not implemented; want a dense model"
                )
            if header.shape != tuple(p.shape):
                raise ModelError(
                    f"{self.checkpoint.folder}: tensor {whole} has shape {list(header.shape)}, want {list(p.shape)}; "
                    "config.json and the weights do not belong together"
                )
        if not self.linears(number):
            raise ModelError(
                f"{self.checkpoint.folder}: layer {number} of {type(self.model).__name__} has no linear module of "
                "torch's class; that is not implemented"
            )

    @contextlib.contextmanager
    def filled(self, number: int) -> Iterator[nn.Module]:
        """A layer with the checkpoint's weights, on the device."""
        layer = self.layers[number]
        names = [name for name, _ in layer.named_parameters()]
        try:
            for name in names:
                place(layer, name, self.tensor(self.name(number, name)).to(self.device, self.dtype))
            yield layer
        finally:
            for name in names:
                place(layer, name, layer.get_parameter(name).to("meta"))

    @torch.no_grad()
    def embedded(self, samples: Tensor) -> list[Tensor]:
        """The hidden states [1, tokens, width] with which the first layer is called, of each sample: on the device if
        they take a small part of what is free there, else on the CPU."""
        embedding = self.model.get_input_embeddings()
        own = next(n for n, m in self.model.named_modules() if m is embedding)
        if f"{own}.weight" not in self.headers:
            raise ModelError(f"{self.checkpoint.folder}: the checkpoint lacks {own}.weight; that is not implemented")
        place(embedding, "weight", self.tensor(f"{own}.weight").to(self.device, self.dtype))
        found: list[Tensor] = []
        stubs = _Stubs(self.layers)
        try:
            with stubs.placed():
                for row in samples:
                    calls = self._call(row, stubs)
                    if not found and self._has_room(len(samples) * stubs.first.nbytes):
                        self.keeps = self.device
                    found.append(stubs.first.to(self.keeps))
                    if not self._calls:
                        self._calls = calls
                    elif not all(_same(calls[n], self._calls[n]) for n in calls):
                        raise ModelError(self._unusual("are given more than hidden states of a sample's tokens"))
        finally:
            place(embedding, "weight", embedding.weight.to("meta"))
        return found

    def _has_room(self, more: int) -> bool:
        return self.device.type == "cuda" and more <= KEPT * torch.cuda.mem_get_info(self.device)[0]

    def _call(self, row: Tensor, stubs: _Stubs) -> dict[int, tuple[list[Any], dict[str, Any]]]:
        try:
            self.model.base_model(input_ids=row[None].to(self.device), use_cache=False)
        except _Enough:
            pass
        except Exception as e:
            raise ModelError(self._unusual(f"are not reached: {describe_error(e)}")) from e
        if len(stubs.calls) != len(self.layers) or not stubs.in_a_row:
            raise ModelError(self._unusual("are not called one after another"))
        return dict(stubs.calls)

    def _unusual(self, what: str) -> str:
        return f"layers of {type(self.model).__name__} {what}; that is not implemented"

    @torch.no_grad()
    def run(self, number: int, hidden: Tensor) -> Tensor:
        """One sample [1, tokens, width] through a layer that is filled; where hidden states are kept, as it comes."""
        args, more = self._calls[number]
        out = self.layers[number](hidden.to(self.device), *args, **more)
        return (out[0] if isinstance(out, tuple) else out).to(self.keeps)


class LayerWeights:
    """The parameters of a filled layer by their names in it, float32 [...] on the device as they are read or set; the
    layer computes with them in its dtype."""

    def __init__(self, model: LayerModel, number: int) -> None:
        self.model, self.number, self.layer = model, number, model.layers[number]
        self.changed: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor:
        return self.changed[name] if name in self.changed else self._original(name)

    def set(self, values: Mapping[str, Tensor]) -> None:
        self.changed |= values
        for name, value in values.items():
            place(self.layer, name, value.to(self.model.dtype))

    def restore(self, names: Sequence[str], changed: Mapping[str, Tensor]) -> None:
        """``names`` as they were when ``changed`` was a copy of what had been."""
        self.set({name: self.restored(name, changed) for name in names})
        self.changed = dict(changed)

    def restored(self, name: str, changed: Mapping[str, Tensor]) -> Tensor:
        return changed[name] if name in changed else self._original(name)

    def _original(self, name: str) -> Tensor:
        stored = self.model.tensor(self.model.name(self.number, name))
        return stored.to(self.model.device).float()  # there: a CPU takes longer to make them longer than to send them

    def stored(self, name: str) -> Tensor:
        """In the checkpoint's dtype, on the CPU."""
        original = self.model.tensor(self.model.name(self.number, name))
        return self.changed[name].to("cpu", original.dtype) if name in self.changed else original

    def dtype(self, name: str) -> torch.dtype:
        return self.model.tensor(self.model.name(self.number, name)).dtype

    def run(self, hidden: Tensor) -> Tensor:
        return self.model.run(self.number, hidden)


def place(module: nn.Module, name: str, tensor: Tensor) -> None:
    """A tensor in the place of a parameter."""
    *path, last = name.split(".")
    owner = module.get_submodule(".".join(path))
    owner._parameters[last] = nn.Parameter(tensor, requires_grad=False)


def watch(
    layer: nn.Module,
    wanted: Sequence[str],
    run: Callable[[Tensor], Tensor],
    hidden: Sequence[Tensor],
    seen: Callable[[], None],
) -> list[Inputs]:
    """Second moments and mean sizes of what modules are given; one ``Inputs`` for all that are given one tensor.
    ModelError for a module that is never called, or called in another place in another sample."""
    found: dict[str, Inputs] = {}  # by each module
    alive: list[tuple[Tensor, str]] = []  # of one sample: tensors, and which module was the first to be given it
    makers: list[tuple[Tensor, str]] = []

    def before(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            x = args[0]
            first = next((n for tensor, n in alive if tensor is x), None)
            if first is not None and found.setdefault(name, found[first]) is found[first]:
                if name not in found[first].names:
                    found[first].names.append(name)
                return
            alive.append((x, name))
            flat = x.reshape(-1, x.shape[-1])
            mine = found.get(name)
            if mine is None:
                k = flat.shape[1]
                maker = next((n for tensor, n in makers if tensor is x), "")
                zeros = torch.zeros(k, k, device=x.device), torch.zeros(k, device=x.device)
                mine = found[name] = Inputs([name], *zeros, 0, maker)
            mine.tokens += len(flat)
            _add_moments(mine.moments, flat)
            mine.means += flat.abs().sum(0, dtype=torch.float32)

        return hook

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, out: makers.append((out, name)) if isinstance(out, Tensor) else None

    hooks: list[Any] = [layer.get_submodule(n).register_forward_pre_hook(before(n)) for n in wanted]
    for name, module in layer.named_modules():
        if name and next(module.children(), None) is None:
            hooks.append(module.register_forward_hook(after(name)))
    try:
        for x in hidden:
            alive.clear()
            makers.clear()
            run(x)
            seen()
    finally:
        for hook in hooks:
            hook.remove()
        alive.clear()
        makers.clear()
    if missing := [name for name in wanted if name not in found]:
        raise ModelError(f"module {missing[0]} is never called by its layer; want it left out with --skip")
    every = {id(one): one for one in found.values()}
    for one in every.values():
        one.moments /= one.tokens
        one.means /= one.tokens
    return list(every.values())


def _add_moments(moments: Tensor, x: Tensor) -> None:
    """xᵀ x of x [tokens, k], with sums in float32, to moments f32 [k, k].  Tensor cores multiply numbers of 16 bits
    without rounding, and float32's at a tenth of that speed."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        moments += torch.mm(x.t(), x, out_dtype=torch.float32)
    else:
        wide = x.float()
        moments.addmm_(wide.t(), wide)


class _Stubs:
    """In the place of layers: note what they are called with, and hand hidden states on."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.calls: dict[int, tuple[list[Any], dict[str, Any]]] = {}
        self.first = torch.empty(0)
        self.in_a_row = True
        self._last: Tensor | None = None

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        try:
            for number, layer in enumerate(self.layers):
                layer.forward = self._of(number)  # type: ignore[method-assign]
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _of(self, number: int) -> Callable[..., Tensor]:
        def forward(*args: Any, **more: Any) -> Tensor:
            rest = list(args)
            hidden = rest.pop(0) if rest else more.pop("hidden_states")
            if number == 0:
                self.first, self.calls, self._last, self.in_a_row = hidden, {}, hidden, True
            self.in_a_row &= hidden is self._last and len(self.calls) == number
            self.calls[number] = rest, more
            if number == len(self.layers) - 1:
                raise _Enough
            self._last = hidden.clone()
            return self._last

        return forward


def _same(a: Any, b: Any) -> bool:
    """Whether two calls are given the same."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b)


def _without_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> nn.Module:
    """transformers' model whose parameters are on the meta device, and its tables where they are used."""
    from transformers import AutoModelForCausalLM

    try:
        with parameters_on_meta():
            made = AutoModelForCausalLM.from_config(checkpoint.from_transformers(), dtype=dtype)
    except ModelError:
        raise
    except Exception as e:  # a config that it does not know, and much else
        raise ModelError(
            f"{checkpoint.folder}: transformers makes no model of architecture {checkpoint.architecture}: "
            f"{describe_error(e)}"
        ) from e
    return made.eval()


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters of modules that are made within take no memory; buffers, which no checkpoint has, are as they are."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        plain(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def _layers(model: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    """The name of the list of layers, and the layers."""
    count = getattr(model.config, "num_hidden_layers", None)
    for name, found in model.named_modules():
        if isinstance(found, nn.ModuleList) and name.rpartition(".")[2] in LAYERS and len(found) == count:
            return name, list(found)
    raise ModelError(
        f"transformers' {type(model).__name__} has no list of {count} layers by the names {', '.join(LAYERS)}; that is "
        "not implemented"
    )
