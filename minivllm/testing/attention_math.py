"""What attention is held against: its definition, by which float64 gives the answer and the model's own dtype gives
the error that is allowed (twice that of the naive way, as flash-attention's own tests have it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionBackend, AttnSpec, QKPre


@dataclass(frozen=True)
class ExactAttention:
    """What attention gives for n queries of one sequence of L tokens."""

    out: Tensor  # [n, heads, dim_v]
    lse: Tensor  # [n, heads] natural logarithm of the softmax's denominator, the sink included
    largest: float  # greatest absolute score among those that are seen


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, sinks: Tensor | None, selected: Tensor | None = None
) -> ExactAttention:
    """Return attention by its definition, in the dtype of its arguments.

    q [n, heads, dim_qk] are those of the last n tokens of k [L, kv_heads, dim_qk] and v [L, kv_heads, dim_v].
    ``selected`` bool [n, heads, L] leaves out the other keys, of an approximate back end; None means all.
    """
    kv_head = torch.arange(spec.heads) // (spec.heads // spec.kv_heads)
    scale = spec.scale if spec.scale is not None else spec.dim_qk**-0.5
    s = (q.transpose(0, 1) @ k[:, kv_head].permute(1, 2, 0)) * scale  # [heads, n, L]
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    key, query = torch.arange(len(k)), torch.arange(len(k) - len(q), len(k))[:, None]
    if spec.alibi is not None:
        s = s + torch.tensor(spec.alibi, dtype=s.dtype)[:, None, None] * (key - query)
    seen = visible(len(q), len(k), spec) if selected is None else selected.transpose(0, 1)
    largest = float(s.masked_fill(~seen, 0).abs().max())
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s)[:, None, None].expand(-1, len(q), 1)], dim=-1)
    p = s.softmax(-1)[..., : len(k)]
    out = p @ v[:, kv_head].transpose(0, 1)
    return ExactAttention(out.transpose(0, 1), s.logsumexp(-1).T, largest)


def visible(queries: int, keys: int, spec: AttnSpec) -> Tensor:
    """Return which keys each of the last ``queries`` of ``keys`` tokens may see, bool [queries, keys]."""
    key, query = torch.arange(keys), torch.arange(keys - queries, keys)[:, None]
    seen = key <= query
    return seen if spec.window is None else seen & (key > query - spec.window)


def check_selected(backend: AttentionBackend, spec: AttnSpec, mask: Any, queries: int, keys: int) -> None:
    """Fail unless the selection of one row has the form of the contract and keeps to its rules."""
    want = (queries, spec.heads, keys)
    found = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    assert isinstance(mask, Tensor) and mask.dtype == torch.bool and tuple(mask.shape) == want, (
        f"selected gave {found}: want a bool tensor {want}, [q_len, heads, kv_len]"
    )
    seen = visible(queries, keys, spec)[:, None]
    beyond = (mask.cpu() & ~seen).nonzero()
    assert not len(beyond), (
        f"selected gives key {int(beyond[0][2])} to query {int(beyond[0][0])} of the last {queries} of {keys} tokens, "
        "which may not see it"
    )
    count = mask.cpu().sum(-1)
    assert bool((count > 0).all()), "selected gives no key to a query: want at least one"
    sees = seen[:, 0].sum(-1).tolist()
    for i, n in enumerate(sees):
        most, mine = backend.most_keys(n, queries), int(count[i].max())
        assert mine <= most, f"a query that sees {n} keys, of {queries} queries, selects {mine}: most_keys says {most}"
        if most >= n:
            assert mine == n == int(count[i].min()), f"most_keys says that all {n} keys are selected, and {mine} are"


def slopes(heads: int) -> tuple[float, ...]:
    """Return a slope for each of ``heads`` heads, steep to flat, of which no two are equal."""
    return tuple(2.0 ** (-0.5 - 6.0 * head / heads) for head in range(heads))


def rotated(x: Tensor, norm: Tensor | None, pre: QKPre, position: Tensor) -> Tensor:
    """x [T, heads, dim] after RMSNorm and rotary embedding by their definitions, in the dtype of x, on the CPU: the
    pairs (x[i], x[i + d / 2]) of the first d elements are turned by the angle of the position and i."""
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + pre.eps).sqrt() * norm.to(x)
    if pre.cos is None:
        return x
    half = pre.cos.shape[1] // 2
    cos, sin = (t.cpu()[position, None, :half].to(x) for t in (pre.cos, pre.sin))
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], dim=-1)


@dataclass(frozen=True)
class Place:
    """A row of a step: its tokens [first, first + n), which are the last of ``length``."""

    row: int
    first: int
    n: int
    length: int
    block: int
    setting: str

    def at(self, index: tuple[int, ...]) -> str:
        """``index``: (token within the row, head, element)."""
        position = self.length - self.n + index[0]
        inner = "".join(f", {name} {i}" for name, i in zip(("head", "element"), index[1:], strict=False))
        block = f"{position // self.block} + {position % self.block}"
        return f"row {self.row} of {self.n} queries and {self.length} keys: position {position} = block {block}{inner}"


def compare(
    out: Tensor,
    lse: Tensor | None,
    want: ExactAttention,
    naive: ExactAttention,
    place: Place,
    dtype: torch.dtype,
) -> None:
    """One row's answers, which lie in those of a step ([T, ...]) as ``place`` says.

    Beside twice the naive error a little is allowed: that of rounding the result, or of a score, for a naive way that
    was lucky, and of float32 scores, which are not exact if they are large, whoever computes them.
    """
    rows = slice(place.first, place.first + place.n)
    inexact = 2**-22 * want.largest
    size = float(want.out.abs().max())
    floor = 1e-5 * max(1.0, size) + inexact * (size + 3)
    unit = torch.finfo(dtype).eps / 2
    check("out", out[rows], want.out, naive.out, floor, unit, place)
    if lse is not None:
        check("lse", lse[rows], want.lse, naive.lse, 1e-5 + 4 * inexact + unit * want.largest, 0.0, place)


def check(name: str, got: Tensor, want: Tensor, naive: Tensor, floor: float, unit: float, place: Place) -> None:
    """got, want and naive [n, heads, ...], in the largest error and in L2.  ``unit`` is allowed in relation to the
    answer, ``floor`` as it stands."""
    got, naive = got.double(), naive.double()
    lost = (~got.isfinite()).nonzero()
    if len(lost):
        index = tuple(lost[0].tolist())
        raise AssertionError(
            f"{name} is {float(got[index])}, or was not written, in {place.at(index)}\n{place.setting}"
        )
    error = (got - want).abs()
    allowed = 2 * float((naive - want).abs().max()) + floor + unit * float(want.abs().max())
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    assert float(error[index]) <= allowed, (
        f"{name} is {float(got[index]):.7g}, want {float(want[index]):.7g} within {allowed:.2g}, in {place.at(index)}\n"
        f"{place.setting}"
    )
    norm = float(want.norm())
    allowed = 2 * float((naive - want).norm()) + floor * got.numel() ** 0.5 + unit * norm
    assert float(error.norm()) <= allowed, (
        f"{name} is off by {float(error.norm()):.3g} in L2, the answer has {norm:.3g}; allowed are {allowed:.3g}, in "
        f"{place.at((0,))}\n{place.setting}"
    )
