"""Run transformers' model one layer at a time, so that only this layer's weights are in memory.

transformers has a module for each architecture.  All call their layers alike: hidden states in, hidden states out, and
further arguments that no layer changes.  The same code therefore runs every architecture.  The engine's own layers do
not fit here: they compute batches with a KV cache, and are loaded as a whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.device.loading.hf_config import Checkpoint
from minivllm.device.loading.tensor_files import Header, checkpoint_headers, opened
from minivllm.errors import ModelError, describe_error

LAYERS = ("layers", "h", "blocks")  # names that transformers' models give to their list of layers
KEPT = 0.125  # largest share of a GPU's free memory for hidden states


@dataclass
class Inputs:
    """Statistics of a tensor [tokens, k] that one or more linear modules read."""

    names: list[str]  # of the modules
    moments: Tensor  # f32 [k, k]: the mean of x xᵀ
    means: Tensor  # f32 [k]: mean absolute values
    tokens: int = 0
    made_by: str = ""  # name of the module whose output the tensor is, "" if there is none


# the positional and keyword arguments of a layer except its hidden states
Call = tuple[list[Any], dict[str, Any]]


class _StopForwardError(Exception):
    """The exception that ends a forward pass when it reaches the last layer, whose output is not needed."""


class LayerModel:
    """transformers' model without weights, and its layers, which ``filled`` fills one at a time."""

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> None:
        """Create the model; layers compute on ``device`` in ``dtype``.

        Raise ModelError if transformers does not have the architecture, its list of layers has no known name, or the
        checkpoint lacks a tensor of a layer.
        """
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.dtype = dtype
        self.keeps = torch.device("cpu")  # where the hidden states of the samples are stored
        self.headers: Mapping[str, Header] = checkpoint_headers(checkpoint.folder)
        self.model = _without_weights(checkpoint, dtype)
        self.prefix, self.layers = _find_layers(self.model)
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)
        self._calls: dict[int, Call] = {}
        for number, layer in enumerate(self.layers):
            self._check(number, layer)

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens in the embedding table."""
        return self.model.get_input_embeddings().weight.shape[0]

    def name(self, number: int, module: str = "") -> str:
        """Return the full name of a module of layer ``number``, such as "model.layers.3.self_attn.q_proj"."""
        return f"{self.prefix}.{number}" + (f".{module}" if module else "")

    def linears(self, number: int) -> dict[str, nn.Linear]:
        """Return the linear modules of layer ``number`` by their names in the layer."""
        return {n: m for n, m in self.layers[number].named_modules() if type(m) is nn.Linear}

    def tensor(self, name: str) -> Tensor:
        """Read a tensor of the checkpoint, in its stored dtype."""
        header = self.headers[name]
        with opened(header.path) as file:
            return file.get_tensor(header.name)

    def _check(self, number: int, layer: nn.Module) -> None:
        """Raise ModelError if the checkpoint lacks a parameter of a layer, or the layer has no linear module."""
        folder = self.checkpoint.folder
        model = type(self.model).__name__
        for name, p in layer.named_parameters():
            whole = self.name(number, name)
            header = self.headers.get(whole)
            if header is None:
                raise ModelError(
                    f"{folder}: transformers' {model} has a parameter {whole}, which the checkpoint lacks: its layers "
                    "are not plain (they have experts, or tensors under other names); expected a dense model"
                )
            if header.shape != tuple(p.shape):
                raise ModelError(
                    f"{folder}: tensor {whole} has shape {list(header.shape)}, expected {list(p.shape)}; config.json "
                    "and the weights do not belong together"
                )
        if not self.linears(number):
            raise ModelError(
                f"{folder}: layer {number} of {model} has no module of the class torch.nn.Linear; quantizing it is not "
                "implemented"
            )

    @contextlib.contextmanager
    def filled(self, number: int) -> Iterator[nn.Module]:
        """Load the checkpoint's weights into a layer, on the device, while the context is open."""
        layer = self.layers[number]
        names = [name for name, _ in layer.named_parameters()]
        try:
            for name in names:
                weight = self.tensor(self.name(number, name))
                place(layer, name, weight.to(self.device, self.dtype))
            yield layer
        finally:
            for name in names:
                place(layer, name, layer.get_parameter(name).to("meta"))

    @torch.no_grad()
    def embedded(self, samples: Tensor) -> list[Tensor]:
        """Return the hidden states [1, tokens, width] that enter the first layer, for each sample.

        They are stored on a GPU if they take a small part of its free memory, else on the CPU.  Raise ModelError if the
        checkpoint lacks the embedding, or if a layer needs more than the hidden states of the preceding layer.
        """
        embedding = self.model.get_input_embeddings()
        weight = next(f"{name}.weight" for name, module in self.model.named_modules() if module is embedding)
        if weight not in self.headers:
            raise ModelError(f"{self.checkpoint.folder}: the checkpoint lacks {weight}, the table of the embedding")
        place(embedding, "weight", self.tensor(weight).to(self.device, self.dtype))
        states: list[Tensor] = []
        stubs = _Stubs(self.layers)
        try:
            with stubs.placed():
                for row in samples:
                    calls = self._record_calls(row, stubs)
                    if not states and self._has_room(len(samples) * stubs.first.nbytes):
                        self.keeps = self.device
                    states.append(stubs.first.to(self.keeps))
                    if not self._calls:
                        self._calls = calls
                    elif not all(_same(calls[n], self._calls[n]) for n in calls):
                        raise self._unusual("its layers receive further arguments that depend on the tokens")
        finally:
            place(embedding, "weight", embedding.weight.to("meta"))
        return states

    def _has_room(self, nbytes: int) -> bool:
        """Return whether the device is a GPU on which ``nbytes`` are a small part of the free memory."""
        return self.device.type == "cuda" and nbytes <= KEPT * torch.cuda.mem_get_info(self.device)[0]

    def _record_calls(self, row: Tensor, stubs: _Stubs) -> dict[int, Call]:
        """Run the model on a sample up to its last layer, and return the arguments of each layer.

        Raise ModelError if the forward pass fails, or if the output of a layer is not the input of the next.
        """
        try:
            self.model.base_model(input_ids=row[None].to(self.device), use_cache=False)
        except _StopForwardError:
            pass
        except Exception as e:
            raise self._unusual(f"its layers cannot be reached: {describe_error(e)}") from e
        if len(stubs.calls) != len(self.layers) or not stubs.in_sequence:
            raise self._unusual("its layers are not called one after another")
        return dict(stubs.calls)

    def _unusual(self, problem: str) -> ModelError:
        return ModelError(f"{type(self.model).__name__}: {problem}; quantizing it is not implemented")

    @torch.no_grad()
    def run(self, number: int, hidden: Tensor) -> Tensor:
        """Compute a filled layer for a sample's hidden states [1, tokens, width]; the output is on ``keeps``."""
        args, more = self._calls[number]
        out = self.layers[number](hidden.to(self.device), *args, **more)
        return (out[0] if isinstance(out, tuple) else out).to(self.keeps)


