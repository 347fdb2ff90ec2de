"""Options of the routers in this folder."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PrefixOptions(BaseModel):
    """The options of the router ``prefix``: the costs of waiting tokens and running requests, and the keys that it
    remembers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    balance: float = Field(
        0.1, ge=0, le=100, description="Cost of a waiting token, in tokens that have to be computed; 0: no load."
    )
    spread: float = Field(
        32.0, ge=0, le=65536, description="Cost of a running request, in tokens that have to be computed."
    )
    remember: float = Field(
        1.0, gt=0, le=16, description="Keys to remember of each replica, in times the blocks of its cache."
    )


class SessionOptions(BaseModel):
    """The options of the router ``session``: the number of sessions that it remembers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sessions: int = Field(16384, ge=1, description="Sessions to remember; the one used longest ago is forgotten.")
