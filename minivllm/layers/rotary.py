"""Rotary position embedding (arXiv:2104.09864) in the "rotate half" convention, and per-head QK-norm before it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import QKPre
from minivllm.errors import ModelError, shown

from .norm import rms_norm

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
NEEDS = {"default": (), "linear": ("factor",), "llama3": LLAMA3}
HARMLESS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


def rope_parameters(cfg: Any) -> dict[str, Any]:
    """One dict with ``rope_type`` and ``rope_theta`` from a transformers 5 config (``rope_parameters``) or an older one
    (``rope_scaling`` beside ``rope_theta``).  ModelError on a type that is not implemented or lacks a number."""
    params = dict(getattr(cfg, "rope_parameters", None) or getattr(cfg, "rope_scaling", None) or {})
    kind = params["rope_type"] = params.get("rope_type") or params.get("type") or "default"
    theta = params.get("rope_theta") or getattr(cfg, "rope_theta", None)
    if kind not in NEEDS:
        raise ModelError(f"rope_type={shown(kind)}: want one of {', '.join(sorted(NEEDS))}")
    params["rope_theta"] = 10000.0 if theta is None else theta
    partial = params.get("partial_rotary_factor") or getattr(cfg, "partial_rotary_factor", None)
    if partial not in (None, 1, 1.0):
        raise ModelError(
            f"partial_rotary_factor={shown(partial)}: want 1, rotary over part of a head is not implemented"
        )
    for name in ("rope_theta", *NEEDS[kind]):
        value = params.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelError(
                f"rope_parameters: {name}={shown(value)} for rope_type={shown(kind)}: want a positive number"
            )
    if kind == "llama3" and params["high_freq_factor"] <= params["low_freq_factor"]:
        raise ModelError("rope_parameters: want high_freq_factor above low_freq_factor")
    extra = sorted(k for k, v in params.items() if v is not None and k not in HARMLESS | set(NEEDS[kind]))
    if extra:
        raise ModelError(
            f"rope_parameters: {', '.join(map(str, extra))} not known for rope_type={shown(kind)}; remove it"
        )
    return params


def inverse_frequencies(params: dict[str, Any], dim: int) -> Tensor:
    """Radians per position, float32 [dim / 2], rounded as transformers rounds them."""
    inv = 1.0 / (params["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if params["rope_type"] == "linear":
        return inv / params["factor"]
    if params["rope_type"] == "llama3":  # Llama 3.1: long waves are stretched, short ones kept, between them a blend
        factor, low, high, length = (params[name] for name in LLAMA3)
        wave = 2 * math.pi / inv
        blend = ((length / wave - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * inv / factor + blend * inv
    return inv


def rotary_tables(cfg: Any, dim: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, dim], halves repeated."""
    angle = torch.outer(torch.arange(length).float(), inverse_frequencies(rope_parameters(cfg), dim)).repeat(1, 2)
    return angle.cos().to(device), angle.sin().to(device)


def gather_rotary(pre: QKPre, position: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, dim] at the positions; the first half of sin is negated, so ``rotate`` only has to roll."""
    cos, sin = pre.cos.index_select(0, position).unsqueeze(1), pre.sin.index_select(0, position).unsqueeze(1)
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, dim] rotated in float32; the leading cos.shape[-1] elements of a head, the rest passes."""
    dim = cos.shape[-1]
    head = (x if x.shape[-1] == dim else x[..., :dim]).float()
    # not addcmul: whether that rounds its product depends on where in a thread's share an element lies
    y = (head * cos).add_(head.roll(dim // 2, -1).mul_(sin)).to(x.dtype)
    return y if x.shape[-1] == dim else torch.cat((y, x[..., dim:]), dim=-1)


def prepare_qk(
    q: Tensor, k: Tensor, position: Tensor, pre: QKPre, work: dict[Any, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """q [T, heads, dim] and k [T, kv_heads, dim], normalised per head and rotated as ``pre`` says.

    ``work`` is a dict that lives for one step: the first layer keeps the table rows that it gathered for the others.
    """
    same = (pre.q_norm is None) == (pre.k_norm is None)
    both = joined(q, k) if same and q.device.type == "cpu" and q.dtype == torch.float32 else None
    if both is not None:  # two slices of one projection: one pass instead of two
        if pre.q_norm is not None and pre.both is None:
            pre.both = torch.cat((pre.q_norm.expand(q.shape[1], -1), pre.k_norm.expand(k.shape[1], -1)))
        both = prepare(both, pre.both, position, pre, work)
        return both[:, : q.shape[1]], both[:, q.shape[1] :]
    return prepare(q, pre.q_norm, position, pre, work), prepare(k, pre.k_norm, position, pre, work)


def joined(q: Tensor, k: Tensor) -> Tensor | None:
    """q and k as one tensor [T, heads + kv_heads, dim] if they lie side by side, as after a merged projection."""
    near = q.stride() == k.stride() and q.shape[2] == k.shape[2] and q.stride()[1:] == (q.shape[2], 1)
    if not near or q.data_ptr() + q.shape[1] * q.shape[2] * q.element_size() != k.data_ptr():
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())


def prepare(x: Tensor, norm: Tensor | None, position: Tensor, pre: QKPre, work: dict[Any, Any] | None) -> Tensor:
    """x [T, heads, dim] normalised (``norm`` [dim] or [heads, dim]) and rotated."""
    if norm is not None:
        x = rms_norm(x, norm, pre.eps)
    if pre.cos is None:
        return x
    key = ("rotary", id(pre.cos))
    rows = work.get(key) if work is not None else None
    if rows is None:
        rows = gather_rotary(pre, position)
        if work is not None:
            work[key] = rows
    return rotate(x, *rows)
