"""Options of the built-in predictors."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

CLOSED = ConfigDict(extra="forbid", frozen=True)


class OracleOptions(BaseModel):
    """The options of ``Oracle``: the noise that is added to known lengths."""

    model_config = CLOSED

    noise: float = Field(
        0.0, ge=0, le=10, description="Standard deviation of the natural logarithm of predicted over true length."
    )


class PromptOptions(BaseModel):
    """The options of ``PromptFeatures``: how fast old answers lose weight."""

    model_config = CLOSED

    forget: float = Field(
        0.999, gt=0.5, le=1, description="Weight of all earlier answers when a new one is learned; 1 forgets nothing."
    )


class HistoryOptions(BaseModel):
    """The options of ``ClientHistory``: the weight of the newest answer of a client, and the number of clients."""

    model_config = CLOSED

    weight: float = Field(0.2, gt=0, le=1, description="Weight of the newest answer of a client in its mean.")
    most_clients: int = Field(
        512, ge=1, le=1_000_000, description="Clients that are kept; the one whose answer is oldest is dropped."
    )
