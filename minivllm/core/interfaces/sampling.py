"""The processor and sampler seams: what happens between logits and a token.

A processor changes logits, a sampler draws.  Both keep their state in *columns*, ``[S, ...]`` tensors that the engine
allocates, fills from ``bind``, copies on a fork and hands back; so a plug-in needs no bookkeeping of rows, and batches,
preemption and run-ahead cannot confuse it.  ``bind`` runs on the host once per sequence, ``apply`` and ``draw`` on the
device once per step over all rows that bound.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from .params import SamplingParams

API = (1, 4)  # 1.1: Column.kept; 1.2: Spec.params; 1.3: bind_prompt; 1.4: Rows.own_logits


@dataclass(frozen=True)
class Column:
    """One state column: ``[S, *shape]`` of a torch dtype's name, rows reset to ``fill``.

    ``kept``: the values of a row that is preempted are put aside on the device and are back before its next step, after
    ``commit`` has heard of its tokens again.  For what tokens alone do not tell, as probabilities they were drawn with.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    fill: float = 0.0
    kept: bool = False


@dataclass(frozen=True)
class Row:
    """What ``bind`` returns: values for the columns of this sequence, and ``variant`` bits.

    The bits of all rows of a step are or-ed on the host and handed to ``apply`` and ``draw`` as ``rows.variant``: a
    plug-in learns what is asked of it (say, "some row wants top-p") without asking the device.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    variant: int = 0


@dataclass
class Rows:
    """The N rows of a step that a processor or sampler works on, on the device."""

    slots: Tensor  # i64 [N]
    # i64 [N] index in the sequence of the token that is about to be drawn (= tokens so far)
    position: Tensor
    prompt: Tensor  # i64 [N] prompt length
    seed: Tensor  # i64 [N]
    sample: Tensor  # i64 [N] number of the sample (branch) within its request
    variant: int  # or of the rows' variant bits
    tokens: Tensor  # i32 [S, max_len] token history by slot
    max_position: int  # host upper bound of ``position``
    # f32 [N, V], for ``apply`` of a processor that claims ``own_model``: logits of the model that its option
    # ``model`` names, behind the same tokens; it may overwrite them
    own_logits: Tensor | None = None

    def history(self) -> Tensor:
        """Token history i64 [N, max_position]; entries at or after ``position[j]`` are stale."""
        return self.tokens[self.slots, : self.max_position].long()

    def pick(self, index: Tensor) -> Rows:
        """Those at ``index`` i64 [n]."""
        columns = ["slots", "position", "prompt", "seed", "sample"]
        if self.own_logits is not None:
            columns.append("own_logits")
        return replace(self, **{name: getattr(self, name)[index] for name in columns})


@dataclass
class Draw:
    """Where a sampler writes: ``tokens`` i64 [N], and, if it comes by them, ``peaks`` f32 [N, any]: the largest logits
    of parts that make up each row, not finite where a part holds a NaN; else the engine looks for rows that are not
    finite by itself.  A row whose token is not in the vocabulary ends with an error that names the sampler."""

    tokens: Tensor
    peaks: Tensor | None = None

    def check(self, logits: Tensor) -> None:
        """ValueError unless a token for each row of ``logits`` [N, V] is there, on their device; kernels find it at its
        row's place then."""
        tokens = self.tokens
        there = tokens.device == logits.device and str(tokens.dtype) == "torch.int64"
        if not there or tuple(tokens.shape) != logits.shape[:1]:
            found = f"{list(tokens.shape)} {tokens.dtype} on {tokens.device}".replace("torch.", "")
            raise ValueError(
                f"it left tokens {found}; want [{len(logits)}] int64 on {logits.device}"
            )
        self.tokens = tokens.contiguous()


@dataclass(frozen=True)
class SamplingContext:
    """What processors and samplers are told when they are made."""

    vocab_size: int  # width of the logits
    max_model_len: int
    eos_ids: tuple[int, ...]
    batch_invariant: bool = False
    fuse: bool = True  # False: no fused kernels, so that their share can be measured


class Processor(ABC):
    """Changes logits in place.  Rows are independent: what happens to one never depends on which others are there."""

    #: Sampling parameters that it honours: fields, and those that its spec declares (``Spec.params``), which are
    #: attributes of ``params`` too.  A request that sets one which nothing in the config reads is refused, never served
    #: without it.
    reads: frozenset[str] = frozenset()

    def __init__(self, options: Any, ctx: SamplingContext) -> None:
        self.options, self.ctx = options, ctx

    def columns(self) -> Mapping[str, Column]:
        return {}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        """This sequence's column values; None if there is nothing to do for it.  Raises RequestError on bad values."""
        raise NotImplementedError(f"{type(self).__name__} has neither bind() nor bind_prompt()")

    def bind_prompt(self, params: SamplingParams, prompt: np.ndarray) -> Row | None:
        """What is asked: ``bind``, of which this makes a call.  Who wants to know the prompt's token ids, i32 [n] and
        read-only, overrides this one instead."""
        return self.bind(params, len(prompt))

    @abstractmethod
    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        """Change ``logits`` float32 [N, V] in place.  ``state[name]`` is [S, ...]: index it with ``rows.slots``.

        It never writes to ``rows``, neither the attributes nor their tensors: what comes after it gets the same ones.
        Who wants others works with ``dataclasses.replace(rows, ...)``."""

    def commit(  # noqa: B027  (optional)
        self, tokens: Tensor, count: Tensor, rows: Rows, state: Mapping[str, Tensor]
    ) -> None:
        """Accepted tokens i64 [N, k], of which ``count[j]`` are valid in row j (0 = none), the first of them at
        ``rows.position``.  Never called for drafts that were rejected, so nothing has to be rolled back; a sequence
        that was preempted starts with fresh columns, hears of all its tokens again, and then gets back its ``kept``
        columns."""


class Sampler(Processor):
    """Draws one token per row.  The only randomness is ``minivllm.plugin.noise(seed, position, sample,
    lane)``, so a draw is a function of (logits, seed, position, sample) alone."""

    #: It takes logits in any floating dtype, which saves a float32 copy where no processor changes them.
    any_dtype: bool = False
    #: ``draw`` leaves the logits as they are, which saves a copy where their log-probabilities are asked for.
    keeps_logits: bool = False

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        """A sampler only draws."""

    def drawn_from(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> Tensor:
        """Logits float32 [N, V], new, whose softmax ``draw`` draws from; of a greedy row the logits as they are.  For
        ``logprobs_mode="processed_logprobs"``, which is refused of a sampler that does not say."""
        raise NotImplementedError

    @abstractmethod
    def draw(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor], out: Draw) -> None:
        """Write ``out.tokens``; ``logits`` float32 [N, V] may be overwritten.  -inf is never drawn.  It never writes to
        ``rows`` (see ``Processor.apply``)."""
