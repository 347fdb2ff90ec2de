"""Options of the compressor."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class PressOptions(BaseModel):
    """The options of ``kvpress``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    press: str = Field("KnormPress", description="Class of kvpress, or module:Class for a press of your own.")
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of this class.")
    window: int | None = Field(
        None,
        ge=0,
        le=256,
        description="Last tokens whose attention the press reads; None is that of the press, 0 for one of your own.",
    )
