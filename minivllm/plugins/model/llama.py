"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783): pre-norm decoder, grouped-query attention, rotary, SwiGLU.

Qwen2 and Qwen3 are this model with a bias or a norm more; what differs is a method of ``Llama``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec, QKPre
from minivllm.core.interfaces.model import ModelArch, Parts, Rule, StepTensors
from minivllm.errors import ModelError, shown
from minivllm.layers.fused import Normed
from minivllm.layers.rotary import rope_parameters


class Llama(ModelArch):
    """``LlamaForCausalLM``.  A config value that changes the arithmetic and is not implemented raises ModelError."""

    qk_norm = False

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        """Whether there are biases on q, k, v; on the attention's output; in the MLP."""
        return cfg.attention_bias, cfg.attention_bias, cfg.mlp_bias

    def windows(self, cfg: Any) -> list[int | None]:
        """Attention window of each layer (None: all that came before)."""
        if getattr(cfg, "sliding_window", None):
            raise ModelError(f"sliding_window={cfg.sliding_window}: Llama has no window; remove it from config.json")
        return [None] * cfg.num_hidden_layers

    def check(self, cfg: Any) -> None:
        if getattr(cfg, "is_heterogeneous", getattr(cfg, "per_layer_config", None)):
            raise ModelError("per_layer_config: layers that differ from each other are not implemented")
        if not getattr(cfg, "is_causal", True):
            raise ModelError(f"is_causal={cfg.is_causal}: want True, attention to later tokens is not implemented")
        if cfg.hidden_act not in ("silu", "swish"):
            raise ModelError(f"hidden_act={shown(cfg.hidden_act)}: want 'silu'")
        if kv_heads(cfg) < 1 or cfg.num_attention_heads % kv_heads(cfg):
            raise ModelError(
                f"num_attention_heads={cfg.num_attention_heads}: want a multiple of num_key_value_heads={kv_heads(cfg)}"
            )
        if head_dim(cfg) % 2 or head_dim(cfg) < 1:
            raise ModelError(f"head_dim={head_dim(cfg)}: want an even number above 0, rotary pairs its elements")
        rope_parameters(cfg)

    def attention(self, cfg: Any) -> Sequence[AttnSpec]:
        self.check(cfg)
        heads, dim = cfg.num_attention_heads, head_dim(cfg)
        return [AttnSpec(heads, kv_heads(cfg), dim, dim, window=window) for window in self.windows(cfg)]

    def build(self, cfg: Any, parts: Parts) -> Decoder:
        return Decoder(self, cfg, parts)

    def weights(self, cfg: Any) -> Sequence[Rule]:
        hf, our = "model.layers.{i}.", "layers.{i}."
        rules = [
            Rule("model.embed_tokens", "embed"),
            Rule(hf + "input_layernorm", our + "norm1"),
            Rule(hf + "self_attn.q_proj", our + "attn.qkv", part="q"),
            Rule(hf + "self_attn.k_proj", our + "attn.qkv", part="k"),
            Rule(hf + "self_attn.v_proj", our + "attn.qkv", part="v"),
            Rule(hf + "self_attn.o_proj", our + "attn.o"),
            Rule(hf + "post_attention_layernorm", our + "norm2"),
            Rule(hf + "mlp.gate_proj", our + "mlp.gate_up", part="gate"),
            Rule(hf + "mlp.up_proj", our + "mlp.gate_up", part="up"),
            Rule(hf + "mlp.down_proj", our + "mlp.down"),
            Rule("model.norm", "norm"),
            Rule("lm_head", None if cfg.tie_word_embeddings else "lm_head"),
        ]
        if self.qk_norm:
            rules += [Rule(f"{hf}self_attn.{x}_norm", f"{our}attn.{x}_norm") for x in "qk"]
        return rules


class Decoder:
    """ids [T] -> hidden [T, H], or [N, H] of the wanted tokens -> logits [N, V]."""

    picks = True

    def __init__(self, arch: Llama, cfg: Any, parts: Parts) -> None:
        specs = arch.attention(cfg)
        self.embed = parts.embedding("embed", cfg.vocab_size, cfg.hidden_size)
        hidden, eps = cfg.hidden_size, cfg.rms_norm_eps
        norms = [parts.norm(f"layers.{i}.norm1", hidden, eps) for i in range(len(specs))]
        norms.append(parts.norm("norm", hidden, eps))
        self.first = norms[0]
        self.blocks = [DecoderBlock(arch, cfg, parts, i, spec, norms[i + 1]) for i, spec in enumerate(specs)]
        tied = self.embed if cfg.tie_word_embeddings else None
        self.logits = parts.lm_head("lm_head", cfg.hidden_size, cfg.vocab_size, tied)

    def __call__(self, step: StepTensors) -> Tensor:
        x, residual = self.first(self.embed(step.ids))
        h = Normed(x)
        for block in self.blocks:
            h, residual = block(h, residual, step)
        return h.x


class DecoderBlock:
    """Attention, then MLP: takes its first norm's result and gives that of the next layer's (``after``).

    The residual stream travels beside it.
    """

    def __init__(self, arch: Llama, cfg: Any, parts: Parts, i: int, spec: AttnSpec, after: Any) -> None:
        hidden, inner, eps = cfg.hidden_size, cfg.intermediate_size, cfg.rms_norm_eps
        bias_qkv, bias_o, bias_mlp = arch.biases(cfg)
        name, dim, self.last = f"layers.{i}.", spec.dim_qk, i + 1 == cfg.num_hidden_layers
        q, kv = spec.heads * dim, spec.kv_heads * dim
        gate_up = [("gate", inner), ("up", inner)]
        self.qkv = parts.normed_linear(
            parts.linear(name + "attn.qkv", hidden, [("q", q), ("k", kv), ("v", kv)], bias=bias_qkv, split="column")
        )
        self.attn = parts.attention(i, spec)
        o = parts.linear(name + "attn.o", q, [("", hidden)], bias=bias_o, split="row")
        self.o = parts.linear_norm(o, parts.norm(name + "norm2", hidden, eps))
        self.gate_up = parts.gated_linear(
            parts.linear(name + "mlp.gate_up", hidden, gate_up, bias=bias_mlp, split="column")
        )
        down = parts.linear(name + "mlp.down", inner, [("", hidden)], bias=bias_mlp, split="row")
        self.down = parts.linear_norm(down, after, whole=self.last)
        self.sizes = [parts.heads(n) * dim for n in (spec.heads, spec.kv_heads, spec.kv_heads)]
        norms = [parts.norm(f"{name}attn.{x}_norm", dim, eps).weight if arch.qk_norm else None for x in "qk"]
        self.pre = QKPre(*parts.rotary(cfg, dim), *norms, eps)

    def __call__(self, h: Normed, residual: Tensor, step: StepTensors) -> tuple[Normed, Tensor]:
        q, k, v = self.qkv(h).split(self.sizes, dim=-1)
        x = self.attn(q, k, v, step, self.pre)
        if self.last and step.wanted is not None:
            x, residual = x[step.wanted], residual[step.wanted]
        h, residual = self.o(x, residual)
        return self.down(self.gate_up(h), residual)


def head_dim(cfg: Any) -> int:
    return getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads


def kv_heads(cfg: Any) -> int:
    return getattr(cfg, "num_key_value_heads", None) or cfg.num_attention_heads
