"""Recurrent states: tensors of a fixed size that a layer without keys and values keeps for a sequence.

A state covers the first ``valid`` tokens of its sequence.  The inputs of the newest tokens lie in a ring of ``ring``
places, so that a state need not be stored after each token.  A step may find a state that ends some tokens before the
step's own first token.  It then computes these tokens again from the ring::

    ring     x4  x5  x6  x7  x8 ...           inputs of the newest tokens, of position p at place p % ring
    state    after token 5 (valid = 6)        the next step begins at 8: it folds x6 and x7 into the state first

Drafts are such tokens.  Their inputs go to the ring, and the state stays before them, because the drafts may be
rejected.  The next step begins behind the accepted drafts and folds only these, so they need not be listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

COPIES = 2  # largest number of copies of a row's state that may be requested at a time
# Value in ``StepStates.behind``: the state in this slot belongs to another sequence before this
# position.
UNUSABLE = -1


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's state: the shape for one sequence, and the dtype (None means the model's dtype).

    ``ring`` means that the first axis has a place for each of the newest tokens, and is left out of ``shape``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    ring: bool = False


@dataclass(frozen=True)
class Recurrent:
    """The state of a layer: its tensors, and how many inputs before a token the layer reads (``taps``)."""

    tensors: tuple[StateTensor, ...]
    taps: int

    def places(self, drafts: int) -> int:
        """Return the number of inputs that the ring holds, for rows with up to ``drafts`` drafts.

        A step needs the inputs of ``taps`` tokens before the state, and of up to ``drafts + 1`` tokens that it lacks.
        """
        return self.taps + drafts + 1


@dataclass
class StepStates:
    """The recurrent states of the rows of a step, on the device; R rows, T tokens.

    A row and its drafts are one row here.  A row that is padded, or that has ended, has the null state, which every
    step may overwrite.
    """

    rows: Tensor  # i64 [R] index of the row's state
    start: Tensor  # i32 [R] position of the first token; at 0 the state is zero
    behind: Tensor  # i32 [R] tokens before ``start`` that the state lacks, or UNUSABLE
    cu_q: Tensor  # i32 [R + 1] the tokens of row r are cu_q[r] to cu_q[r + 1] - 1
    # bool [R] whether the row has drafts; then the state is stored as it is before ``start``
    drafts: Tensor
    save_at: Tensor  # i32 [R, COPIES] positions at which the state is copied, -1 means none
    save_to: Tensor  # i64 [R, COPIES] indices of the states that get the copies
    # Called once after the last layer. It records which tokens the states cover.
    advance: Callable[[], None]
    # i64 [T] index of the row to which each token belongs; None means unknown
    row: Tensor | None = None
    longest: int | None = None  # largest number of tokens of a row, or more; None means unknown
    shortest: int | None = None  # smallest number of tokens of a row, or less; None means unknown
    chunks: Any = None  # values that the kernels of long rows compute once for all layers
