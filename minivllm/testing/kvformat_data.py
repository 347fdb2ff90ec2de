"""Numbers that the suite of KV formats stores, and comparisons of the bits of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

Cache = dict[str, Tensor]  # the tensors of a cache by name


def number_of_blocks(cache: Cache) -> int:
    """Return the number of blocks of a cache."""
    first = next(iter(cache.values()))
    return len(first)


def copies(cache: Cache) -> Cache:
    """Return copies of the tensors of a cache."""
    return {name: x.clone() for name, x in cache.items()}


def all_but(named: Tensor, n: int) -> Tensor:
    """Return a mask bool [n] that is False at the named indices."""
    return torch.ones(n, dtype=torch.bool).index_fill_(0, named, False)


def all_values(dtype: torch.dtype) -> Tensor:
    """Return every value of a 16-bit dtype, or random and extreme values of float32."""
    if dtype != torch.float32:
        least = -(1 << 15)
        codes = torch.arange(least, -least).to(torch.int16)
        return codes.view(dtype)
    torch.manual_seed(1)
    least = -(1 << 31)
    numbers = torch.randint(least, -least, (1 << 16,))
    codes = numbers.to(torch.int32)
    values = codes.view(torch.float32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    parts = [values, edges_of(dtype, dtype), special]
    return torch.cat(parts)


def edges_of(dtype: torch.dtype, stored: torch.dtype) -> Tensor:
    """Return sixteen numbers of a dtype at the limits of the dtype ``stored``, as float32."""
    infos = (torch.finfo(stored), torch.finfo(dtype))
    most = min(info.max for info in infos)
    least = max(info.smallest_normal for info in infos)
    subnormal = max(info.smallest_normal * info.eps for info in infos)  # the smallest positive number
    eps = max(info.eps for info in infos)
    half = most / 2
    below_normal = least / 2
    three_least = 3 * subnormal
    after_one = 1 + eps
    before_one = 1 - eps
    values = [
        0.0, -0.0, most, -most, half, least, -least, below_normal, subnormal, -subnormal, three_least,
        1.0, -1.0, after_one, before_one, 257.0,
    ]  # fmt: skip
    exact = torch.tensor(values, dtype=torch.float64)
    return cast_within(exact, most, dtype).float()


def cast_within(x: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    """Cast numbers to a dtype, but not above ``most``: the cast of 65504 to bfloat16 is 65536."""
    limited = x.clamp(-most, most)
    x = limited.to(dtype)
    rounded_up = x.float().abs() > most
    eps = torch.finfo(dtype).eps
    smaller = x * (1 - eps)
    return torch.where(rounded_up, smaller, x)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same shape have the same bits."""
    bits_a = a.contiguous().view(torch.uint8)
    bits_b = b.contiguous().view(torch.uint8)
    return torch.equal(bits_a, bits_b)


def assert_bits(name: str, loaded: Tensor, stored: Tensor) -> None:
    """Fail unless loaded values have the bits of the stored ones; any NaN equals any other NaN."""
    ints = torch.int16 if stored.element_size() == 2 else torch.int32
    bits_loaded = loaded.contiguous().view(ints)
    bits_stored = stored.contiguous().view(ints)
    both_nan = loaded.isnan() & stored.isnan()
    wrong = (bits_loaded != bits_stored) & ~both_nan
    if wrong.any():
        first = wrong.nonzero()[0]
        index = tuple(first.tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {stored.numel()} values came back changed, {float(stored[index])!r} as "
            f"{float(loaded[index])!r}"
        )
