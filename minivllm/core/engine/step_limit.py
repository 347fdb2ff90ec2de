"""The largest number of tokens of a step for which a GPU does not wait for the launches of kernels.

Captured steps need one launch.  A longer step of a small model takes the host longer to launch than the device to run,
so two captured steps are faster than one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Capacity

    from .request import Request


class StepLimit:
    """Limits the tokens of a step to those of the largest captured step, while all unfinished requests can run in
    captured steps."""

    def __init__(self, tokens: int) -> None:
        """Set the limit to ``tokens`` tokens per step; 0 means no limit."""
        self.tokens = tokens
        # count of unfinished requests whose prompts cannot run in captured steps
        self._launched: set[str] = set()

    @classmethod
    def of(cls, capacity: Capacity, max_num_seqs: int) -> StepLimit:
        """Return the limit for an executor: the tokens of its largest captured step, but at least ``max_num_seqs``, so
        that every row can have a token.  An executor without captured steps has no limit."""
        return cls(max(capacity.step_tokens, max_num_seqs) if capacity.step_tokens else 0)

    def enter(self, request: Request) -> None:
        """Count a new request if its prompt cannot run in captured steps."""
        if self.tokens and runs_launched(request):
            self._launched.add(request.id)

    def leave(self, request: Request) -> None:
        """Remove a finished request from the count."""
        self._launched.discard(request.id)

    def most(self, decodes: int, budget: int) -> int:
        """Return the largest number of prompt tokens of a step with ``decodes`` decoding rows.

        Without a limit it is ``budget``.  A prompt receives at least one token.
        """
        if not self.tokens or self._launched:
            return budget
        return max(self.tokens - decodes, 1)


def runs_launched(request: Request) -> bool:
    """Return whether steps with the prompt of a request run as separate launches, because no capture can serve them."""
    tapped = request.tapped
    return (
        request.params.prompt_logprobs is not None
        or (tapped is not None and bool(tapped.read))
        or request.pooling is not None
        or request.observed > 0
        or request.adapter is not None
        or bool(request.images)
    )
