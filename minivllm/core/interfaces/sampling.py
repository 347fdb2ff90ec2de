"""The processor and sampler seams: the path from logits to a token.

A processor changes logits; a sampler draws the token.  Both keep their state in *columns*, tensors ``[S, ...]`` with an
entry for each slot.  The engine allocates the columns, fills them with the values of ``bind``, copies them on a fork,
and passes them to each call.  A plug-in therefore needs no bookkeeping of rows, and is correct under batching,
preemption and run-ahead.  ``bind`` runs on the host once for each sequence.  ``apply`` and ``draw`` run on the device
once per step, over all rows that ``bind`` returned values for.
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

# added in 1.1: Column.kept; in 1.2: Spec.params; in 1.3: bind_prompt; in 1.4: Rows.own_logits
API = (1, 4)

State = Mapping[str, "Tensor"]  # the columns of a plug-in on the device, by name


@dataclass(frozen=True)
class Column:
    """One state column: a tensor ``[S, *shape]``.  ``dtype`` is the name of a torch dtype.  A new row starts with
    ``fill``.

    ``kept`` is for values that cannot be recomputed from tokens, such as the probabilities that a token was drawn with.
    When a row is preempted, the device saves the values.  They are restored before the row's next step, after
    ``commit`` was called again for the tokens of the row.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    fill: float = 0.0
    kept: bool = False


Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Row:
    """The result of ``bind``: the column values of a sequence, and ``variant`` bits.

    The host combines the bits of all rows of a step by bitwise or, and passes them to ``apply`` and ``draw`` as
    ``rows.variant``.  A plug-in can so test whether some row needs top-p, for example, without reading from the device.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    variant: int = 0


@dataclass
class Rows:
    """The rows for which a processor or sampler is called in a step: N rows, as tensors on the device."""

    slots: Tensor  # i64 [N]
    # i64 [N] position of the token to draw, which is the number of tokens so far
    position: Tensor
    prompt: Tensor  # i64 [N] prompt length
    seed: Tensor  # i64 [N]
    sample: Tensor  # i64 [N] index of the sample (branch) within its request
    variant: int  # bitwise or of the rows' variant bits
    tokens: Tensor  # i32 [S, max_len] token ids of each slot so far
    max_position: int  # upper bound of ``position`` as a Python number
    # f32 [N, V] for ``apply`` of a processor that claims ``own_model``: the logits after the same tokens of
    # the second model, which the processor's option ``model`` names.  ``apply`` may overwrite them.
    own_logits: Tensor | None = None

    def history(self) -> Tensor:
        """Return the token history i64 [N, max_position].  Entries at or after ``position[j]`` of row j are stale."""
        return self.tokens[self.slots, : self.max_position].long()

    def pick(self, index: Tensor) -> Rows:
        """Return the rows at ``index`` i64 [n]."""
        columns = ["slots", "position", "prompt", "seed", "sample"]
        if self.own_logits is not None:
            columns.append("own_logits")
        return replace(self, **{name: getattr(self, name)[index] for name in columns})


@dataclass
class Draw:
    """The output of a sampler: ``tokens`` i64 [N], and optionally ``peaks`` f32 [N, any].

    ``peaks`` are the largest logits of parts that together cover the row; a peak is not finite if its part contains a
    NaN.  If a sampler does not set it, the engine searches for rows that are not finite.  A row whose token is outside
    the vocabulary ends with an error that names the sampler.
    """

    tokens: Tensor
    peaks: Tensor | None = None

    def check(self, logits: Tensor) -> None:
        """Raise ValueError unless ``tokens`` is an int64 tensor with a token for each row of ``logits`` [N, V], on the
        same device.

        Also make ``tokens`` contiguous, because kernels expect the token of row i at offset i.
        """
        tokens = self.tokens
        there = tokens.device == logits.device and str(tokens.dtype) == "torch.int64"
        if not there or tuple(tokens.shape) != logits.shape[:1]:
            found = f"{list(tokens.shape)} {tokens.dtype} on {tokens.device}".replace("torch.", "")
            raise ValueError(
                f"draw() left tokens {found}; expected [{len(logits)}] int64 on {logits.device}"
            )
        self.tokens = tokens.contiguous()


@dataclass(frozen=True)
class SamplingContext:
    """The arguments with which the engine constructs processors and samplers."""

    vocab_size: int  # width of the logits
    max_model_len: int
    eos_ids: tuple[int, ...]
    batch_invariant: bool = False
    fuse: bool = True  # False disables fused kernels, for measurements of their effect


class Processor(ABC):
    """Changes logits in place.  The result for a row never depends on the other rows of the step."""

    #: Names of the sampling parameters that the plug-in implements: fields of ``SamplingParams``, and parameters that
    #: its spec declares (``Spec.params``), which are attributes of ``params`` too.  A request that sets a parameter
    #: which no configured plug-in reads is refused.
    reads: frozenset[str] = frozenset()

    def __init__(self, options: Any, ctx: SamplingContext) -> None:
        self.options, self.ctx = options, ctx

    def columns(self) -> Columns:
        """Return the state columns by name."""
        return {}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        """Return the column values of a sequence, or None if the plug-in has nothing to do for it.  RequestError if a
        value is bad."""
        raise NotImplementedError(f"{type(self).__name__} has neither bind() nor bind_prompt()")

    def bind_prompt(self, params: SamplingParams, prompt: np.ndarray) -> Row | None:
        """Return the column values of a sequence, or None, as ``bind`` does.  The engine calls this method; the default
        calls ``bind``.

        Override it instead of ``bind`` if the plug-in needs the token ids of the prompt, i32 [n] and read-only.
        """
        return self.bind(params, len(prompt))

    @abstractmethod
    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        """Change ``logits`` float32 [N, V] in place.  ``state[name]`` is [S, ...]; index it with ``rows.slots``.

        Never write to ``rows``, neither to its attributes nor to its tensors, because later plug-ins receive the same
        object.  Use ``dataclasses.replace(rows, ...)`` to change a value.
        """

    def commit(  # noqa: B027  (optional)
        self, tokens: Tensor, count: Tensor, rows: Rows, state: State
    ) -> None:
        """Update the state with accepted tokens i64 [N, k].

        The first ``count[j]`` tokens of row j are valid (0 means none).  The first of them is at ``rows.position[j]``.
        Rejected drafts are never passed, so there is nothing to roll back.  After a preemption, a sequence starts with
        fresh columns, ``commit`` is called again for all of its tokens, and then its ``kept`` columns are restored.
        """


class Sampler(Processor):
    """Draws one token for each row.

    The only source of randomness is ``minivllm.plugin.noise(seed, position, sample, lane)``.  The token is therefore a
    function of (logits, seed, position, sample).
    """

    #: ``draw`` accepts logits of any floating dtype.  This saves a float32 copy if no processor changes them.
    any_dtype: bool = False
    #: ``draw`` does not overwrite the logits.  This saves a copy if their log-probabilities are needed.
    keeps_logits: bool = False

    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        """Do nothing, because a sampler only draws."""

    def drawn_from(self, logits: Tensor, rows: Rows, state: State) -> Tensor:
        """Return new logits float32 [N, V] whose softmax is the distribution of ``draw``.  Logits of greedy rows are
        unchanged.

        It serves ``logprobs_mode="processed_logprobs"``.  That mode is refused if the sampler does not override this
        method.
        """
        raise NotImplementedError

    @abstractmethod
    def draw(self, logits: Tensor, rows: Rows, state: State, out: Draw) -> None:
        """Write ``out.tokens``.  ``logits`` float32 [N, V] may be overwritten.  A token of logit -inf is never drawn.
        Never write to ``rows`` (see ``Processor.apply``)."""
