"""Run transformers' model of a directory, and read or replace its values at the engine's points.

Hooks are registered on modules, which are found by their place in the model and a small table of names.  An operation
whose module is not found is reported as missing.  The next compared point then covers its error too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from minivllm.errors import ModelError, describe_error
from minivllm.validation import merge

from .points import (
    ATTENTION,
    EMBEDDING,
    INPUT,
    K_NORM,
    K_ROPE,
    LOGITS,
    MLP,
    NORM,
    NORM_OF,
    Q_NORM,
    Q_ROPE,
    RESIDUAL,
    ROUTER,
    K,
    Q,
    V,
    layer_point,
)

LAYERS = ("layers", "h", "blocks")  # lists of layers end with one of these names
# beside the layers
FINAL_NORM = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "layer_norm", "norm_f", "embedding_norm")
SELF_ATTENTION = ("self_attn", "self_attention", "attention", "attn.attention", "attn")
RECURRENT = ("linear_attn", "conv")  # layers with a recurrent state have these modules in place of attention
FUSED = ("qkv_proj", "c_attn", "Wqkv")  # modules whose rows are q, then k, then v
# module whose rows are, for each head of k and v, the rows of its q heads, then of k and of v
GROUPED = "query_key_value"
# (module whose output is compared, sibling that must exist or ""). The first existing module of a layer is used. The
# outputs of Bloom's attention and MLP, and of MPT's MLP, contain the residual.
AFTER_ATTENTION = [("post_self_attn_layernorm", ""), ("post_attention_layernorm", "post_feedforward_layernorm")]
ATTENTIONS = ("self_attention.dense", *SELF_ATTENTION, *RECURRENT)
MLPS = (
    "mlp.dense_4h_to_h", "ffn.down_proj", "post_mlp_layernorm", "post_feedforward_layernorm", "mlp", "feed_forward",
    "block_sparse_moe", "fc2",
)  # fmt: skip
BRANCHES = {ATTENTION: AFTER_ATTENTION + [(name, "") for name in ATTENTIONS]}
BRANCHES[MLP] = [(name, "") for name in MLPS]
ROUTERS = ("router", "gate")  # beside ``experts``
PROJECTIONS = {Q: "q_proj", K: "k_proj", V: "v_proj"}
HEAD_NORMS = {Q_NORM: ("q_norm", "q_layernorm"), K_NORM: ("k_norm", "k_layernorm")}
UNROTATED = {Q_ROPE: Q_NORM, K_ROPE: K_NORM}  # equal points of a model without a rotary embedding
RECORDED = "minivllm_recorded"  # the name under which transformers registers ``_recorded``

Hook = Callable[..., Any]
Values = Mapping[str, Tensor]  # by point


class Reference:
    """transformers' model, with hooks that store the values at the engine's points, or replace them.

    ``missing`` maps an operation without values to the reason.  ``norms`` holds the points of the q and k norms that
    the model has.
    """

    def __init__(
        self, folder: str | Path, dtype: str, device: str, layers: int, overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Load a model; ``layers`` is the number of layers that the engine's model has.

        ``overrides`` replace fields of its config.json.  Raise ModelError if transformers cannot load the directory,
        or has another number of layers.
        """
        self.model = _load(folder, dtype, overrides or {}).to(device)
        self.device = device
        self.missing: dict[str, str] = {}
        self.norms: set[str] = set()
        self.rotates = True  # whether the model has a rotary embedding
        self._count = layers
        self._replacements: Values = {}
        self._found: dict[str, Tensor] = {}
        self._projected: dict[str, Tensor] = {}  # q, k and v of the current layer, as its norms receive them
        self._tokens = 0
        parent, found = _find_layers(self.model, layers)
        recorded = self._record_attention(found)
        for number, layer in enumerate(found):
            self._watch_layer(number, layer, recorded)
        self._watch_first(parent, FINAL_NORM, NORM, NORM)

    @property
    def name(self) -> str:
        """Return the name of the model's class."""
        return type(self.model).__name__

    def run(self, ids: Sequence[int], given: Values | None = None) -> dict[str, Tensor]:
        """Run the model on a sequence and return its values by point, float32 [tokens, width] on the CPU.

        ``given`` are the engine's values.  At each point the model's value is stored and then replaced by the engine's
        value if it has the same shape, so that later operations compute with the engine's values.  Raise ModelError if
        the model fails.
        """
        self._replacements = given or {}
        self._found = {}
        self._tokens = len(ids)
        try:
            with torch.inference_mode():
                tokens = torch.tensor([list(ids)], device=self.device)
                out = self.model(input_ids=tokens, use_cache=False)
        except Exception as exc:
            raise ModelError(f"transformers failed on a prompt of {len(ids)} tokens: {describe_error(exc)}") from exc
        for number in range(self._count):
            for operation, source in NORM_OF.items():
                has_norm = layer_point(number, operation) in self.norms
                if not has_norm and operation not in self.missing:
                    self._copy_input(number, operation, source)
            if not self.rotates:
                for operation, source in UNROTATED.items():
                    self._copy_input(number, operation, source)
        found = self._found
        self._found = {}
        logits = out.logits[0]
        found[LOGITS] = logits.float().cpu()
        return found

    def _copy_input(self, layer: int, operation: str, source: str) -> None:
        """Store the input of an operation that the model does not have, the value of ``source``, as its output."""
        before = layer_point(layer, source)
        if before in self._found:
            value = self._replacements.get(before, self._found[before])
            self._found[layer_point(layer, operation)] = value

    # ---- hooks of modules --------------------------------------------------------------------------------------------

    def _watch_layer(self, number: int, layer: Module, recorded: bool) -> None:
        """Register the hooks of layer ``number``; ``recorded`` means that its attention can call ``_attend``."""
        layer.register_forward_pre_hook(self._on_input(number), with_kwargs=True)
        scale = float(getattr(layer, "residual_multiplier", 1.0))
        for operation, names in BRANCHES.items():
            modules = [_module(layer, name, beside) for name, beside in names]
            present = [module for module in modules if module is not None]
            if present:
                self._watch(present[0], layer_point(number, operation), scale)
            else:
                self._miss(operation, layer, [name for name, _ in names])
        for module in layer.children():
            if _module(module, "experts") is not None:
                self._watch_first(module, ROUTERS, ROUTER, layer_point(number, ROUTER))
        self._watch(layer, layer_point(number, RESIDUAL))
        attention = _first(layer, SELF_ATTENTION)
        if attention is None and _first(layer, RECURRENT) is not None:
            return  # the engine has no tap points inside of a layer with a recurrent state
        if attention is None:
            for operation in (*PROJECTIONS, Q_NORM, K_NORM, Q_ROPE, K_ROPE):
                self._miss(operation, layer, SELF_ATTENTION)
            return
        self._watch_projections(number, attention)
        self._watch_head_norms(number, attention)
        if recorded:
            attention.recorded_by = functools.partial(self._attend, number)  # type: ignore[assignment]

    def _watch_first(
        self, parent: Module, names: Sequence[str], operation: str, point: str, remember: str = ""
    ) -> None:
        """Watch the first submodule of ``parent`` with one of the names, or record that the operation is missing.

        ``remember`` is the argument of ``_watch``.
        """
        module = _first(parent, names)
        if module is None:
            self._miss(operation, parent, names)
        else:
            self._watch(module, point, remember=remember)

    def _watch_projections(self, number: int, attention: Module) -> None:
        """Register the hooks of q, k and v, for three projections or for a fused one whose output is split."""
        grouped = _module(attention, GROUPED)
        if grouped is not None:
            grouped.register_forward_hook(self._on_grouped(number, attention))
            return
        fused = _first(attention, FUSED)
        if fused is None:
            for operation, name in PROJECTIONS.items():
                module = _module(attention, name)
                gated = operation == Q and module is not None and self._has_gates(attention, module)
                if gated:
                    module.register_forward_hook(self._on_gated(number, attention))
                    continue
                point = layer_point(number, operation)
                self._watch_first(attention, [name, *FUSED], operation, point, operation)
            return

        def split(module: Module, args: Any, output: Tensor) -> Tensor:
            limit = getattr(attention, "clip_qkv", None)
            if limit:
                output = output.clamp(-limit, limit)
            sizes = _sizes(attention, output.shape[-1])
            noted = []
            parts = output.split(sizes, dim=-1)
            for name, part in zip(PROJECTIONS, parts, strict=True):
                point = layer_point(number, name)
                noted.append(self._note(point, part, name))
            return torch.cat(noted, dim=-1)

        fused.register_forward_hook(split)

    def _has_gates(self, attention: Any, module: Any) -> bool:
        """Return whether a projection of q has a gate of the same size beside each head."""
        heads = int(self.model.config.num_attention_heads)
        dim = getattr(attention, "head_dim", 0)
        rows = module.weight.shape[0]
        return bool(rows == 2 * heads * dim)

    def _on_gated(self, number: int, attention: Any) -> Hook:
        """Return the hook of a projection whose output [1, tokens, heads, 2 * dim] holds q and a gate of each head."""

        def split(module: Module, args: Any, output: Tensor) -> Tensor:
            heads = output.unflatten(-1, (-1, 2 * attention.head_dim))
            q, gate = heads.chunk(2, dim=-1)
            point = layer_point(number, Q)
            noted = self._note(point, q.flatten(2), Q)
            q = noted.view(q.shape)
            both = torch.cat([q, gate], dim=-1)
            return both.view(output.shape)

        return split

    def _on_grouped(self, number: int, attention: Any) -> Hook:
        """Return the hook of a projection whose output [1, tokens, kv heads, queries + 2, dim] holds q, k and v."""
        config = self.model.config
        heads = int(getattr(attention, "num_heads", config.num_attention_heads))
        kv_heads = int(getattr(attention, "num_kv_heads", heads))
        dim = config.hidden_size // heads
        queries = heads // kv_heads

        def split(module: Module, args: Any, output: Tensor) -> Tensor:
            tokens = output.shape[:-1]
            grouped = output.view(*tokens, kv_heads, queries + 2, dim)
            noted = []
            parts = grouped.split((queries, 1, 1), dim=-2)
            for name, part in zip(PROJECTIONS, parts, strict=True):
                flat = part.reshape(*tokens, -1)
                kept = self._note(layer_point(number, name), flat, name)
                noted.append(kept.view(part.shape))
            joined = torch.cat(noted, dim=-2)
            return joined.view(output.shape)

        return split

    def _watch(self, module: Module, point: str, scale: float = 1.0, remember: str = "") -> None:
        """Register a hook that stores a module's output as the value of a point.

        The engine's value is the output times ``scale``.  For ``remember`` see ``_note``.
        """

        def hook(module: Module, args: Any, output: Any) -> Any:
            if not isinstance(output, tuple):
                return self._note(point, output, remember, scale)
            first, *others = output
            return (self._note(point, first, remember, scale), *others)

        module.register_forward_hook(hook)

    def _watch_head_norms(self, number: int, attention: Module) -> None:
        """Register the hooks of the q and k norms; a norm under an unknown name makes both operations missing."""
        for operation, names in HEAD_NORMS.items():
            norm = _first(attention, names)
            if norm is not None:
                point = layer_point(number, operation)
                self._watch_head_norm(norm, point, NORM_OF[operation])
                self.norms.add(point)
            elif any("norm" in name for name, _ in attention.named_children()):
                self._miss(operation, attention, names)

    def _watch_head_norm(self, module: Module, point: str, source: str) -> None:
        """Register the hook of a norm over heads, whose output may be [1, heads, tokens, dim] or have the tokens first.

        The hook finds the order from the input: a tensor with tokens first equals the projection ``source`` when it is
        read in order.
        """

        def hook(module: Module, args: Any, output: Tensor) -> Tensor:
            projected = self._projected.get(source)
            if output.dim() != 4 or projected is None:
                return self._note(point, output)
            x = args[0].reshape(projected.shape)
            if torch.equal(x, projected):
                return self._note(point, output)
            return self._note_heads(point, output)

        module.register_forward_hook(hook)

    def _on_input(self, number: int) -> Hook:
        """Return the hook that stores the input of layer ``number``, which for layer 0 is the embedding too."""

        def hook(module: Module, args: Any, kwargs: dict[str, Any]) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            if number == 0:
                x = self._note(EMBEDDING, x)
            x = self._note(layer_point(number, INPUT), x)
            if args:
                return (x, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": x}

        return hook

    def _note_heads(self, point: str, x: Tensor, scale: float = 1.0) -> Tensor:
        """Store the values x [1, heads, tokens, dim] as ``_note`` does."""
        tokens_first = x.transpose(1, 2)
        noted = self._note(point, tokens_first, scale=scale)
        return noted.transpose(1, 2)

    def _note(self, point: str, x: Tensor, remember: str = "", scale: float = 1.0) -> Tensor:
        """Store the values x [1, tokens, ...] times ``scale``, and return x, or the engine's values if these replace x.

        ``remember`` is q, k or v for a projection whose result the hooks of norms need, else "".
        """
        flat = x.detach().reshape(self._tokens, -1)
        self._found[point] = flat.float().cpu() * scale
        replacement = self._replacements.get(point)
        if replacement is not None and replacement.shape == flat.shape:
            unscaled = (replacement / scale).to(x.device, x.dtype)
            x = unscaled.reshape(x.shape)
        if remember:
            self._projected[remember] = x
        return x

    # ---- the inputs of attention -------------------------------------------------------------------------------------

    def _record_attention(self, layers: Sequence[Module]) -> bool:
        """Make the model call ``_attend`` instead of its attention function, and return whether that is possible.

        It is possible if the model's source file has transformers' usual function.  Otherwise q and k have no values
        after a rotary embedding.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        files = set()
        for layer in layers:
            files.update(type(module).__module__ for module in layer.modules())
        modules = [sys.modules[file] for file in files]
        if not any(hasattr(module, "eager_attention_forward") for module in modules):
            names = [name for name, _ in self.model.named_modules()]
            self.rotates = any("rotary" in name for name in names)
            if self.rotates:
                reason = f"{self.name} does not call attention through transformers' interface"
                self.missing |= {Q_ROPE: reason, K_ROPE: reason}
            return False
        AttentionInterface.register(RECORDED, _recorded)
        AttentionMaskInterface.register(RECORDED, eager_mask)
        self.model.set_attn_implementation(RECORDED)
        return True

    def _attend(
        self, number: int, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Any:
        """Store q and k, both [1, heads, tokens, dim], and call the model's own attention function.

        Some models multiply q by a factor and divide the softmax scale by it; q is stored without this factor.
        """
        scaling = more.get("scaling")
        factor = 1.0
        if scaling is not None:
            factor = scaling / getattr(module, "scaling", scaling)
        query = self._note_heads(layer_point(number, Q_ROPE), query, factor)
        key = self._note_heads(layer_point(number, K_ROPE), key)
        attend = _eager(module)
        return attend(module, query, key, value, *args, **more)

    def _miss(self, operation: str, parent: Module, names: Sequence[str]) -> None:
        """Record that an operation has no values since ``parent`` has no submodule with one of the names."""
        self.missing[operation] = f"{type(parent).__name__} has none of {', '.join(names)}"


def _recorded(module: Module, *args: Any, **kwargs: Any) -> Any:
    """Call the ``_attend`` of a watched attention module, or the model's own function for any other module."""
    attend = getattr(module, "recorded_by", _eager(module))
    return attend(module, *args, **kwargs)


def _eager(module: Module) -> Hook:
    """Return the attention function of the source file of a module's class."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _load(folder: str | Path, dtype: str, overrides: Mapping[str, Any]) -> Any:
    """Load transformers' model of a directory; ``overrides`` replace fields of its config.json.

    Raise ModelError if transformers refuses the directory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
    from transformers.utils import logging

    more = {"dtype": getattr(torch, dtype), "attn_implementation": "eager", "trust_remote_code": False}
    if overrides:
        config, _ = PretrainedConfig.get_config_dict(str(folder))
        raw = merge(config, overrides)
        more["config"] = AutoConfig.for_model(raw.pop("model_type"), **raw)
    bars = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), **more)
    except Exception as exc:  # transformers raises errors of many types for a wrong directory
        raise ModelError(
            f"transformers cannot load {folder}, so there is nothing to compare with: {describe_error(exc)}"
        ) from exc
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    return model.eval()


