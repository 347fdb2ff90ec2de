"""transformers' model of a directory, watched at the points where the engine's values are known.

Modules are found by structure and a small table of names.  What is not found is told (``missing``), and what lies
around it is compared all the same: the operation behind it then begins further up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
FINAL_NORM = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "layer_norm", "norm_f")  # beside them
SELF_ATTENTION = ("self_attn", "self_attention", "attention", "attn.attention", "attn")
FUSED = ("qkv_proj", "c_attn", "Wqkv")  # rows of q, of k, of v
GROUPED = "query_key_value"  # for each head of k and v: the rows of its heads of q, then its own
# (module whose output is compared, module that must be beside it): the first that a layer has
BRANCHES: Mapping[str, Sequence[tuple[str, str]]] = {
    ATTENTION: (
        ("post_self_attn_layernorm", ""),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        ("self_attention.dense", ""),  # the output of Bloom's attention contains the residual
        *((name, "") for name in SELF_ATTENTION),
    ),
    MLP: (
        ("mlp.dense_4h_to_h", ""),  # so does that of its MLP
        ("ffn.down_proj", ""),  # and that of MPT's
        ("post_mlp_layernorm", ""),
        ("post_feedforward_layernorm", ""),
        *((name, "") for name in ("mlp", "feed_forward", "block_sparse_moe", "fc2")),
    ),
}
ROUTERS = ("router", "gate")  # beside ``experts``
PROJECTIONS = {Q: "q_proj", K: "k_proj", V: "v_proj"}
HEAD_NORMS = {Q_NORM: ("q_norm", "q_layernorm"), K_NORM: ("k_norm", "k_layernorm")}
UNROTATED = {Q_ROPE: Q_NORM, K_ROPE: K_NORM}
RECORDED = "minivllm_recorded"  # transformers' name for an attention function


class Reference:
    """``layers`` is how many the engine's model has.  ModelError if transformers cannot load the directory, or has
    another number of layers.  ``missing``: operation -> why none of its values is compared; ``norms``: the
    points of those of q and k that the model has."""

    def __init__(
        self, folder: str | Path, dtype: str, device: str, layers: int, overrides: Mapping[str, Any] | None = None
    ) -> None:
        self.model = _load(folder, dtype, overrides or {}).to(device)
        self.device, self.missing, self.norms = device, dict[str, str](), set[str]()
        self._count, self.rotates = layers, True
        self._given: Mapping[str, Tensor] = {}
        self._found: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}  # projections of the layer at hand, as its norms are given them
        self._tokens = 0
        parent, found = _layers(self.model, layers)
        recorded = self._record_attention(found)
        for number, layer in enumerate(found):
            self._watch_layer(number, layer, recorded)
        final = _first(parent, FINAL_NORM)
        if final is None:
            self.missing[NORM] = f"{type(parent).__name__} has none of {', '.join(FINAL_NORM)}"
        else:
            self._watch(final, NORM)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def run(self, ids: Sequence[int], given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """One pass over a sequence: point -> float32 [tokens, width], on the CPU.  ``given``: the engine's values, of
        the same shapes; each is put in the place of transformers' own once that has been noted, so that what follows is
        computed of it."""
        self._given, self._found, self._tokens = given or {}, {}, len(ids)
        try:
            with torch.inference_mode():
                out = self.model(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False)
        except Exception as exc:
            raise ModelError(f"transformers failed on a prompt of {len(ids)} tokens: {describe_error(exc)}") from exc
        found, self._found = self._found, {}
        for number in range(self._count):
            for operation, of in NORM_OF.items():
                norm, before = layer_point(number, operation), layer_point(number, of)
                if norm not in self.norms and operation not in self.missing and before in found:
                    found[norm] = self._given.get(before, found[before])
            for rope, of in UNROTATED.items() if not self.rotates else ():
                before = layer_point(number, of)
                if before in found:
                    found[layer_point(number, rope)] = self._given.get(before, found[before])
        found[LOGITS] = out.logits[0].float().cpu()
        return found

    # ---- the modules that are watched --------------------------------------------------------------------------------

    def _watch_layer(self, number: int, layer: nn.Module, recorded: bool) -> None:
        at = lambda operation: layer_point(number, operation)  # noqa: E731
        layer.register_forward_pre_hook(self._on_input(number), with_kwargs=True)
        scale = float(getattr(layer, "residual_multiplier", 1.0))
        for operation, names in BRANCHES.items():
            module = next((m for name, beside in names if (m := _module(layer, name, beside)) is not None), None)
            if module is None:
                self._miss(operation, layer, [name for name, _ in names])
            else:
                self._watch(module, at(operation), scale)
        for module in layer.children():
            if _module(module, "experts") is None:
                continue
            if (router := _first(module, ROUTERS)) is None:
                self._miss(ROUTER, module, ROUTERS)
            else:
                self._watch(router, at(ROUTER))
        self._watch(layer, at(RESIDUAL))
        inner = _first(layer, SELF_ATTENTION)
        if inner is None:
            for operation in (*PROJECTIONS, Q_NORM, K_NORM, Q_ROPE, K_ROPE):
                self._miss(operation, layer, SELF_ATTENTION)
            return
        self._watch_projections(number, inner)
        for operation, names in HEAD_NORMS.items():
            if (module := _first(inner, names)) is not None:
                self._watch_head_norm(module, at(operation), NORM_OF[operation])
                self.norms.add(at(operation))
            elif any("norm" in name for name, _ in inner.named_children()):
                self._miss(operation, inner, names)
        if recorded:
            inner.recorded_by = lambda *args, **kwargs: self._attend(number, *args, **kwargs)  # type: ignore[assignment]

    def _watch_projections(self, number: int, inner: nn.Module) -> None:
        if (grouped := _module(inner, GROUPED)) is not None:
            grouped.register_forward_hook(self._on_grouped(number, inner))
            return
        fused = _first(inner, FUSED)
        if fused is None:
            for operation, name in PROJECTIONS.items():
                if (module := _module(inner, name)) is None:
                    self._miss(operation, inner, [name, *FUSED])
                else:
                    self._watch(module, layer_point(number, operation), remember=operation)
            return

        def split(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if limit := getattr(inner, "clip_qkv", None):
                output = output.clamp(-limit, limit)
            parts = output.split(_sizes(inner, output.shape[-1]), dim=-1)
            points = zip(PROJECTIONS, parts, strict=True)
            return torch.cat([self._note(layer_point(number, name), part, name) for name, part in points], dim=-1)

        fused.register_forward_hook(split)

    def _on_grouped(self, number: int, inner: Any) -> Callable[..., Any]:
        """Return the hook of a projection whose output [1, tokens, kv heads, queries + 2, dim] holds q, k and v."""
        config = self.model.config
        heads = int(getattr(inner, "num_heads", config.num_attention_heads))
        kv_heads, dim = int(getattr(inner, "num_kv_heads", heads)), config.hidden_size // heads
        queries = heads // kv_heads

        def split(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            parts = output.view(*output.shape[:-1], kv_heads, queries + 2, dim).split((queries, 1, 1), dim=-2)
            noted = [
                self._note(layer_point(number, name), part.reshape(*output.shape[:-1], -1), name).view(part.shape)
                for name, part in zip(PROJECTIONS, parts, strict=True)
            ]
            return torch.cat(noted, dim=-2).view(output.shape)

        return split

    def _watch(self, module: nn.Module, point: str, scale: float = 1.0, remember: str = "") -> None:
        """``scale``: what its output is multiplied by before it is what the engine has at this point."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (self._note(point, output[0], remember, scale), *output[1:])
            return self._note(point, output, remember, scale)

        module.register_forward_hook(hook)

    def _watch_head_norm(self, module: nn.Module, point: str, of: str) -> None:
        """Whether heads come before tokens is seen by what it is given: the projection, one way or the other."""

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            whole = self._seen.get(of)
            if output.dim() != 4 or whole is None or torch.equal(args[0].reshape(whole.shape), whole):
                return self._note(point, output)
            return self._note(point, output.transpose(1, 2)).transpose(1, 2)

        module.register_forward_hook(hook)

    def _on_input(self, number: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            if number == 0:
                x = self._note(EMBEDDING, x)
            x = self._note(layer_point(number, INPUT), x)
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        return hook

    def _note(self, point: str, x: Tensor, remember: str = "", scale: float = 1.0) -> Tensor:
        """Keep the values x [1, tokens, ...]; returns what takes their place."""
        flat = x.detach().reshape(self._tokens, -1)
        self._found[point] = flat.float().cpu() * scale
        given = self._given.get(point)
        if given is not None and given.shape == flat.shape:
            x = (given / scale).to(x.device, x.dtype).reshape(x.shape)
        if remember:
            self._seen[remember] = x
        return x

    # ---- what attention is given -------------------------------------------------------------------------------------

    def _record_attention(self, layers: Sequence[nn.Module]) -> bool:
        """Have attention called through ``_attend``, if the model's file has transformers' usual function."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        files = {type(m).__module__ for layer in layers for m in layer.modules()}
        if not any(hasattr(sys.modules[file], "eager_attention_forward") for file in files):
            self.rotates = any("rotary" in name for name, _ in self.model.named_modules())
            if self.rotates:
                why = f"{self.name} does not call attention through transformers' interface"
                self.missing |= {Q_ROPE: why, K_ROPE: why}
            return False
        AttentionInterface.register(RECORDED, _recorded)
        AttentionMaskInterface.register(RECORDED, eager_mask)
        self.model.set_attn_implementation(RECORDED)
        return True

    def _attend(
        self, number: int, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Any:
        """Note q [1, heads, tokens, dim] without a scale that was put into it, and k, and attend."""
        scaling = more.get("scaling")
        factor = 1.0 if scaling is None else scaling / getattr(module, "scaling", scaling)
        query, key = (
            self._note(layer_point(number, name), x.transpose(1, 2), scale=by).transpose(1, 2)
            for name, x, by in ((Q_ROPE, query, factor), (K_ROPE, key, 1.0))
        )
        return _eager(module)(module, query, key, value, *args, **more)

    def _miss(self, operation: str, where: nn.Module, names: Sequence[str]) -> None:
        self.missing[operation] = f"{type(where).__name__} has none of {', '.join(names)}"


def _recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(module, "recorded_by", _eager(module))(module, *args, **kwargs)


def _eager(module: nn.Module) -> Callable[..., Any]:
    return sys.modules[type(module).__module__].eager_attention_forward


def _load(folder: str | Path, dtype: str, overrides: Mapping[str, Any]) -> Any:
    """Return transformers' model of a directory, with ``overrides`` laid over its config.json.  ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
    from transformers.utils import logging

    more = {}
    if overrides:
        raw = merge(PretrainedConfig.get_config_dict(str(folder))[0], overrides)
        more["config"] = AutoConfig.for_model(raw.pop("model_type"), **raw)
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        made = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), attn_implementation="eager", trust_remote_code=False, **more
        )
    except Exception as exc:  # it refuses directories with errors of many types
        raise ModelError(
            f"transformers cannot load {folder}, so there is nothing to compare with: {describe_error(exc)}"
        ) from exc
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    return made.eval()


