"""The drafter seam (plug-in interface): guesses of the next tokens, which the model verifies in one step.

This is speculative decoding (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).  A row with t known
tokens and k drafts has 1 + k tokens in a step.  The sampler draws a token from the logits of each of these positions,
with the row's own noise for that position.  Drafts are accepted up to the first one that differs from the drawn token::

    position    t - 1   t    t + 1  t + 2         history and drafts
    token       x       d0   d1     d2            q_len = 1 + k
    drawn at    t       t+1  t+2    t+3           y0  y1  y2  y3
    y0 = d0, y1 = d1, y2 != d2:   y0 y1 y2 are accepted, y3 is dropped

Each accepted token was drawn from the logits of the model under the same history as without drafts.  A drafter
therefore changes the number of steps, but no token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from .model import ModelArch
    from .sampling import Rows

# Additions by version: 1.1: Ask.history, Ask.owner and Drafter.learn, for the feature host_tokens
# 1.2: Drafter.head, for the feature target_head 1.3: the feature graph_safe
API = (1, 3)


@dataclass(frozen=True)
class Ask:
    """The arguments of ``Drafter.propose``: N decoding rows, on the device (``rows``) and on the host (``slots``,
    ``known``).

    ``rows.position`` is the number of known tokens, and ``rows.history()`` returns them.  None of the rows has a step
    in flight, so the host knows their exact lengths.

    In a call that is captured in a CUDA graph (feature ``graph_safe``) ``slots`` and ``known`` are empty, and rows of
    padding lie in the spare slot, the last one.
    """

    rows: Rows
    k: int  # largest number of drafts (proposed tokens) of a row
    slots: np.ndarray  # i32 [N]
    known: (
        np.ndarray
        # i32 [N] number of known tokens of each row; drafts are for the positions known, known + 1 ...
    )
    # i32 [known] for each row, its known tokens on the host; read only.  Empty unless the drafter claims
    # ``host_tokens``.
    history: Sequence[np.ndarray] = ()
    # i64 [N] number of each row's owner: tenant, cache salt and whatever else separates cached prefixes.  None
    # unless the drafter claims ``host_tokens``.
    owner: np.ndarray | None = None


@dataclass(frozen=True)
class HeadFiles:
    """The files of a drafter's own layers (its head): in the folder that the drafter's option ``model`` names, or among
    the files of the served model."""

    folder: str
    cfg: Any  # config object of the config.json in ``folder``
    # Names of the tensors in the files; None means that they are not known before the weights are
    # loaded.
    names: Sequence[str] | None


@dataclass(frozen=True)
class Head:
    """The layers of a drafter that read hidden states of the served model.

    The engine stores the values of ``points`` for every token of the served model, in its blocks.  It builds the model
    of ``arch`` with ``cfg``, loads its weights, and stores its keys and values in the blocks of the first KV group.

    The model is called with pairs: ``ids`` are tokens, and row t of ``StepTensors.hidden`` has the values of ``points``
    at the token before ids[t], concatenated.  ``position`` and the place in the KV cache are those of the token before.
    A call returns states [T, W], and ``logits`` maps states [N, W] to logits [N, V] of the served model's vocabulary
    for the token after ``ids``.  For the second and later drafts of a row ``hidden`` are the states [N, W] of the draft
    before, and ``drafted`` is true.  ``attach(model)`` is called once with the served model, whose embedding and output
    layer may be used.
    """

    arch: ModelArch
    cfg: Any
    # names of the tensors of the served model that the head reads, from ``Model.state_points``
    points: tuple[str, ...]


class DraftModel(ABC):
    """A second, usually smaller model, or the ``Head`` of a drafter.  The engine loads it and stores its keys and
    values in the blocks of the main model."""

    @abstractmethod
    def logits(self, ask: Ask, j: int) -> Tensor:
        """Return the logits [N, V] for position ``known + j`` of each row.

        Call it for j = 0, 1, 2 ... in order; ``draw`` must write the token of each position before the next call.  The
        call for j = 0 also runs the model on the tokens of a row that it has not processed yet.
        """

    @abstractmethod
    def draw(self, ask: Ask, logits: Tensor, j: int) -> Tensor:
        """Draw a token for position ``known + j`` of each row, and append it to the row's history.  Return the tokens,
        i64 [N].

        The token is drawn as the engine draws: same processors, same sampler, and the row's noise for that position.
        If both models have the same logits, they therefore draw the same token.
        """


@dataclass(frozen=True)
class DrafterContext:
    """The arguments with which the engine constructs a drafter."""

    vocab_size: int
    max_model_len: int
    device: str
    # The model that the drafter's option ``model`` names, or the drafter's head; None unless the drafter claims
    # ``draft_model`` or ``target_head``.
    model: DraftModel | None = None


class Drafter(ABC):
    """Proposes drafts.  It keeps no state except in ``ctx.model`` and what ``learn`` receives.  The drafts of a row
    depend on the data of that row and on learned tokens of its owner, not on the other rows of the call."""

    def __init__(self, options: Any, ctx: DrafterContext) -> None:
        self.options, self.ctx = options, ctx

    @classmethod
    def head(cls, options: Any, files: HeadFiles, target: ModelArch, cfg: Any) -> Head:
        """Return the ``Head`` (the drafter's own layers) of a drafter that claims the feature ``target_head``.

        ``target`` and ``cfg`` are the architecture and the config object of the served model.  Raise ModelError if the
        head does not belong to the served model."""
        raise NotImplementedError(f"{cls.__name__} claims target_head: implement head()")

    @abstractmethod
    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        """Return drafts for each row, as device tensors (tokens i64 [N, k], count i64 [N]).

        Row i has ``count[i]`` drafts, 0 to k.  They are the first ``count[i]`` columns of ``tokens`` and must be ids of
        the vocabulary; the engine ignores the remaining columns.  Do not wait for the device and do not write to the
        arguments.  If a drafter raises or returns anything else, the rows of this step have no drafts, and the engine
        does not call that drafter again.

        A drafter that claims ``graph_safe`` uses only ``ask.rows``, ``ask.k`` and ``ctx.model``, and launches the same
        operations in each call of the same shape.  The engine then records a call in a CUDA graph and replays it.  The
        call after an exception in a recording is an ordinary one.
        """

    def learn(self, owner: int, tokens: np.ndarray, prompt: int) -> None:  # noqa: B027
        """Receive the tokens i32 [n] of a sequence that left its slot; the first ``prompt`` are its prompt.

        Called for drafters that claim ``host_tokens``, also for sequences that were aborted or preempted.  A
        preempted sequence is passed again when it ends.  Drafts for other owners must not depend on the tokens, and
        the kept tokens must be bounded."""
