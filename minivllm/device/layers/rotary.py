"""Rotary position embedding (arXiv:2104.09864) in the "rotate half" convention, and per-head QK-norm before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import QKPre
from minivllm.core.interfaces.decoder import Rope
from minivllm.errors import ModelError, shown

from .norm import rms_norm

Frequencies = tuple[Tensor, float]  # (radians per position float32 [dim / 2], factor of cos and sin)


def order_of_halves(dim: int, turned: int) -> Tensor:
    """Return i64 [dim]: for each element of a head in this engine, its index in a checkpoint with interleaved pairs.

    The first ``turned`` elements of the checkpoint's head are pairs (0, 1), (2, 3) ... Their even elements come first,
    then the odd ones, then the elements that are not rotated.
    """
    order = torch.arange(dim)
    even = torch.arange(0, turned, 2)
    order[:turned] = torch.cat((even, even + 1))
    return order


def inverse_frequencies(rope: Rope, longest: int = 0) -> Frequencies:
    """Return (radians per position float32 [dim / 2], factor of cos and sin), rounded as in transformers.

    ``longest`` 0 selects the frequencies of short requests.  A larger value selects the frequencies of requests longer
    than ``rope.switch``, and is the most tokens that such a request may have."""
    numbers = dict(rope.numbers)
    dim = rope.dim
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    theta = rope.theta
    if rope.kind == "dynamic" and longest:  # NTK-aware scaling increases the base with the length of the sequence
        factor = numbers["factor"]
        trained = numbers["trained"]
        stretch = factor * max(longest, trained) / trained
        stretch -= factor - 1
        theta = theta * stretch ** (dim / (dim - 2))
    inv = 1.0 / (theta**exponent)
    if rope.kind == "linear":
        return inv / numbers["factor"], 1.0
    if rope.kind == "proportional":
        inv[numbers["turning"] :] = 0.0
        return inv / numbers.get("factor", 1.0), 1.0
    if rope.kind == "llama3":
        return _llama3(inv, numbers), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, numbers)
    if rope.kind == "longrope":
        return _longrope(rope, numbers, exponent, longest > 0)
    return inv, 1.0


def _llama3(inv: Tensor, numbers: Mapping[str, Any]) -> Tensor:
    """Scale frequencies ``inv`` [dim / 2] as Llama 3.1: divide low ones by a factor, keep high ones, blend between."""
    factor = numbers["factor"]
    low = numbers["low_freq_factor"]
    high = numbers["high_freq_factor"]
    wave = 2 * math.pi / inv
    turns = numbers["original_max_position_embeddings"] / wave
    blend = (turns - low) / (high - low)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inv / factor + blend * inv


def _yarn(rope: Rope, numbers: Mapping[str, Any]) -> Frequencies:
    """Return the frequencies [dim / 2] and the factor of cos and sin of YaRN (arXiv:2309.00071).

    Frequencies that make many turns within the trained length are kept, and low ones are divided by the factor."""
    factor = numbers["factor"]
    dim = rope.dim
    trained = numbers["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        """Return the fractional index of the pair that makes this number of turns within the trained length."""
        ratio = trained / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = pair(numbers.get("beta_fast") or 32)
    high = pair(numbers.get("beta_slow") or 1)
    if numbers.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    exponents = torch.arange(0, dim, 2).float() / dim
    waves = rope.theta**exponents
    width = high - low if high != low else 0.001
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    ramp = (pairs - low) / width
    kept = 1 - ramp.clamp(0, 1)
    divided = 1.0 / (factor * waves)
    inv = divided * (1 - kept) + 1.0 / waves * kept
    return inv, _yarn_scale(numbers)


def _yarn_scale(numbers: Mapping[str, Any]) -> float:
    """Return YaRN's factor of cos and sin."""
    scale = numbers.get("attention_factor")
    if scale is not None:
        return float(scale)
    factor = numbers["factor"]
    one = numbers.get("mscale")
    all_dims = numbers.get("mscale_all_dim")
    if one and all_dims:
        return _mscale(factor, one) / _mscale(factor, all_dims)
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    if factor <= 1:
        return 1.0
    return 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: Rope, numbers: Mapping[str, Any], exponent: Tensor, long: bool) -> Frequencies:
    """Return the frequencies [dim / 2] and the factor of cos and sin of LongRoPE (arXiv:2402.13753).

    Each pair has its own divisor; ``long`` selects the divisors for long sequences."""
    divisors = numbers["long_factor" if long else "short_factor"]
    stretch = torch.tensor(divisors, dtype=torch.float32)
    inv = 1.0 / (stretch * rope.theta**exponent)
    factor = numbers["factor"]
    scale = numbers.get("attention_factor")
    if scale is not None:
        return inv, float(scale)
    if factor <= 1:
        return inv, 1.0
    trained = math.log(numbers["original_max_position_embeddings"])
    return inv, math.sqrt(1 + math.log(factor) / trained)