def _find_layers(model: Module, count: int) -> tuple[Module, Sequence[Module]]:
    """Return the model's list of ``count`` layers, and the module that contains the list.

    Raise ModelError if there is none.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, ModuleList)]
    for name, found in lists:
        parent, _, last = name.rpartition(".")
        if last in LAYERS and len(found) == count:
            return model.get_submodule(parent), list(found)
    sizes = ", ".join(f"{name} of {len(m)}" for name, m in lists) or "none"
    raise ModelError(
        f"{type(model).__name__} of transformers: expected a list of {count} layers, as many as this engine's model "
        f"has, with one of the names {', '.join(LAYERS)}; its lists are: {sizes}"
    )


def _module(parent: Module, name: str, beside: str = "") -> Module | None:
    """Return the submodule with a dotted name, or None if it is missing.

    The result is also None if its sibling ``beside`` is missing.
    """
    if beside:
        neighbour = getattr(parent, beside, None)
        if not isinstance(neighbour, Module):
            return None
    found: Any = parent
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, Module) else None


def _first(parent: Module, names: Sequence[str]) -> Module | None:
    """Return the first submodule that exists, None if no name does."""
    modules = (_module(parent, name) for name in names)
    return next((m for m in modules if m is not None), None)


def _sizes(attention: Any, width: int) -> list[int]:
    """Return the rows of q, k and v in a fused projection of ``width`` rows.

    An attention module without ``num_key_value_groups`` has as many heads of k and v as of q.
    """
    groups = int(getattr(attention, "num_key_value_groups", 1))
    kv = width // (groups + 2)
    return [kv * groups, kv, kv]