class LayerWeights:
    """The parameters of a filled layer, by their names in the layer.

    They are read and set as float32 on the device.  The layer computes with copies in its dtype.
    """

    def __init__(self, model: LayerModel, number: int) -> None:
        self.model = model
        self.number = number
        self.layer = model.layers[number]
        self.changed: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor:
        """Return the current value of a parameter, float32."""
        return self.restored(name, self.changed)

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Change parameters."""
        self.changed |= values
        for name, value in values.items():
            place(self.layer, name, value.to(self.model.dtype))

    def restore(self, names: Sequence[str], changed: Mapping[str, Tensor]) -> None:
        """Set ``names`` back to their values at the time when ``changed`` was copied."""
        self.set({name: self.restored(name, changed) for name in names})
        self.changed = dict(changed)

    def restored(self, name: str, changed: Mapping[str, Tensor]) -> Tensor:
        """Return the value of a parameter in ``changed``, or else the checkpoint's, float32."""
        if name in changed:
            return changed[name]
        # converted on the device, because a CPU is slower
        return self._checkpoint_tensor(name).to(self.model.device).float()

    def _checkpoint_tensor(self, name: str) -> Tensor:
        return self.model.tensor(self.model.name(self.number, name))

    def stored(self, name: str) -> Tensor:
        """Return the current value of a parameter in the checkpoint's dtype, on the CPU."""
        original = self._checkpoint_tensor(name)
        return self.changed[name].to("cpu", original.dtype) if name in self.changed else original

    def dtype(self, name: str) -> torch.dtype:
        """Return the checkpoint's dtype of a parameter."""
        return self._checkpoint_tensor(name).dtype

    def run(self, hidden: Tensor) -> Tensor:
        """Compute the layer for a sample's hidden states."""
        return self.model.run(self.number, hidden)


