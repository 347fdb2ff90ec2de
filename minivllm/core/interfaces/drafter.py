"""The drafter seam: guesses at the next tokens, which the model checks in one step.

Speculative decoding (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).  A row with t known tokens and
k drafts brings 1 + k tokens to a step; from the logits of each the sampler draws the token of its position, with the
row's own noise there.  Drafts are accepted as long as they are equal to what was drawn::

    position    t - 1   t    t + 1  t + 2         history and drafts
    token       x       d0   d1     d2            q_len = 1 + k
    drawn at    t       t+1  t+2    t+3           y0  y1  y2  y3
    y0 = d0, y1 = d1, y2 != d2:   y0 y1 y2 are accepted, y3 is dropped

What is accepted was drawn from the model's own logits, each under the history that it has without drafts: so a drafter
changes how many steps there are, and no token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from .sampling import Rows

API = (1, 0)


@dataclass(frozen=True)
class Ask:
    """What a drafter is asked: N rows that decode, on the device (``rows``) and on the host.

    ``rows.position`` is the number of known tokens, ``rows.history()`` has them.  All rows are at rest: the host knows
    how long they are.
    """

    rows: Rows
    k: int  # drafts wanted of each row
    slots: np.ndarray  # i32 [N]
    known: np.ndarray  # i32 [N] known tokens; drafts are for positions known, known + 1 ...


class DraftModel(ABC):
    """A second model that the engine has loaded and keeps a KV cache for, in the blocks of the first one."""

    @abstractmethod
    def logits(self, ask: Ask, j: int) -> Tensor:
        """Logits [N, V] for position ``known + j`` of each row.  j counts up from 0, the tokens before it written by
        ``draw``; what the model has not read of a row yet it reads in the call for j = 0."""

    @abstractmethod
    def draw(self, ask: Ask, logits: Tensor, j: int) -> Tensor:
        """Tokens i64 [N] for position ``known + j``, drawn as the engine draws them (processors, sampler, the row's
        noise at that position), and written to the history.  Where both models agree the draws do."""


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is told when it is made."""

    vocab_size: int
    max_model_len: int
    device: str
    # for those that claim ``draft_model``: the one that their option ``model`` names
    model: DraftModel | None = None


class Drafter(ABC):
    """Stateless but for what ``ctx.model`` keeps: drafts depend on the rows that are asked about, and a row's drafts
    not on the rows beside it."""

    def __init__(self, options: Any, ctx: DrafterContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        """(tokens i64 [N, k], count i64 [N]) on the device, 0 to k drafts a row, the first ``count[i]`` of row i, which
        are tokens of the vocabulary; what is behind them may be anything.  It never waits for the device, and writes to
        nothing that it was given.  A drafter that raises, or answers with something else, costs the rows of this step
        their drafts, and is not asked again."""
