"""Outputs of ``LLM.embed`` and ``LLM.score``, which are objects and dicts at once as those of ``LLM.generate``."""

from __future__ import annotations

from dataclasses import dataclass, field

from .outputs import RequestMetrics, _entries, _OutputRecord


@_entries
@dataclass(eq=False)
class EmbeddingOutput(_OutputRecord):
    """The embedding of one prompt, a list of float32 values.  It is empty if the request failed."""

    _also = ("hidden_size",)

    embedding: list[float] = field(default_factory=list)

    @property
    def hidden_size(self) -> int:
        """Return the number of values of the embedding."""
        return len(self.embedding)


@_entries
@dataclass(eq=False)
class EmbeddingRequestOutput(_OutputRecord):
    """The answer to one prompt of ``LLM.embed``.

    ``error`` is the reason why the request failed, or None.  ``prompt_token_ids`` are the ids after truncation."""

    _also = ("num_cached_tokens",)

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Return the number of prompt tokens found in the prefix cache."""
        return self.metrics.cached_tokens


@_entries
@dataclass(eq=False)
class ScoringOutput(_OutputRecord):
    """The similarity of two texts: the cosine of the angle between their embeddings, from -1 to 1."""

    score: float = 0.0


@_entries
@dataclass(eq=False)
class ScoringRequestOutput(_OutputRecord):
    """The answer to one pair of ``LLM.score``.  ``prompt_token_ids`` are those of both texts, joined."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
