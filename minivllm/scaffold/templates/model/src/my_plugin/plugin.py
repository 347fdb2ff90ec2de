"""Arcee's AFM (transformers' ``ArceeForCausalLM``): pre-norm decoder, grouped-query attention, rotary embedding, and an
MLP of two matrices with squared ReLU between them (Primer, arXiv:2109.08668).

``parts`` makes the layers: quantization, tensor parallelism and the attention back end are inside them.  T tokens of
all sequences of a step are packed into one axis; there is no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec, QKPre
from minivllm.core.interfaces.model import ModelArch, Parts, Rule, StepTensors
from minivllm.errors import ModelError


class MyPlugin(ModelArch):
    """A config value that changes the arithmetic and is not implemented raises ModelError, which names it."""

    def attention(self, cfg: Any) -> Sequence[AttnSpec]:
        if cfg.hidden_act != "relu2":
            raise ModelError(f"hidden_act={cfg.hidden_act!r}: want 'relu2'")
        if not getattr(cfg, "is_causal", True):
            raise ModelError(f"is_causal={cfg.is_causal}: want True, attention to later tokens is not implemented")
        if getattr(cfg, "sliding_window", None):
            raise ModelError(f"sliding_window={cfg.sliding_window}: Arcee has no window; remove it from config.json")
        if getattr(cfg, "is_heterogeneous", getattr(cfg, "per_layer_config", None)):
            raise ModelError("per_layer_config: layers that differ from each other are not implemented")
        heads, kv_heads, dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        if kv_heads < 1 or heads % kv_heads:
            raise ModelError(f"num_attention_heads={heads}: want a multiple of num_key_value_heads={kv_heads}")
        if dim % 2:
            raise ModelError(f"head_dim={dim}: want an even number, rotary pairs its elements")
        return [AttnSpec(heads, kv_heads, dim, dim)] * cfg.num_hidden_layers

    def build(self, cfg: Any, parts: Parts) -> Decoder:
        return Decoder(self.attention(cfg), cfg, parts)

    def weights(self, cfg: Any) -> Sequence[Rule]:
        theirs, ours = "model.layers.{i}.", "layers.{i}."
        return [
            Rule("model.embed_tokens", "embed"),
            Rule(theirs + "input_layernorm", ours + "norm1"),
            *(Rule(f"{theirs}self_attn.{x}_proj", ours + "attn.qkv", part=x) for x in "qkv"),
            Rule(theirs + "self_attn.o_proj", ours + "attn.o"),
            Rule(theirs + "post_attention_layernorm", ours + "norm2"),
            Rule(theirs + "mlp.up_proj", ours + "mlp.up"),
            Rule(theirs + "mlp.down_proj", ours + "mlp.down"),
            Rule("model.norm", "norm"),
            Rule("lm_head", None if cfg.tie_word_embeddings else "lm_head"),  # None: known, and not needed
        ]


class Decoder:
    """ids [T] -> hidden [T, H]; ``logits``: hidden [N, H] -> [N, V]."""

    def __init__(self, specs: Sequence[AttnSpec], cfg: Any, parts: Parts) -> None:
        self.embed = parts.embedding("embed", cfg.vocab_size, cfg.hidden_size)
        self.blocks = [Block(cfg, parts, i, spec) for i, spec in enumerate(specs)]
        self.norm = parts.norm("norm", cfg.hidden_size, cfg.rms_norm_eps)
        tied = self.embed if cfg.tie_word_embeddings else None
        self.logits = parts.lm_head("lm_head", cfg.hidden_size, cfg.vocab_size, tied)

    def __call__(self, step: StepTensors) -> Tensor:
        x, residual = self.embed(step.ids), None
        for block in self.blocks:
            x, residual = block(x, residual, step)
        return self.norm(x, residual)[0]


class Block:
    """The residual stream travels beside x and is added inside the norms, which give (normed, x + residual)."""

    def __init__(self, cfg: Any, parts: Parts, i: int, spec: AttnSpec) -> None:
        hidden, inner, eps, name = cfg.hidden_size, cfg.intermediate_size, cfg.rms_norm_eps, f"layers.{i}."
        q, kv = spec.heads * spec.dim_qk, spec.kv_heads * spec.dim_qk
        bias = cfg.attention_bias
        self.norm1 = parts.norm(name + "norm1", hidden, eps)
        # full sizes everywhere: "column" splits the outputs over the processes, "row" the inputs
        self.qkv = parts.linear(name + "attn.qkv", hidden, [("q", q), ("k", kv), ("v", kv)], bias=bias, split="column")
        self.attn = parts.attention(i, spec)
        self.o = parts.linear(name + "attn.o", q, [("", hidden)], bias=bias, split="row")
        self.norm2 = parts.norm(name + "norm2", hidden, eps)
        self.up = parts.linear(name + "mlp.up", hidden, [("", inner)], bias=cfg.mlp_bias, split="column")
        self.down = parts.linear(name + "mlp.down", inner, [("", hidden)], bias=cfg.mlp_bias, split="row")
        self.sizes = [parts.heads(n) * spec.dim_qk for n in (spec.heads, spec.kv_heads, spec.kv_heads)]
        self.pre = QKPre(*parts.rotary(cfg, spec.dim_qk))

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepTensors) -> tuple[Tensor, Tensor]:
        x, residual = self.norm1(x, residual)
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        x, residual = self.norm2(self.o(self.attn(q, k, v, step, self.pre)), residual)
        return self.down(F.relu(self.up(x)).square()), residual