def _layers(model: nn.Module, count: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The module that has them, and the layers."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    for name, found in lists:
        parent, _, last = name.rpartition(".")
        if last in LAYERS and len(found) == count:
            return model.get_submodule(parent), list(found)
    told_lists = ", ".join(f"{name} of {len(m)}" for name, m in lists) or "none"
    raise ModelError(
        f"{type(model).__name__} of transformers: want a list of {count} layers, as many as this engine's model has, "
        f"with one of the names {', '.join(LAYERS)}; its lists are: {told_lists}"
    )


def _module(parent: nn.Module, name: str, beside: str = "") -> nn.Module | None:
    """Return the submodule with a dotted name, None where it, or the module ``beside`` it, does not exist."""
    found: Any = parent
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, nn.Module) or (beside and not isinstance(getattr(parent, beside, None), nn.Module)):
        return None
    return found


def _first(parent: nn.Module, names: Sequence[str]) -> nn.Module | None:
    return next((m for name in names if (m := _module(parent, name)) is not None), None)


def _sizes(inner: Any, width: int) -> list[int]:
    """Rows of q, k and v in a projection of all three; an attention that names no groups has as many heads of each."""
    groups = int(getattr(inner, "num_key_value_groups", 1))
    kv = width // (groups + 2)
    return [kv * groups, kv, kv]
