"""Trace one step of a model on the meta device, and record the calls of attention and modules with the same input.

The tensors have no values.  A model that reads values on the host (``.item()``, a loop over experts) therefore raises,
and is refused.  Its steps could be neither captured nor planned ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.errors import ModelError, shown

from .attend import listening
from .blank import INSTEAD, one_line
from .layers import GivenBody, place
from .rope import Ropes, Rotation

TOKENS = 13  # tokens of the traced step, a number that is no dimension of any model
# arguments of attention that transformers' modules pass, and that attention over a paged cache ignores
NEEDLESS = {
    "position_ids", "use_cache", "output_attentions", "output_hidden_states", "cache_position", "dropout",
    "position_embeddings", "num_items_in_batch", "output_router_logits", "deterministic", "return_dict",
}  # fmt: skip
READ = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}


@dataclass(frozen=True)
class Call:
    """A call of an attention layer.

    ``module`` is the name of the layer.  ``sinks`` is the name of its parameter that is passed as attention sinks, or
    None.
    """

    module: str
    spec: AttnSpec
    sinks: str | None
    rotation: Rotation | None
    # (name of the module that computes q, name of the module that computes k), both before the rotation; None if a
    # layer has no such modules
    before: tuple[str, str] | None


@dataclass
class ModelTrace:
    calls: list[Call] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)  # name of a module without submodules -> its input tensor
    outputs: dict[str, Any] = field(default_factory=dict)
    often: set[str] = field(default_factory=set)  # modules without children that were called more than once
    hidden: int = 0


class _Listener:
    def __init__(self, model: nn.Module, trace: ModelTrace, ropes: Ropes) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.trace = trace
        self.ropes = ropes
        self.seen: set[str] = set()
        self.keys: list[Tensor] = []  # of each call

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        name = self.names[module]
        label = f"{name} ({type(module).__name__})"
        if name in self.seen:
            raise ModelError(f"{label} calls attention twice in a step: expected one call per layer; {INSTEAD}")
        self.seen.add(name)
        if mask is not None:
            raise ModelError(f"{label} has a mask of its own: only causal attention is served; {INSTEAD}")
        _check_arguments(module, kwargs, label)
        keys_of_tokens = query.shape[2] == key.shape[2] == TOKENS
        if not keys_of_tokens or value.shape[1] != key.shape[1]:
            raise ModelError(f"{label} attends to keys that are not its tokens' own; {INSTEAD}")
        sinks = self._sinks(module, kwargs.get("s_aux"), label)
        spec = self._spec(query, key, value, kwargs, label)
        rotation = self.ropes.of(module, query, key)
        q, k = (query, key) if rotation is None else self.ropes.given(module)
        q_maker, k_maker = self._maker(name, q), self._maker(name, k)
        makers = (q_maker, k_maker) if q_maker and k_maker else None
        self.keys.append(key)
        call = Call(name, spec, sinks, rotation, makers)
        self.trace.calls.append(call)
        heads, dim_v = query.shape[1], value.shape[3]
        return query.new_empty(1, TOKENS, heads, dim_v), None

    def leave_shared(self) -> None:
        """Mark the calls whose keys several layers read: the model computes these keys itself, with its own norms and
        rotation.
        """
        made = [_memory(key) for key in self.keys]
        for i, call in enumerate(self.trace.calls):
            if made.count(made[i]) > 1:
                self.trace.calls[i] = replace(call, rotation=None, before=None)

    def _maker(self, name: str, x: Tensor) -> str | None:
        """Return the module that computes x [1, heads, T, dim] for an attention module, None if there is none.

        Its output may also be x as [1, T, heads, dim].
        """
        for leaf, out in self.trace.outputs.items():
            parent = leaf.rpartition(".")[0]
            if parent != name or not isinstance(out, Tensor) or out.dim() != 4 or _memory(out) != _memory(x):
                continue
            for view in (out, out.transpose(1, 2)):
                if view.shape == x.shape and view.stride() == x.stride():
                    return leaf
        return None

    def _spec(self, query: Tensor, key: Tensor, value: Tensor, kwargs: Mapping[str, Any], label: str) -> AttnSpec:
        _, heads, _, dim_q = query.shape
        _, kv_heads, _, dim_k = key.shape
        if heads % kv_heads or dim_q != dim_k:
            raise ModelError(f"{label}: {heads} heads of {dim_q} read {kv_heads} of {dim_k}; {INSTEAD}")
        scale = _positive(kwargs, "scaling", label)
        softcap = _positive(kwargs, "softcap", label)
        window = _positive(kwargs, "sliding_window", label)
        sinks = kwargs.get("s_aux") is not None
        dim_v = value.shape[3]
        return AttnSpec(heads, kv_heads, dim_q, dim_v, window=window, sinks=sinks, softcap=softcap, scale=scale)

    def _sinks(self, module: nn.Module, given: Any, label: str) -> str | None:
        if given is None:
            return None
        names = [name for name, param in module.named_parameters(recurse=False) if param is given]
        if names != ["sinks"]:
            raise ModelError(f"{label}: its sinks are not its parameter 'sinks'; {INSTEAD}")
        return names[0]


def _positive(kwargs: Mapping[str, Any], name: str, label: str) -> Any:
    """Return an argument of attention, a positive number or None."""
    number = kwargs.get(name)
    if number is not None and (not isinstance(number, (int, float)) or number <= 0):
        raise ModelError(f"{label}: {name}={shown(number)}: expected a positive number; {INSTEAD}")
    return number


def _check_arguments(module: nn.Module, kwargs: Mapping[str, Any], label: str) -> None:
    """Raise ModelError if a module passes arguments to attention that the engine does not implement."""
    passed = {name for name, value in kwargs.items() if value is not None}
    strange = sorted(passed - NEEDLESS - READ)
    if strange:
        raise ModelError(f"{label} passes {strange[0]} to attention, which is not implemented; {INSTEAD}")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise ModelError(f"{label} attends to later tokens (is_causal=False): that is not implemented; {INSTEAD}")


def _memory(x: Tensor) -> Any:
    return x.untyped_storage()._cdata, x.storage_offset()


class _Counting(TorchFunctionMode):
    """Records whether the model counts the tokens of a step with ``arange``, instead of reading their positions."""

    counted = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.arange:
            numbers = [arg for arg in args if isinstance(arg, int)]
            self.counted = self.counted or TOKENS in numbers
        return func(*args, **(kwargs or {}))


def trace_model(model: Any, cfg: Any) -> ModelTrace:
    """Run one step of a model on the meta device, and return the recorded calls of attention and the inputs of modules.

    Raise ModelError, which names the module or field, for a model that the engine cannot serve.
    """
    label = f"transformers' {type(model).__name__}"
    base = model.base_model
    if base is model:
        raise ModelError(f"{label}: its forward does not call a separate body and head; {INSTEAD}")
    found = ModelTrace()
    ropes = Ropes(model)
    listener = _Listener(model, found, ropes)
    counting = _Counting()
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with ExitStack() as stack:
        for hook in _hooks(model, found):
            stack.callback(hook.remove)
        for context in (ropes.watching(), listening(listener), torch.no_grad(), counting):
            stack.enter_context(context)
        try:
            out = base(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
            hidden = out.last_hidden_state
            logits = _logits(model, hidden)
        except ModelError:
            raise
        except Exception as exc:
            problem = "cannot run without values of tensors on the host" if _needs_values(exc) else "cannot run"
            raise ModelError(f"{label} {problem}: {one_line(exc)}; {INSTEAD}") from exc
    if counting.counted:
        raise ModelError(f"{label} counts the tokens of a step instead of reading their positions; {INSTEAD}")
    for name, tensor, shape in (("hidden states", hidden, "[1, T, H]"), ("logits", logits, "[1, N, V]")):
        if tensor.dim() != 3 or tuple(tensor.shape[:2]) != (1, TOKENS):
            raise ModelError(f"{label} gives {name} of shape {list(tensor.shape)}, expected {shape}; {INSTEAD}")
    found.hidden = hidden.shape[2]
    listener.leave_shared()
    _check_layers(found, cfg, label)
    return found


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """Return the model's logits for hidden states."""
    body, stand_in = model.base_model, GivenBody(model.base_model)
    stand_in.hidden = hidden
    place(model, model.base_model_prefix, stand_in)
    try:
        return model(inputs_embeds=hidden, use_cache=False, return_dict=True).logits
    finally:
        place(model, model.base_model_prefix, body)


