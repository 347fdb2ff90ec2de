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


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, sinks: Tensor | None, selected: Tensor | None = None
) -> ExactAttention:
    """Return attention by its definition, computed in the dtype of its arguments.

    q [n, heads, dim_qk] has the queries of the last n tokens of k [L, kv_heads, dim_qk] and v [L, kv_heads, dim_v].
    ``selected`` (bool [n, heads, L]) names the keys that an approximate back end uses.  None means all visible keys.
    """
    n = len(q)
    length = len(k)
    kv_head = torch.arange(spec.heads) // (spec.heads // spec.kv_heads)
    if spec.scale is not None:
        scale = spec.scale
    else:
        scale = spec.dim_qk**-0.5
    scores = (q.transpose(0, 1) @ k[:, kv_head].permute(1, 2, 0)) * scale  # [heads, n, L]
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.alibi is not None:
        query = torch.arange(length - n, length)
        distance = torch.arange(length) - query[:, None]
        slope = torch.tensor(spec.alibi, dtype=scores.dtype)[:, None, None]
        scores = scores + slope * distance
    if selected is None:
        seen = visible(n, length, spec)
    else:
        seen = selected.transpose(0, 1)
    largest = float(scores.masked_fill(~seen, 0).abs().max())
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores)[:, None, None].expand(-1, n, 1)
        scores = torch.cat([scores, sink], dim=-1)
    probs = scores.softmax(-1)[..., :length]
    out = probs @ v[:, kv_head].transpose(0, 1)
    return ExactAttention(out.transpose(0, 1), scores.logsumexp(-1).T, largest)


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
    assert isinstance(mask, Tensor) and mask.dtype == torch.bool and tuple(mask.shape) == shape, (
        f"selected returned {found}: expected a bool tensor {shape}, [q_len, heads, kv_len]"
    )
    seen = visible(queries, keys, spec)
    beyond = (mask.cpu() & ~seen[:, None]).nonzero()
    assert not len(beyond), (
        f"selected returns key {int(beyond[0][2])} for query {int(beyond[0][0])} of the last {queries} of {keys} "
        "tokens, which may not see it"
    )
    count = mask.cpu().sum(-1)
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
    return tuple(2.0 ** (-0.5 - 6.0 * head / heads) for head in range(heads))


def rotated(x: Tensor, norm: Tensor | None, pre: QKPre, position: Tensor) -> Tensor:
    """Return x [T, heads, dim] after RMSNorm and rotary embedding by their definitions.

    The result is on the CPU in the dtype of x.  The rotation turns each pair (x[i], x[i + d / 2]) of the first d
    elements by an angle that depends on the position (int64 [T]) and on i.
    """
    if norm is not None:
        mean_square = x.square().mean(-1, keepdim=True)
        x = x / (mean_square + pre.eps).sqrt() * norm.to(x)
    if pre.cos is None:
        return x
    half = pre.cos.shape[1] // 2
    cos = pre.cos.cpu()[position, None, :half].to(x)
    sin = pre.sin.cpu()[position, None, :half].to(x)
    a = x[..., :half]
    b = x[..., half : 2 * half]
    parts = [a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]]
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
        position = self.length - self.n + index[0]
        parts = (f", {name} {i}" for name, i in zip(("head", "element"), index[1:], strict=False))
        inner = "".join(parts)
        block = f"{position // self.block} + {position % self.block}"
        return f"row {self.row} of {self.n} queries and {self.length} keys: position {position} = block {block}{inner}"


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
    size = float(exact.out.abs().max())
    floor = 1e-5 * max(1.0, size) + inexact * (size + 3)
    unit = torch.finfo(dtype).eps / 2
    check("out", out[tokens], exact.out, naive.out, floor, unit, place)
    if lse is not None:
        floor = 1e-5 + 4 * inexact + unit * exact.largest
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
    size = float(exact.abs().max())
    allowed = 2 * float(naive_error.abs().max()) + floor + unit * size
    at = torch.unravel_index(error.argmax(), error.shape)
    index = tuple(int(i) for i in at)
    assert float(error[index]) <= allowed, (
        f"{name} is {float(result[index]):.7g}, expected {float(exact[index]):.7g} within {allowed:.2g}, in "
        f"{place.at(index)}\n{place.setting}"
    )
    norm = float(exact.norm())
    allowed = 2 * float(naive_error.norm()) + floor * result.numel() ** 0.5 + unit * norm
    assert float(error.norm()) <= allowed, (
        f"{name} is off by {float(error.norm()):.3g} in L2, where the answer has {norm:.3g}: at most {allowed:.3g} is "
        f"allowed, in {place.at((0,))}\n{place.setting}"
    )
