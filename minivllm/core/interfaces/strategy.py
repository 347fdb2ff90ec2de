"""The decoding strategy seam: how many sequences a request becomes, and which of them are its answer.

The branches of a *free* strategy run by themselves, and the host is asked only when one ends.  A *stepwise* one is
asked after every step, as soon as all its live branches have their log-probabilities: which of them go on, and with
which tokens.  A branch may go on several times (the KV blocks are shared, only the last one is copied) or not at all::

    step 1    a                            width 3, one live branch after the prompt
    step 2    a1 a2 a3                     go_on = (0, 1), (0, 2), (0, 3)
    step 3    a24 a27 a31                  go_on = (1, 4), (1, 7), (2, 1): a1 is dropped, a2 goes on twice
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from .params import SamplingParams

API = (1, 4)  # 1.2: names in ``reads``; 1.3: Spec.params; 1.4: Branch.guide


@dataclass(frozen=True)
class Guide:
    """A second sequence beside a branch: it has a prompt of its own, and each token that the branch draws is its next
    one too.  Before processors, masks and sampler the logits of the branch become, in float32::

        scale * (log_softmax(its own) - log_softmax(the guide's)) + log_softmax(the guide's)
    """

    scale: float
    prompt: Sequence[int] = ()  # token ids; none: the last one of the request's prompt
    param: str = "prompt"  # the parameter that asks for it, which a refusal names


@dataclass(frozen=True)
class Branch:
    """One sequence of a request: its sample number goes into the noise, so branches draw differently."""

    sample: int
    guide: Guide | None = (
        None  # of a free strategy; either every branch of a request has one or none has
    )


@dataclass(frozen=True)
class BranchEnd:
    """A branch that ended, as the strategy sees it."""

    sample: int
    length: int  # generated tokens
    cumulative_logprob: float | None
    finish_reason: str


@dataclass(frozen=True)
class Grown:
    """A live branch after a step, and the tokens that it may go on with."""

    length: int  # tokens generated so far, without the candidates
    # i32 [m] candidates, the likeliest first, of equal ones the lower id; without stop ids before ``min_tokens``
    tokens: np.ndarray
    logprobs: np.ndarray  # f64 [m] theirs, natural logarithms, finite


@dataclass(frozen=True)
class Pick:
    """One continuation: a live branch, by its place in what ``advance`` was given, and one of its candidates."""

    branch: int
    token: int
    score: float = 0.0  # what the answer is ordered by; shown with an output


@dataclass(frozen=True)
class Moves:
    """``go_on``: the live branches from now on, at most as many as ``start`` gave; the next ``advance`` is given them
    in this order.  ``keep``: continuations that are outputs perhaps, numbered from 0 over the whole search.  The search
    ends when it is ``done``, or when nothing goes on."""

    go_on: Sequence[Pick] = ()
    keep: Sequence[Pick] = ()
    done: bool = False


class Search(ABC):
    """The state of one request of a stepwise strategy."""

    @abstractmethod
    def advance(self, grown: Sequence[Grown], ends: Callable[[int, int], bool]) -> Moves:
        """After a step: what becomes of the live branches.  ``ends(branch, token)``: whether the branch ends with this
        candidate (end-of-sequence, a stop token or stop string, its length), so that it cannot go on."""

    @abstractmethod
    def result(self) -> Sequence[int]:
        """Numbers of kept continuations, best first, each once; at most ``params.n`` are shown.  Also asked for a
        search that was cut short; what is missing to n is then taken from the live branches."""


class DecodingStrategy(ABC):
    """Stateless: one instance serves all requests."""

    mode: str = "free"  # or "stepwise"
    #: Of ``best_of`` and ``beam_width`` those that it honours, and the parameters that its spec declares: it is not
    #: asked about a request that sets another one, and one that nothing reads is refused.
    reads: frozenset[str] = frozenset()

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def takes(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters is its own; the first strategy in the config that says so has it."""
        return True

    @abstractmethod
    def start(self, params: SamplingParams) -> Sequence[Branch]:
        """The branches of a new request; they share the prompt's blocks.  RequestError if it cannot serve them."""

    def result(self, params: SamplingParams, ends: Sequence[BranchEnd]) -> Sequence[int]:
        """Free only: sample numbers of the answer, best first, once every branch has ended."""
        raise NotImplementedError(f"{type(self).__name__} is free and has no result()")

    def topk(self, params: SamplingParams) -> int:
        """Log-probabilities that it needs of each token: -1 none, 0 the chosen token's (for ``cumulative_logprob``), k
        the k best too.  The branches of a stepwise strategy get so many candidates that are no stop ids."""
        return -1

    def search(self, params: SamplingParams, most: int) -> Search:
        """Stepwise only: the search for a new request, of which at most ``most`` tokens are generated."""
        raise NotImplementedError(f"{type(self).__name__} is stepwise and has no search()")