def _needs_values(exc: Exception) -> bool:
    return "meta" in str(exc) or isinstance(exc, NotImplementedError)


def _hooks(model: nn.Module, found: ModelTrace) -> list[Any]:
    """Register hooks that record the inputs and outputs of all modules without submodules in ``found``, and return the
    hooks.
    """

    def record_input(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if name in found.inputs:
                found.often.add(name)
            found.inputs[name] = args[0] if args else None

        return hook

    def record_output(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            found.outputs[name] = out

        return hook

    hooks: list[Any] = []
    for name, module in model.named_modules():
        if not list(module.children()):
            hooks.append(module.register_forward_pre_hook(record_input(name)))
            hooks.append(module.register_forward_hook(record_output(name)))
    return hooks


def _field(cfg: Any, name: str) -> Any:
    try:
        return getattr(cfg, name, None)
    except Exception as exc:  # transformers raises an error of its own for a field that differs between layers
        raise ModelError(f"per_layer_config: {name} differs from layer to layer, which is not implemented") from exc


def _check_layers(found: ModelTrace, cfg: Any, label: str) -> None:
    layers = getattr(cfg, "num_hidden_layers", None)
    calls = found.calls
    if not calls:
        raise ModelError(f"{label}: no layer calls the exchangeable attention function; {INSTEAD}")
    if layers is not None and len(calls) != layers:
        count = f"{len(calls)} of its num_hidden_layers={layers} layers attend"
        raise ModelError(
            f"{label}: {count}; expected a call of each layer, because only keys and values are stored; {INSTEAD}"
        )
    types = _field(cfg, "layer_types")
    window = _field(cfg, "sliding_window")
    if types is None:
        configured = isinstance(window, int) and getattr(cfg, "use_sliding_window", True)
        if configured and all(call.spec.window is None for call in calls):
            raise ModelError(f"sliding_window={window}: no layer passes it to attention; set null, or {INSTEAD}")
        return
    for call, kind in zip(calls, types, strict=False):
        want = window if kind == "sliding_attention" else None
        passed = call.spec.window
        if passed != want:
            raise ModelError(
                f"{call.module} passes sliding_window={passed}, and layer_types and sliding_window say {want}; "
                f"{INSTEAD}"
            )