def place(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter, given by its dotted name, by a tensor."""
    *path, last = name.split(".")
    owner = module.get_submodule(".".join(path))
    owner._parameters[last] = nn.Parameter(tensor, requires_grad=False)


class _Watcher:
    """Adds up statistics of the tensors that modules read, and the module that wrote each of them, in forward hooks."""

    def __init__(self) -> None:
        self.found: dict[str, Inputs] = {}  # module -> its inputs; modules with the same input share the object
        # the tensors of the current sample; keeping them alive makes each a different object
        self.read: list[tuple[Tensor, str]] = []  # (tensor, first module that read it)
        self.written: list[tuple[Tensor, str]] = []  # (tensor, module that wrote it)

    def before(self, name: str, module: nn.Module, args: Any) -> None:
        """Add the input of a module to its statistics; the forward pre-hook of the wanted modules.

        A tensor that several modules read is counted once, and these modules share one ``Inputs``.
        """
        x = args[0]
        first = _name_of(x, self.read)
        if first is not None:
            shared = self.found[first]
            if self.found.setdefault(name, shared) is shared:
                if name not in shared.names:
                    shared.names.append(name)
                return
        self.read.append((x, name))
        flat = x.reshape(-1, x.shape[-1])
        if name not in self.found:
            k = flat.shape[1]
            moments = torch.zeros(k, k, device=x.device)
            means = torch.zeros(k, device=x.device)
            self.found[name] = Inputs([name], moments, means, 0, _name_of(x, self.written) or "")
        inputs = self.found[name]
        inputs.tokens += len(flat)
        _add_moments(inputs.moments, flat)
        inputs.means += flat.abs().sum(0, dtype=torch.float32)

    def after(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        """Record the output of a module; the forward hook of modules without submodules."""
        if isinstance(out, Tensor):
            self.written.append((out, name))

    def clear(self) -> None:
        """Release the tensors of a sample."""
        self.read.clear()
        self.written.clear()


def _name_of(x: Tensor, named: Sequence[tuple[Tensor, str]]) -> str | None:
    """Return the name that is stored with a tensor object, or None."""
    return next((name for tensor, name in named if tensor is x), None)


def watch(
    layer: nn.Module,
    wanted: Sequence[str],
    run: Callable[[Tensor], Tensor],
    hidden: Sequence[Tensor],
    seen: Callable[[], None],
) -> list[Inputs]:
    """Run the layer on all samples, and return the statistics of the tensors that the modules ``wanted`` read.

    Modules that read the same tensor share one ``Inputs``.  ``seen`` is called after each sample.  Raise ModelError for
    a module that the layer never calls.
    """
    watcher = _Watcher()
    hooks: list[Any] = []
    for name in wanted:
        hooks.append(layer.get_submodule(name).register_forward_pre_hook(partial(watcher.before, name)))
    for name, module in layer.named_modules():
        if name and next(module.children(), None) is None:
            hooks.append(module.register_forward_hook(partial(watcher.after, name)))
    try:
        for x in hidden:
            watcher.clear()
            run(x)
            seen()
    finally:
        for hook in hooks:
            hook.remove()
        watcher.clear()
    for name in wanted:
        if name not in watcher.found:
            raise ModelError(f"module {name} is never called by its layer; leave it out with --skip")
    distinct = list({id(inputs): inputs for inputs in watcher.found.values()}.values())
    for inputs in distinct:
        inputs.moments /= inputs.tokens
        inputs.means /= inputs.tokens
    return distinct


def _add_moments(moments: Tensor, x: Tensor) -> None:
    """Add xᵀ x of x [tokens, k] to ``moments`` f32 [k, k], summed in float32.

    On a GPU, tensor cores multiply 16-bit numbers exactly, and ten times as fast as float32.
    """
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        moments += torch.mm(x.t(), x, out_dtype=torch.float32)
    else:
        wide = x.float()
        moments.addmm_(wide.t(), wide)


class _Stubs:
    """Replacements of the layers' ``forward`` that record their arguments and return their hidden states unchanged."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.calls: dict[int, Call] = {}
        self.first = torch.empty(0)  # the hidden states that enter the first layer
        self.in_sequence = True  # whether each layer received the output of the preceding layer
        self._last: Tensor | None = None

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Replace ``forward`` of every layer while the context is open."""
        try:
            for number, layer in enumerate(self.layers):
                layer.forward = partial(self._forward, number)  # type: ignore[method-assign]
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _forward(self, number: int, /, *args: Any, **more: Any) -> Tensor:
        """Record the call of layer ``number``; raise _StopForwardError for the last layer."""
        rest = list(args)
        hidden = rest.pop(0) if rest else more.pop("hidden_states")
        if number == 0:
            self.first = hidden
            self._last = hidden
            self.calls = {}
            self.in_sequence = True
        self.in_sequence &= hidden is self._last and len(self.calls) == number
        self.calls[number] = rest, more
        if number == len(self.layers) - 1:
            raise _StopForwardError
        self._last = hidden.clone()
        return self._last


def _same(a: Any, b: Any) -> bool:
    """Return whether two arguments are equal; objects of an unknown type count as equal to others of their type."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b)


def _without_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> nn.Module:
    """Create transformers' model with parameters on the meta device and real buffers.

    ModelError if transformers does not support the checkpoint's config.json."""
    from transformers import AutoModelForCausalLM

    try:
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(checkpoint.from_transformers(), dtype=dtype)
    except ModelError:
        raise
    except Exception as e:  # transformers raises errors of many types for a config that it does not support
        raise ModelError(
            f"{checkpoint.folder}: transformers makes no model of architecture {checkpoint.architecture}: "
            f"{describe_error(e)}"
        ) from e
    return model.eval()


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create parameters on the meta device, where they take no memory, while the context is open.

    Buffers stay as they are, since no checkpoint stores them.
    """
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


def _find_layers(model: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    """Return the name of the model's list of layers, and the layers.  Raise ModelError if there is none."""
    count = getattr(model.config, "num_hidden_layers", None)
    for name, found in model.named_modules():
        if isinstance(found, nn.ModuleList) and name.rpartition(".")[2] in LAYERS and len(found) == count:
            return name, list(found)
    raise ModelError(
        f"transformers' {type(model).__name__} has no list of {count} layers with one of the names "
        f"{', '.join(LAYERS)}; quantizing it is not implemented"
    )
