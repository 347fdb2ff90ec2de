"""Options of the evictors in this folder."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PrefixDepthOptions(BaseModel):
    """Options of the evictor ``prefix-depth``: the number of blocks whose depths count as equal."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    band: int = Field(1, ge=1, description="Blocks; depths within a band count as equal, and recency decides.")


class S3FifoOptions(BaseModel):
    """Options of the evictor ``s3fifo``: the share of the small queue, and the hits that move a block to the main
    queue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    small: float = Field(0.1, gt=0, lt=1, description="Share of the cache for blocks on probation.")
    promote_after: int = Field(2, ge=1, le=3, description="Hits in the small queue that lead to the main one.")


class TailLruOptions(BaseModel):
    """The defaults for sessions whose clients do not send ``budget`` or ``prompt``, in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: int = Field(0, ge=0, description="Tokens that a session's next request may compute before it is late.")
    prompt: int = Field(200, ge=0, description="Tokens that the next request of a session is expected to add.")


class AgentTtlOptions(BaseModel):
    """How long the blocks of a session stay after a turn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slack: float = Field(3.0, gt=0, le=1000, description="Time to live, in times the expected time to the next turn.")
    longest: float = Field(300.0, gt=0, le=1e6, description="Seconds; the longest time to live.")


class CostAwareOptions(BaseModel):
    """Options of the evictor ``cost-aware``: how fast the value of a block falls, and for how many evicted keys hits
    are kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    horizon: float = Field(2.0, gt=0, le=100, description="Worth fades by e in so many times the cache's blocks.")
    ghosts: float = Field(1.0, ge=0, le=16, description="Keys to remember, in times the cache's blocks.")
