"""The model pocket for training: a decoder of Qwen3's architecture with stacked weights.

All weights of one kind are one parameter of shape (layers, out, in), so that the optimizer updates all layers in one
batched operation.  `to_hf` and `from_hf` convert the weights to and from the names of transformers' Qwen3ForCausalLM,
whose arithmetic this file follows.  Weights are kept in float32 and used in bfloat16, which is the dtype of the
finished model.
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
"""The block size of flex attention.  The length of a row must be a multiple of it."""

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
    """Return the root-mean-square norm of x times `gain`, computed in float32."""
    y = x.float()
    mean_square = y.square().mean(-1, keepdim=True)
    y = y * torch.rsqrt(mean_square + eps)
    return (gain * y).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x (batch, heads, length, head_dim), with halves paired as in Llama and Qwen."""
    a, b = x.float().chunk(2, dim=-1)
    first = a * cos - b * sin
    second = b * cos + a * sin
    return torch.cat((first, second), dim=-1).to(x.dtype)


def documents_mask(doc: Tensor, flex: bool):
    """Return a causal mask that separates documents: a block mask if `flex`, else a dense bool mask.

    `doc` (rows, length) has the document number of each token.  The numbers do not decrease along a row, so the first
    and the last number of a block decide about the whole block.
    """
    length = doc.shape[1]
    if not flex:
        causal = torch.ones(length, length, dtype=torch.bool, device=doc.device).tril()
        same = doc[:, None, :, None] == doc[:, None, None, :]
        return same & causal
    first = doc[:, ::BLOCK]
    last = doc[:, BLOCK - 1 :: BLOCK]
    blocks = first.shape[1]
    below = torch.ones(blocks, blocks, dtype=torch.bool, device=doc.device).tril()
    overlapping = last[:, None, :] >= first[:, :, None]
    one_document = first[:, None, :] == last[:, :, None]
    full = below.tril(-1) & one_document
    partial = below & overlapping & ~full

    def ordered(selected: Tensor) -> tuple[Tensor, Tensor]:
        count = selected.sum(-1, dtype=torch.int32)
        order = selected.int().argsort(dim=-1, descending=True, stable=True)
        order = order.to(torch.int32)
        return count[:, None], order[:, None]

    def visible(b, h, q, k):
        same = doc[b, q] == doc[b, k]
        return (q >= k) & same

    return BlockMask.from_kv_blocks(*ordered(partial), *ordered(full), BLOCK_SIZE=BLOCK, mask_mod=visible)


def attend(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
    """Compute grouped-query attention under a mask of `documents_mask`."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


class Net(nn.Module):
    """The model.  `forward` computes the logits of packed rows."""

    def __init__(self, shape: NetShape, seed: int = 0):
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        hidden = shape.hidden
        layers = shape.layers
        q_out = shape.heads * shape.head_dim
        kv_out = shape.kv_heads * shape.head_dim
        sizes = {
            "q": (q_out, hidden),
            "k": (kv_out, hidden),
            "v": (kv_out, hidden),
            "o": (hidden, q_out),
            "gate": (shape.inner, hidden),
            "up": (shape.inner, hidden),
            "down": (hidden, shape.inner),
        }
        embed = torch.randn(shape.vocab, hidden, generator=generator)
        self.embed = nn.Parameter(embed * 0.02)
        self.mats = nn.ParameterDict()
        for name, (rows, columns) in sizes.items():
            std = 0.0 if name in ("o", "down") else columns**-0.5 * 0.5
            weight = torch.randn(layers, rows, columns, generator=generator)
            self.mats[name] = nn.Parameter(weight * std)
        self.gains = nn.ParameterDict()
        for name in ("q_norm", "k_norm", "norm1", "norm2"):
            width = shape.head_dim if "_" in name else hidden
            gain = torch.ones(layers, width)
            self.gains[name] = nn.Parameter(gain)
        self.norm = nn.Parameter(torch.ones(hidden))
        exponents = -torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        positions = torch.arange(shape.max_length).float()
        angles = torch.outer(positions, shape.theta**exponents)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def layer(self, x: Tensor, w: dict[str, Tensor], mask) -> Tensor:
        """Compute one decoder layer with the weights `w`."""
        batch, length, _ = x.shape
        eps = self.shape.eps
        cos = self.cos[:length]
        sin = self.sin[:length]

        def heads(name: str, y: Tensor) -> Tensor:
            rows = F.linear(y, w[name])
            return rows.view(batch, length, -1, self.shape.head_dim)

        y = rms_norm(x, w["norm1"], eps)
        q = rms_norm(heads("q", y), w["q_norm"], eps)
        k = rms_norm(heads("k", y), w["k_norm"], eps)
        v = heads("v", y)
        q = rotate(q.transpose(1, 2), cos, sin)
        k = rotate(k.transpose(1, 2), cos, sin)
        attended = attend(q, k, v.transpose(1, 2), mask)
        joined = attended.transpose(1, 2).reshape(batch, length, -1)
        x = x + F.linear(joined, w["o"])
        y = rms_norm(x, w["norm2"], eps)
        gate = F.silu(F.linear(y, w["gate"]))
        up = F.linear(y, w["up"])
        return x + F.linear(gate * up, w["down"])

    def forward(self, tokens: Tensor, mask) -> Tensor:
        """Return the logits (batch, length, vocab) in bfloat16."""
        weights = {}
        for name, matrices in self.mats.items():
            weights[name] = matrices.bfloat16().unbind(0)
        for name, gains in self.gains.items():
            weights[name] = gains.unbind(0)
        embed = self.embed.bfloat16()
        x = F.embedding(tokens, embed)
        for i in range(self.shape.layers):
            of_layer = {name: stacked[i] for name, stacked in weights.items()}
            x = self.layer(x, of_layer, mask)
        x = rms_norm(x, self.norm, self.shape.eps)
        return F.linear(x, embed)


def to_hf(net: Net) -> dict[str, Tensor]:
    """Return the weights in bfloat16, on the CPU, under the names of transformers."""
    state = {"model.embed_tokens.weight": net.embed, "model.norm.weight": net.norm}
    for name, stacked in [*net.mats.items(), *net.gains.items()]:
        for i, weight in enumerate(stacked):
            state[f"model.layers.{i}.{HF_NAMES[name]}.weight"] = weight
    for name, weight in state.items():
        rounded = weight.detach().to("cpu", torch.bfloat16)
        state[name] = rounded.contiguous()
    return state


def from_hf(net: Net, state: dict[str, Tensor]) -> None:
    """Copy the weights that `to_hf` returned into a net."""
    with torch.no_grad():
        net.embed.copy_(state["model.embed_tokens.weight"])
        net.norm.copy_(state["model.norm.weight"])
        for name, stacked in [*net.mats.items(), *net.gains.items()]:
            for i, weight in enumerate(stacked):
                saved = state[f"model.layers.{i}.{HF_NAMES[name]}.weight"]
                weight.copy_(saved)


def hf_config(shape: NetShape, token_ids: dict[str, int]) -> dict:
    """Return the config.json of a model of this shape.  `token_ids` has the ids of the special tokens by name."""
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
