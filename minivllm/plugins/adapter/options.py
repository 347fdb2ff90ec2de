"""Options of the built-in adapter methods."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SteeringOptions(BaseModel):
    """The options of ``steering``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    points: list[str] = Field(
        ["embedding", "layers.*.residual"],
        min_length=1,
        description="Tap points at which adapters may add vectors, with * for any text; each has memory on the device.",
    )
