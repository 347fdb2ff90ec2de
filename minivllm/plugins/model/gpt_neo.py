"""GPT-Neo (EleutherAI 2021), which is GPT-2 with a window in every other layer and scores that are not scaled."""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

from .assembly import decoder, layer_norm

NAMES = WeightNames(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{i}.",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    out="attn.attention.out_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    norms=("ln_1", "ln_2"),
)


class GPTNeo(ModelArch):
    """The architecture ``GPTNeoForCausalLM``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        hidden, heads = cfg.hidden_size, cfg.num_attention_heads
        dim = fields.even_share(cfg, "hidden_size", "num_heads", heads)
        inner = 4 * hidden if cfg.intermediate_size is None else cfg.intermediate_size
        activation = fields.activation(cfg, "activation_function")
        mlp = MLP(inner, activation, gated=False, bias=True)
        local = cfg.window_size
        windows = {"global": None, "local": local}
        layers = []
        for kind in cfg.attention_layers:
            if kind not in windows:
                raise ModelError(f"attention_types has {shown(kind)}: expected 'global' or 'local'")
            attention = AttnSpec(heads, heads, dim, dim, window=windows[kind], scale=1.0)
            layer = LayerSpec(attention, mlp, rope=None, out_bias=True)
            layers.append(layer)
        if "local" in cfg.attention_layers and (type(local) is not int or local < 1):
            raise ModelError(f"window_size={shown(local)}: expected a whole number >= 1")
        norm = layer_norm(cfg.layer_norm_epsilon)
        return decoder(cfg, layers, norm, positions=cfg.max_position_embeddings, names=NAMES)
