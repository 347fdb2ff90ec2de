"""The decoding strategy seam: how many sequences a request becomes, and which of them are its answer.

The strategies here are *free*: their branches run by themselves and the host is asked only when one ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.core.request import SamplingParams

API = (1, 0)


@dataclass(frozen=True)
class Branch:
    """One sequence of a request: its sample number goes into the noise, so branches draw differently."""

    sample: int


@dataclass(frozen=True)
class BranchEnd:
    """A branch that ended, as the strategy sees it."""

    sample: int
    length: int  # generated tokens
    cumulative_logprob: float | None
    finish_reason: str


class DecodingStrategy(ABC):
    """Stateless: one instance serves all requests."""

    mode: str = "free"

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def takes(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters is its own; the first strategy in the config that says so has it."""
        return True

    @abstractmethod
    def start(self, params: SamplingParams) -> Sequence[Branch]:
        """The branches of a new request; they share the prompt's blocks.  RequestError if it cannot serve them."""

    @abstractmethod
    def result(self, params: SamplingParams, ends: Sequence[BranchEnd]) -> Sequence[int]:
        """Sample numbers of the answer, best first, once every branch has ended."""
