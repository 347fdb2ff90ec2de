"""Sample with temperature, top-k and top-p, and with a watermark for requests with ``watermark=True``.

Text repeats itself, and the same context would choose the same noise again, which readers could notice.  So a context
marks a token only the first time that it occurs in a sequence (the paper's *repeated context masking*).  The contexts
of the accepted tokens are the state of a sequence, in a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.plugin import Column, Draw, Row, Rows, Sampler, SamplingContext, gumbel

from .options import SynthIdOptions
from .spec import SYNTHID
from .tournament import context_hash, tournament

if TYPE_CHECKING:
    from minivllm import SamplingParams

DRAWN, LIMITED, MARKED = 1, 2, 4  # variant bits
COLD = 1e-5  # below this temperature 1 / T overflows, and the draw is greedy


class SynthId(Sampler):
    """Draw with ``temperature``, ``top_k``, ``top_p`` and ``watermark``; greedy draws cannot carry a mark.

    Its columns are ``seen`` i64 [remember + 1], the hashes of the contexts of accepted tokens as a ring, and
    ``count``, their number.  The last element of the ring receives hashes that are not stored, and stays 0.
    """

    reads = SYNTHID.reads | {"temperature", "top_k", "top_p"}
    options: SynthIdOptions

    def __init__(self, options: SynthIdOptions | None, ctx: SamplingContext) -> None:
        super().__init__(options or SynthIdOptions(), ctx)

    def columns(self) -> Mapping[str, Column]:
        return {
            "temperature": Column(),
            "top_k": Column(dtype="int32"),  # 0 = all
            "top_p": Column(fill=1.0),
            "marked": Column(dtype="bool"),
            "seen": Column((self.options.remember + 1,), "int64"),
            "count": Column(dtype="int64"),
        }

    def bind(self, params: SamplingParams, prompt_len: int) -> Row:
        wanted = self.options.always if params.watermark is None else params.watermark
        if params.temperature < COLD:
            return Row({"temperature": 0.0})
        k = max(params.top_k, 0)
        variant = DRAWN | LIMITED * (k > 0 or params.top_p < 1) | MARKED * wanted
        values = {"temperature": params.temperature, "top_k": k, "top_p": params.top_p, "marked": wanted}
        return Row(values, variant)

    def draw(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor], out: Draw) -> None:
        best = logits.argmax(dim=1)
        if not rows.variant & DRAWN:
            out.tokens.copy_(best)
            return
        temperature = state["temperature"][rows.slots]
        # relative to the best logit, so that small temperatures do not overflow
        x = logits - logits.amax(dim=1, keepdim=True)
        x /= torch.where(temperature > 0, temperature, 1.0)[:, None]
        if rows.variant & LIMITED:
            x = limited(x, state["top_k"][rows.slots], state["top_p"][rows.slots])
        if rows.variant & MARKED:
            x = self._marked(x, rows, state)
        x = x + gumbel(rows.seed, rows.position, rows.sample, x.shape[1])
        out.tokens.copy_(torch.where(temperature > 0, x.argmax(dim=1), best))

    def _marked(self, x: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> Tensor:
        """Return log-probabilities [N, V], after the tournament for marked rows whose context is new."""
        context = context_hash(self._before(rows), self.options.key)
        known = (state["seen"][rows.slots] == context[:, None]).any(dim=1)
        on = state["marked"][rows.slots] & ~known & (rows.position >= self.options.context)
        marked = tournament(torch.softmax(x, dim=1), context, self.options.layers).log()
        return torch.where(on[:, None], marked, x)

    def _before(self, rows: Rows) -> Tensor:
        """Return the tokens i64 [N, context] before the drawn one; a short history gives arbitrary ones."""
        at = rows.position[:, None] + torch.arange(-self.options.context, 0, device=rows.position.device)
        return rows.tokens[rows.slots[:, None], at.clamp(min=0)].long()

    def commit(self, tokens: Tensor, count: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        """Store the context of each accepted token that could have been marked."""
        n, size = tokens.shape[1], self.options.context
        history = torch.cat([self._before(rows), tokens[:, :-1]], dim=1)
        hashes = context_hash(history.unfold(1, size, 1), self.options.key)  # [N, n]
        k = torch.arange(n, device=tokens.device)
        counts = (k < count[:, None]) & state["marked"][rows.slots][:, None]
        counts &= rows.position[:, None] + k >= size
        number = counts.cumsum(dim=1)
        total = number[:, -1:]
        size = self.options.remember
        # two hashes for the same element of the ring would be written in any order
        kept = counts & (number > total - size)
        place = (state["count"][rows.slots][:, None] + number - 1) % size
        place = torch.where(kept, place, size)
        state["seen"][rows.slots[:, None], place] = torch.where(kept, hashes, 0)
        state["count"][rows.slots] += total[:, 0]


def limited(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return logits [N, V] with -inf outside of top-k [N] (0 means all) and then top-p [N]; ties at the limit stay."""
    best = x.sort(dim=1, descending=True).values
    rank = torch.arange(x.shape[1], device=x.device)
    keep = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    mass = torch.where(keep, best.double().exp(), 0.0)
    after = mass.cumsum(dim=1)
    # the token that crosses top_p stays; at top_p = 1 rounding must not cut the tail
    keep &= ((after - mass) < top_p.double()[:, None] * after[:, -1:]) | (top_p == 1)[:, None]
    last = keep.sum(dim=1, keepdim=True).sub(1).clamp(min=0)
    return x.masked_fill(x < best.gather(1, last), float("-inf"))
