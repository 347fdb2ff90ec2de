"""Sample tokens: greedy, temperature, min-p, top-k and top-p, in one pass over all rows of a step.

The code in this file runs on every device and is the reference.  On a GPU, kernels that sort nothing replace it
(``_draw_fused``). All restrictions of a row become a single number, the smallest value that may be drawn; tokens equal
to it are kept.  The number depends only on the multiset of the row's values, not on the batch or the kernel.  The mass
for top-p is summed in integers, so the sum does not depend on the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Draw, Row, Rows, Sampler, State
from minivllm.device.worker.sampling import gumbel

from .spec import SMALL_K

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

# Bits of ``Row.variant``, which tell which restrictions a row has. Bits from K_SHIFT on mark the power of two that
# bounds a small top_k.
GREEDY, DRAWN, LIMITED, MIN_P, FULL, K_SHIFT = 1, 2, 4, 8, 16, 5
MIN_TEMPERATURE = 1e-5  # below this temperature 1 / T overflows float32, so the row is greedy
# least top_p; a smaller one would become 0 in the column, which excludes even the best token
MIN_TOP_P = torch.finfo(torch.float32).tiny
# MASS_SCALE is the mass (probability as a whole number) of the most likely token; sums of masses over 2**22 tokens fit
# in int64.
MASS_SCALE = 2.0**40
COLUMNS = ("temperature", "top_k", "top_p", "min_p")  # names of the columns that the kernels read
CHUNK = 1 << 23  # this many logits are sorted at a time, which limits the temporary memory to about 0.25 GB


class DefaultSampler(Sampler):
    """The default sampler, with the order of restrictions of vLLM: temperature, min-p, top-k, top-p.

    Top-p is from Holtzman et al.  (arXiv:1904.09751), min-p from Nguyen et al.  (arXiv:2407.01082). Tokens are drawn by
    Gumbel-max: argmax(logits / T + gumbel).
    """

    # Variants of rows that the compiled program for a CPU can draw; subclasses do not inherit this.
    native = GREEDY | DRAWN
    any_dtype = True
    keeps_logits = True
    reads = frozenset(COLUMNS)

    def columns(self) -> Columns:
        return {
            "temperature": Column(),
            "top_k": Column(dtype="int32"),  # 0 = all
            "top_p": Column(fill=1.0),
            "min_p": Column(),
        }

    def bind(self, params: SamplingParams, prompt_len: int) -> Row:
        if params.temperature < MIN_TEMPERATURE:
            return Row({"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, GREEDY)
        k = params.top_k if 0 < params.top_k < self.ctx.vocab_size else 0
        variant = DRAWN
        if params.min_p > 0:
            variant |= MIN_P
        if k or params.top_p < 1:
            variant |= LIMITED
            bound = (k - 1).bit_length()
            variant |= 1 << (K_SHIFT + bound) if 0 < k <= SMALL_K else FULL
        top_p = max(params.top_p, MIN_TOP_P)
        values = {"temperature": params.temperature, "top_k": k, "top_p": top_p, "min_p": params.min_p}
        return Row(values, variant)

    def draw(self, logits: Tensor, rows: Rows, state: State, out: Draw) -> None:
        if self.ctx.fuse and logits.is_cuda:
            return self._draw_fused(logits, rows, state, out)
        if not rows.variant & DRAWN:
            out.tokens.copy_(logits.argmax(dim=1))
            return
        x = self.drawn_from(logits, rows, state)
        greedy = logits.argmax(dim=1) if rows.variant & GREEDY else None
        x += gumbel(rows.seed, rows.position, rows.sample, x.shape[1])
        drawn = x.argmax(dim=1)
        if greedy is not None:
            is_drawn = state["temperature"][rows.slots] > 0
            drawn = torch.where(is_drawn, drawn, greedy)
        out.tokens.copy_(drawn)

    def drawn_from(self, logits: Tensor, rows: Rows, state: State) -> Tensor:
        x = relative(logits, state["temperature"][rows.slots])
        floor = None
        if rows.variant & MIN_P:
            floor = state["min_p"][rows.slots].log()
        if rows.variant & LIMITED:
            floor = self._limit(x, rows, state, floor)
        if floor is not None:
            x.masked_fill_(x < floor[:, None], float("-inf"))
        return x

    def _draw_fused(self, logits: Tensor, rows: Rows, state: State, out: Draw) -> None:
        """Draw tokens with kernels that do not sort, from logits of any dtype.

        Which kernels draw a row depends only on the row's own parameters."""
        from . import triton_draw, triton_nucleus, triton_search, triton_topk

        variant = rows.variant
        columns = tuple(state[name] for name in COLUMNS)
        few = bool(variant >> K_SHIFT)
        limited = variant & (LIMITED | MIN_P)
        noise = (rows.seed, rows.position, rows.sample)
        work = triton_draw.first(logits, rows.slots, noise, columns, out.tokens, bool(limited))
        out.peaks = work.peak
        if few:
            triton_topk.few(logits, work, out.tokens)
        if variant & (FULL | MIN_P):
            triton_nucleus.nucleus(logits, work, out.tokens)
        if limited:
            triton_search.search(logits, work, out.tokens)

    def _limit(self, x: Tensor, rows: Rows, state: State, floor: Tensor | None) -> Tensor:
        """Return the smallest value [N] that top-k and top-p keep of ``x`` [N, V]; ``floor`` is the smallest that min-p
        keeps.
        """
        n, width = x.shape
        if floor is None:
            floor = x.new_full((n,), float("-inf"))
        top_k = state["top_k"][rows.slots]
        top_p = state["top_p"][rows.slots]
        if not rows.variant & FULL:
            bounds = rows.variant >> K_SHIFT
            count = min(1 << (bounds.bit_length() - 1), width)
            best_first = x.topk(count, dim=1).values
            limit = _nucleus(best_first, floor, top_k, top_p)
            # Rows without top-k and top-p may be in the same step. Their limit is ``floor`` (min-p), because top-p over
            # these few logits would give them a wrong limit.
            free = (top_k == 0) & (top_p == 1)
            return torch.where(free, floor, limit)
        chunk = max(CHUNK // width, 1)
        parts = []
        for i in range(0, n, chunk):
            part = slice(i, i + chunk)
            best_first = x[part].sort(dim=1, descending=True).values
            parts.append(_nucleus(best_first, floor[part], top_k[part], top_p[part]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def relative(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return logits / temperature [N, V] as f32, minus the best.  A temperature [N] of 0, which is greedy, counts as 1.

    So a small temperature causes no overflow, and the numbers are small where f32 is exact.
    """
    logits = logits.float()
    best = logits.amax(dim=1, keepdim=True)
    divisor = torch.where(temperature > 0, temperature, 1.0)
    return (logits - best).div_(divisor[:, None])


def last_kept(keep: Tensor) -> Tensor:
    """Return the index [N, 1] of the last True in each row of ``keep`` [N, M], where a row begins with all its True
    elements; 0 if it has none."""
    count = keep.sum(dim=1, keepdim=True)
    return count.sub_(1).clamp_(min=0)


def _nucleus(best: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest value [N] that top-k and then top-p keep of descending values [N, M], relative to the
    largest.

    A value is kept while the mass before it is less than top_p of the mass of the top_k values at or above ``floor``.
    """
    rank = torch.arange(best.shape[1], device=best.device)
    keep = rank < top_k[:, None]
    keep |= (top_k == 0)[:, None]
    keep &= best >= floor[:, None]
    scaled = best.exp() * MASS_SCALE
    mass = torch.where(keep, scaled, 0.0).to(torch.int64)
    after = mass.cumsum(dim=1)
    total = after[:, -1:].double()
    budget = total * top_p.double()[:, None]
    unlimited = (top_p == 1)[:, None]
    budget.masked_fill_(unlimited, float("inf"))
    before = after - mass
    keep &= before.double() < budget
    return best.gather(1, last_kept(keep)).squeeze(1)
