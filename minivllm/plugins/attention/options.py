"""Options of the built-in attention back ends."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FlashInferOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prefill: Literal["fa2", "fa3"] = Field(
        "fa2", description="kernels for rows of several tokens: fa2, or fa3, which takes minutes to compile"
    )
