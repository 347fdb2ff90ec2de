"""pocket as it is trained: a Qwen3-shaped decoder with its layers' weights stacked.

The weights of one kind are one parameter of shape (layers, out, in), which lets the optimizer treat all layers in one
batched operation.  `to_hf` and `from_hf` rename them to and from those of transformers' Qwen3ForCausalLM, whose
arithmetic this file follows.  Weights are kept in float32 and used in bfloat16, as the finished model is.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention


@dataclass(frozen=True)
class NetShape:
    """The sizes of a model."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 512
    vocab: int = 2048
    max_length: int = 4096
    theta: float = 100000.0
    eps: float = 1e-6


SHAPES = {
    "pocket": NetShape(),
    "draft": NetShape(layers=1, hidden=128, heads=2, kv_heads=1, inner=384),
    "tiny": NetShape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, inner=64),
}

BLOCK = 128
"""The block of flex attention: a row's length is a multiple of it."""

HF_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm, computed in float32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (gain * y).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (batch, heads, length, head_dim), halves paired as in Llama and Qwen."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def documents_mask(doc: Tensor, flex: bool):
    """Each token sees what comes before it in its own document: a mask for flex attention, or else a dense one.

    `doc` (rows, length) has each token's document number, growing along a row, so that whole blocks of the mask are
    decided by their first and last numbers alone.
    """
    length = doc.shape[1]
    if not flex:
        causal = torch.ones(length, length, dtype=torch.bool, device=doc.device).tril()
        return (doc[:, None, :, None] == doc[:, None, None, :]) & causal
    first, last = doc[:, ::BLOCK], doc[:, BLOCK - 1 :: BLOCK]
    below = torch.ones(first.shape[1], first.shape[1], dtype=torch.bool, device=doc.device).tril()
    some = below & (last[:, None, :] >= first[:, :, None])
    full = below.tril(-1) & (first[:, None, :] == last[:, :, None])

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]

    def visible(b, h, q, k):
        return (q >= k) & (doc[b, q] == doc[b, k])

    return BlockMask.from_kv_blocks(*ordered(some & ~full), *ordered(full), BLOCK_SIZE=BLOCK, mask_mod=visible)


def attend(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
    """Grouped-query attention under a mask of `documents_mask`."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


class Net(nn.Module):
    """The model; `forward` gives the logits of packed rows."""

    def __init__(self, shape: NetShape, seed: int = 0):
        super().__init__()
        self.shape = s = shape
        draw = torch.Generator().manual_seed(seed)
        q_out, kv_out = s.heads * s.head_dim, s.kv_heads * s.head_dim
        sizes = {
            "q": (q_out, s.hidden),
            "k": (kv_out, s.hidden),
            "v": (kv_out, s.hidden),
            "o": (s.hidden, q_out),
            "gate": (s.inner, s.hidden),
            "up": (s.inner, s.hidden),
            "down": (s.hidden, s.inner),
        }
        self.embed = nn.Parameter(torch.randn(s.vocab, s.hidden, generator=draw) * 0.02)
        self.mats = nn.ParameterDict()
        for name, (out, inp) in sizes.items():
            std = 0.0 if name in ("o", "down") else inp**-0.5 * 0.5
            self.mats[name] = nn.Parameter(torch.randn(s.layers, out, inp, generator=draw) * std)
        self.gains = nn.ParameterDict(
            {
                name: nn.Parameter(torch.ones(s.layers, s.head_dim if "_" in name else s.hidden))
                for name in ("q_norm", "k_norm", "norm1", "norm2")
            }
        )
        self.norm = nn.Parameter(torch.ones(s.hidden))
        frequency = s.theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angles = torch.outer(torch.arange(s.max_length).float(), frequency)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def layer(self, x: Tensor, w: dict[str, Tensor], mask) -> Tensor:
        """One decoder layer with its weights."""
        s, (batch, length, _) = self.shape, x.shape
        cos, sin = self.cos[:length], self.sin[:length]

        def heads(name: str, y: Tensor) -> Tensor:
            return F.linear(y, w[name]).view(batch, length, -1, s.head_dim)

        y = rms_norm(x, w["norm1"], s.eps)
        q = rotate(rms_norm(heads("q", y), w["q_norm"], s.eps).transpose(1, 2), cos, sin)
        k = rotate(rms_norm(heads("k", y), w["k_norm"], s.eps).transpose(1, 2), cos, sin)
        y = attend(q, k, heads("v", y).transpose(1, 2), mask)
        x = x + F.linear(y.transpose(1, 2).reshape(batch, length, -1), w["o"])
        y = rms_norm(x, w["norm2"], s.eps)
        return x + F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])

    def forward(self, tokens: Tensor, mask) -> Tensor:
        """Logits (batch, length, vocab) in bfloat16."""
        weights = {name: p.bfloat16().unbind(0) for name, p in self.mats.items()}
        weights |= {name: p.unbind(0) for name, p in self.gains.items()}
        embed = self.embed.bfloat16()
        x = F.embedding(tokens, embed)
        for i in range(self.shape.layers):
            x = self.layer(x, {name: w[i] for name, w in weights.items()}, mask)
        return F.linear(rms_norm(x, self.norm, self.shape.eps), embed)


def to_hf(net: Net) -> dict[str, Tensor]:
    """The weights in bfloat16 under the names that transformers gives them."""
    state = {"model.embed_tokens.weight": net.embed, "model.norm.weight": net.norm}
    for name, stacked in [*net.mats.items(), *net.gains.items()]:
        for i, one in enumerate(stacked):
            state[f"model.layers.{i}.{HF_NAMES[name]}.weight"] = one
    return {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in state.items()}


def from_hf(net: Net, state: dict[str, Tensor]) -> None:
    """Take over weights that `to_hf` gave."""
    with torch.no_grad():
        net.embed.copy_(state["model.embed_tokens.weight"])
        net.norm.copy_(state["model.norm.weight"])
        for name, stacked in [*net.mats.items(), *net.gains.items()]:
            for i in range(len(stacked)):
                stacked[i].copy_(state[f"model.layers.{i}.{HF_NAMES[name]}.weight"])


def hf_config(shape: NetShape, token_ids: dict[str, int]) -> dict:
    """config.json of a model of this shape; `token_ids` are those of the special tokens."""
    s = asdict(shape)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": s["vocab"],
        "hidden_size": s["hidden"],
        "intermediate_size": s["inner"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "head_dim": s["head_dim"],
        "hidden_act": "silu",
        "max_position_embeddings": s["max_length"],
        "rms_norm_eps": s["eps"],
        "rope_theta": s["theta"],
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": token_ids["<|im_end|>"],
        "pad_token_id": token_ids["<|endoftext|>"],
    }
