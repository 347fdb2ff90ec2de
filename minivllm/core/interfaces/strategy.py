"""The decoding strategy seam (plug-in interface): the sequences (branches) of a request, and the choice of its outputs.

The branches of a *free* strategy run independently; the host calls the strategy only when a branch ends.  A *stepwise*
strategy is called after every step, as soon as the log-probabilities of all live branches have arrived.  It chooses
which branches continue, and with which tokens.  A branch may continue several times or not at all.  Continuations share
KV blocks, and only the last block is copied::

    step 1    a                            width 3, one live branch after the prompt
    step 2    a1 a2 a3                     go_on = (0, 1), (0, 2), (0, 3)
    step 3    a24 a27 a31                  go_on = (1, 4), (1, 7), (2, 1): a1 ends, a2 continues twice
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from .params import SamplingParams

API = (1, 4)  # changes: 1.2: ``reads`` is a set of names; 1.3: Spec.params; 1.4: Branch.guide


@dataclass(frozen=True)
class Guide:
    """A second sequence that runs together with a branch (classifier-free guidance).  It has a separate prompt, and
    each token that the branch draws is appended to it too.

    Before processors, masks and sampler run, the logits of the branch become, in float32::

        scale * (log_softmax(branch) - log_softmax(guide)) + log_softmax(guide)
    """

    scale: float
    prompt: Sequence[int] = ()  # token ids; if empty, the last token of the request's prompt
    # name of the sampling parameter that error messages about this guide mention
    param: str = "prompt"


@dataclass(frozen=True)
class Branch:
    """One sequence of a request.  The sample number is an input of the noise, so branches draw different tokens."""

    sample: int
    # for free strategies only; either all branches of a request have a guide, or none
    guide: Guide | None = None


@dataclass(frozen=True)
class BranchEnd:
    """A branch that ended."""

    sample: int
    length: int  # generated tokens
    cumulative_logprob: float | None
    finish_reason: str


@dataclass(frozen=True)
class Grown:
    """A live branch after a step, with the candidates for its next token."""

    length: int  # number of generated tokens, not counting the candidates
    # i32 [m] Candidates for the next token, the likeliest first; of equally likely ones, the lower
    # id comes first.  Stop ids are not among them before ``min_tokens`` tokens.
    tokens: np.ndarray
    logprobs: np.ndarray  # f64 [m] natural logarithms of the candidates' probabilities, finite


@dataclass(frozen=True)
class Pick:
    """One continuation: the index of a live branch in the argument of ``advance``, and one of its candidates."""

    branch: int
    token: int
    score: float = 0.0  # score of the continuation, shown with an output


@dataclass(frozen=True)
class Moves:
    """The result of ``Search.advance``.

    ``go_on`` are the next live branches, at most as many as ``start`` returned.  The next ``advance`` receives them in
    this order.  ``keep`` are ended continuations that may become outputs; they are numbered from 0 over the whole
    search.  The search ends if ``done`` is True or ``go_on`` is empty.
    """

    go_on: Sequence[Pick] = ()
    keep: Sequence[Pick] = ()
    done: bool = False


class Search(ABC):
    """The state of one request of a stepwise strategy."""

    @abstractmethod
    def advance(self, grown: Sequence[Grown], ends: Callable[[int, int], bool]) -> Moves:
        """Choose the next live branches after a step.

        ``ends(branch, token)`` returns whether a branch ends with this candidate (end-of-sequence token, stop token,
        stop string or largest length), so that it cannot continue.
        """

    @abstractmethod
    def result(self) -> Sequence[int]:
        """Return the numbers of kept continuations, best first and without repetitions.  At most ``params.n`` of them
        are shown.

        The engine also calls it if a search is cut short.  Outputs that are missing to n are then taken from the live
        branches.
        """


class DecodingStrategy(ABC):
    """Creates the branches of requests.  It keeps no state, so one instance serves all requests."""

    mode: str = "free"  # or "stepwise"
    #: Names of the parameters that the strategy implements: ``best_of``, ``beam_width``, and parameters that its spec
    #: declares.  The engine does not offer it a request that sets another such parameter.  A request is refused if no
    #: strategy reads its parameters.
    reads: frozenset[str] = frozenset()

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def takes(self, params: SamplingParams) -> bool:
        """Return whether the strategy serves a request with these parameters.  The first configured strategy that
        returns True serves it."""
        return True

    @abstractmethod
    def start(self, params: SamplingParams) -> Sequence[Branch]:
        """Return the branches of a new request.  They share the blocks of the prompt.  RequestError if it cannot be
        served."""

    def result(self, params: SamplingParams, ends: Sequence[BranchEnd]) -> Sequence[int]:
        """Return the sample numbers of the outputs, best first, after every branch ended.  For free strategies only."""
        raise NotImplementedError(f"{type(self).__name__} is free and does not implement result()")

    def topk(self, params: SamplingParams) -> int:
        """Return how many log-probabilities the strategy needs for each token.

        -1 means none, 0 the log-probability of the chosen token (for ``cumulative_logprob``), k also those of the k
        best tokens.  The branches of a stepwise strategy get k candidates that are not stop ids.
        """
        return -1

    def search(self, params: SamplingParams, most: int) -> Search:
        """Return the search for a new request that generates at most ``most`` tokens.  For stepwise strategies only."""
        raise NotImplementedError(
            f"{type(self).__name__} is stepwise and does not implement search()"
        )