def rotary_tables(rope: Rope, length: int, device: str, twice: bool = False) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [length, dim], by position; the two halves of a row are equal.

    ``twice`` returns [2 * length, dim]: the second ``length`` rows are for requests longer than ``rope.switch``."""
    position = torch.arange(length).float()
    cos = []
    sin = []
    for longest in (0, length - 1) if twice else (0,):
        inv, scale = _finite_frequencies(rope, longest)
        angle = torch.outer(position, inv).repeat(1, 2)
        cos.append(angle.cos() * scale)
        sin.append(angle.sin() * scale)
    return torch.cat(cos).to(device), torch.cat(sin).to(device)


def _finite_frequencies(rope: Rope, longest: int) -> Frequencies:
    """Return the result of ``inverse_frequencies``.  ModelError if the numbers of config.json give infinities or
    NaN."""
    try:
        inv, scale = inverse_frequencies(rope, longest)
        if bool(torch.isfinite(inv).all()) and math.isfinite(scale):
            return inv, scale
    except (ArithmeticError, ValueError):  # such as a division by the logarithm of rope_theta=1
        pass
    given = ", ".join(f"{name}={shown(value)}" for name, value in (("rope_theta", rope.theta), *rope.numbers))
    raise ModelError(
        f"config.json: {given} with rope_type={shown(rope.kind)} and heads of {rope.dim} elements give frequencies "
        "that are no finite numbers; expected the numbers that the model was trained with"
    )


def query_factors(rope: Rope, length: int, device: str, dtype: torch.dtype, twice: bool = False) -> Tensor | None:
    """Return the factor of a query by position, [length] in ``dtype``, or None if ``rope`` has no ``query_growth``.

    ``twice`` returns [2 * length], whose second half is equal to the first, for the rows of ``rotary_tables``."""
    if rope.query_growth is None:
        return None
    beta, trained = rope.query_growth
    position = torch.arange(length).float()
    periods = torch.floor(position / trained)
    factors = 1 + beta * torch.log(1 + periods)
    if twice:
        factors = factors.repeat(2)
    return factors.to(device, dtype)


def gather_rotary(pre: QKPre, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, dim] at ``position`` i64 [T]; the first half of sin is negated, as ``rotate`` needs."""
    # ``pre.cos`` and ``pre.sin`` are not None here
    cos = pre.cos.index_select(0, position).unsqueeze(1)  # type: ignore[union-attr]
    sin = pre.sin.index_select(0, position).unsqueeze(1)  # type: ignore[union-attr]
    half = sin.shape[-1] // 2
    sin[..., :half].neg_()
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first cos.shape[-1] elements of each head of x [T, heads, dim], and keep the rest.

    ``cos`` and ``sin`` come from ``gather_rotary``.  The arithmetic is float32, the result has the dtype of x."""
    dim = cos.shape[-1]
    whole = x.shape[-1] == dim
    head = x if whole else x[..., :dim]
    head = head.float()
    # ``torch.addcmul`` is not used, because it rounds the product before the sum for some elements only, depending on
    # their positions in a thread's share.
    turned = head.roll(dim // 2, -1).mul_(sin)
    y = (head * cos).add_(turned).to(x.dtype)
    if whole:
        return y
    return torch.cat((y, x[..., dim:]), dim=-1)


def prepare_qk(
    q: Tensor, k: Tensor, position: Tensor, pre: QKPre, work: dict[Any, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the norm of each head and the rotary embedding of ``pre`` to q [T, heads, dim] and k [T, kv_heads, dim].

    ``work`` is a dict for one step, in which the first layer stores its rows of the rotary tables for the other layers.
    None means that nothing is stored.
    """
    both = _adjacent(q, k, pre)
    if both is None:
        q = prepare(q, pre.q_norm, position, pre, work)
        k = prepare(k, pre.k_norm, position, pre, work)
        return q, k
    heads = q.shape[1]
    if pre.q_norm is not None and pre.k_norm is not None and pre.both is None:
        of_q = pre.q_norm.expand(heads, -1)
        of_k = pre.k_norm.expand(k.shape[1], -1)
        pre.both = torch.cat((of_q, of_k))
    both = prepare(both, pre.both, position, pre, work)
    return both[:, :heads], both[:, heads:]


def _adjacent(q: Tensor, k: Tensor, pre: QKPre) -> Tensor | None:
    """Return a view of q and k as one tensor if one pass over it can prepare both, else None.

    They are then adjacent in one float32 projection on a CPU, and both have a norm or none has."""
    same = (pre.q_norm is None) == (pre.k_norm is None)
    if not same or q.device.type != "cpu" or q.dtype != torch.float32:
        return None
    return joined(q, k)


def joined(q: Tensor, k: Tensor) -> Tensor | None:
    """Return a view of q and k as one tensor [T, heads + kv_heads, dim], or None if they are not adjacent in memory.

    They are adjacent in the result of a merged projection.
    """
    tokens, heads, dim = q.shape
    strides = q.stride()
    if strides != k.stride() or dim != k.shape[2]:
        return None
    if strides[1:] != (dim, 1):
        return None
    end = q.data_ptr() + heads * dim * q.element_size()
    if end != k.data_ptr():
        return None
    both = heads + k.shape[1]
    return q.as_strided((tokens, both, dim), strides)


def prepare(x: Tensor, norm: Tensor | None, position: Tensor, pre: QKPre, work: dict[Any, Any] | None) -> Tensor:
    """Apply an RMSNorm to each head of x [T, heads, dim], then the rotary embedding.

    The weight ``norm`` is [dim] or [heads, dim]; None means no norm.  ``pre.cos`` None means no rotation.
    ``work`` is as in ``prepare_qk``."""
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
