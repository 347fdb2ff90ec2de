"""Compute attention by its definition, and compare the results of a back end with it.

The reference in float64 is the exact answer.  The same computation in the model's dtype has a naive error.  A back end
may have twice the naive error, as in flash-attention's own tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionBackend, AttnSpec, QKPre


@dataclass(frozen=True)
class ExactAttention:
    """The results of attention for the last n queries of one sequence of L tokens."""

    out: Tensor  # [n, heads, dim_v]
    lse: Tensor  # natural logarithm of the softmax denominator with the sink, [n, heads]
    largest: float  # largest absolute score of a query and a visible key


def largest(x: Tensor) -> float:
    """Return the largest absolute value of a tensor."""
    return float(x.abs().max())


def half_eps(dtype: torch.dtype) -> float:
    """Return the largest relative error that rounding to a dtype has."""
    return torch.finfo(dtype).eps / 2


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, sinks: Tensor | None, selected: Tensor | None = None
) -> ExactAttention:
    """Return attention by its definition, computed in the dtype of its arguments.

    q [n, heads, dim_qk] has the queries of the last n tokens of k [L, kv_heads, dim_qk] and v [L, kv_heads, dim_v].
    ``selected`` (bool [n, heads, L]) names the keys that an approximate back end uses.  None means all visible keys.
    """
    n = len(q)
    length = len(k)
    queries_per_kv = spec.heads // spec.kv_heads
    kv_head = torch.arange(spec.heads) // queries_per_kv
    scale = spec.dim_qk**-0.5 if spec.scale is None else spec.scale
    keys = k[:, kv_head].permute(1, 2, 0)
    products = q.transpose(0, 1) @ keys  # [heads, n, L]
    scores = products * scale
    if spec.softcap is not None:
        bent = torch.tanh(scores / spec.softcap)
        scores = spec.softcap * bent
    if spec.alibi is not None:
        query = torch.arange(length - n, length)
        distance = torch.arange(length) - query[:, None]
        slope = torch.tensor(spec.alibi, dtype=scores.dtype)
        scores = scores + slope[:, None, None] * distance
    if selected is None:
        seen = visible(n, length, spec)
    else:
        seen = selected.transpose(0, 1)
    largest_score = largest(scores.masked_fill(~seen, 0))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores)[:, None, None]
        columns = [scores, sink.expand(-1, n, 1)]
        scores = torch.cat(columns, dim=-1)
    probs = scores.softmax(-1)
    values = v[:, kv_head].transpose(0, 1)
    out = probs[..., :length] @ values
    lse = scores.logsumexp(-1)
    return ExactAttention(out.transpose(0, 1), lse.T, largest_score)


def visible(queries: int, keys: int, spec: AttnSpec) -> Tensor:
    """Return a mask of the keys that the last ``queries`` of ``keys`` tokens may see, bool [queries, keys]."""
    key = torch.arange(keys)
    query = torch.arange(keys - queries, keys)[:, None]
    seen = key <= query
    if spec.window is None:
        return seen
    return seen & (key > query - spec.window)


def check_selected(backend: AttentionBackend, spec: AttnSpec, mask: Any, queries: int, keys: int) -> None:
    """Fail unless the key selection of one row of a step obeys the contract of approximate attention.

    ``mask`` is the return value of ``AttentionBackend.selected`` for the row: bool [queries, heads, keys].  Each query
    selects visible keys only, at least one and at most ``most_keys``.
    """
    shape = (queries, spec.heads, keys)
    if isinstance(mask, Tensor):
        found = f"{tuple(mask.shape)} {mask.dtype}"
    else:
        found = type(mask).__name__
    right = found == f"{shape} {torch.bool}"
    assert right, f"selected returned {found}: expected a bool tensor {shape}, [q_len, heads, kv_len]"
    mask = mask.cpu()
    seen = visible(queries, keys, spec)
    hidden = ~seen[:, None]
    beyond = (mask & hidden).nonzero().tolist()
    if beyond:
        query, _, key = beyond[0]
        raise AssertionError(
            f"selected returns key {key} for query {query} of the last {queries} of {keys} tokens, which may not see it"
        )
    count = mask.sum(-1)
    assert bool((count > 0).all()), "selected returns no key for a query: expected at least one"
    for i, n in enumerate(seen.sum(-1).tolist()):
        allowed = backend.most_keys(n, queries)
        most = int(count[i].max())
        assert most <= allowed, (
            f"a query that sees {n} keys, of {queries} queries, selects {most}: most_keys allows {allowed}"
        )
        if allowed >= n:
            least = int(count[i].min())
            assert least == n, f"most_keys returns {allowed}, so all {n} keys must be selected, but {least} are"


def slopes(heads: int) -> tuple[float, ...]:
    """Return a different ALiBi slope for each of ``heads`` heads, from steep to flat."""
    exponents = [-0.5 - 6.0 * head / heads for head in range(heads)]
    return tuple(2.0**exponent for exponent in exponents)


def rotated(x: Tensor, norm: Tensor | None, pre: QKPre, position: Tensor) -> Tensor:
    """Return x [T, heads, dim] after RMSNorm and rotary embedding by their definitions.

    The result is on the CPU in the dtype of x.  The rotation turns each pair (x[i], x[i + d / 2]) of the first d
    elements by an angle that depends on the position (int64 [T]) and on i.
    """
    if norm is not None:
        mean_square = x.square().mean(-1, keepdim=True)
        size = (mean_square + pre.eps).sqrt()
        x = x / size * norm.to(x)
    if pre.cos is None:
        return x
    half = pre.cos.shape[1] // 2

    def of_tokens(table: Tensor) -> Tensor:
        rows = table.cpu()[position, None, :half]
        return rows.to(x)

    cos = of_tokens(pre.cos)
    sin = of_tokens(pre.sin)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    parts = [a * cos - b * sin, b * cos + a * sin, rest]
    return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class TokenPlace:
    """The place of a row in a step: its first token, its number of tokens, and the length of its sequence.

    The row has the tokens [first, first + n) of the step, which are the last n of the ``length`` tokens of its
    sequence.
    """

    row: int
    first: int
    n: int
    length: int
    block: int  # tokens per block
    setting: str

    def at(self, index: tuple[int, ...]) -> str:
        """Describe an element of a result in words; ``index`` is (token within the row, head, element)."""
        token, *rest = index
        position = self.length - self.n + token
        inner = ""
        for name, i in zip(("head", "element"), rest, strict=False):
            inner += f", {name} {i}"
        block, offset = divmod(position, self.block)
        row = f"row {self.row} of {self.n} queries and {self.length} keys"
        return f"{row}: position {position} = block {block} + {offset}{inner}"


def compare(
    out: Tensor,
    lse: Tensor | None,
    exact: ExactAttention,
    naive: ExactAttention,
    place: TokenPlace,
    dtype: torch.dtype,
) -> None:
    """Fail unless the results of one row are as close to the exact answer as the contract demands.

    ``out`` [T, heads, dim_v] and ``lse`` [T, heads] have the results of a whole step.  ``place`` names the row.

    Twice the naive error is allowed, and a little more.  The naive computation can have a small error by luck, so the
    rounding of the result and of a score is added.  Large scores are inexact in float32 in any implementation.
    """
    tokens = slice(place.first, place.first + place.n)
    inexact = 2**-22 * exact.largest
    size = largest(exact.out)
    of_score = inexact * (size + 3)  # error of the result by the rounding of a score
    floor = 1e-5 * max(1.0, size) + of_score
    unit = half_eps(dtype)
    check("out", out[tokens], exact.out, naive.out, floor, unit, place)
    if lse is not None:
        rounding = unit * exact.largest
        floor = 1e-5 + 4 * inexact + rounding
        check("lse", lse[tokens], exact.lse, naive.lse, floor, 0.0, place)


def check(
    name: str, result: Tensor, exact: Tensor, naive: Tensor, floor: float, unit: float, place: TokenPlace
) -> None:
    """Fail unless ``result`` is close to ``exact``, in its largest error and in the L2 norm of its error.

    All tensors are [n, heads, ...].  The allowed error is twice the error of ``naive``, plus ``floor``, plus ``unit``
    times the size of ``exact``.
    """
    result = result.double()
    naive_error = naive.double() - exact
    lost = (~result.isfinite()).nonzero()
    if len(lost):
        index = tuple(lost[0].tolist())
        value = float(result[index])
        raise AssertionError(f"{name} is {value}, or was not written, in {place.at(index)}\n{place.setting}")
    error = (result - exact).abs()
    size = largest(exact)
    allowed = 2 * largest(naive_error) + floor + unit * size
    at = torch.unravel_index(error.argmax(), error.shape)
    index = tuple(int(i) for i in at)
    value = float(result[index])
    wanted = float(exact[index])
    assert float(error[index]) <= allowed, (
        f"{name} is {value:.7g}, expected {wanted:.7g} within {allowed:.2g}, in {place.at(index)}\n{place.setting}"
    )
    norm = float(exact.norm())
    floor_norm = floor * result.numel() ** 0.5
    allowed = 2 * float(naive_error.norm()) + floor_norm + unit * norm
    error_norm = float(error.norm())
    assert error_norm <= allowed, (
        f"{name} is off by {error_norm:.3g} in L2, where the answer has {norm:.3g}: at most {allowed:.3g} is "
        f"allowed, in {place.at((0,))}\n{place.setting}"
    )
