"""Options of the built-in attention back ends."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FlashInferOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prefill: Literal["fa2", "fa3"] = Field(
        "fa2", description="kernels for rows of several tokens: fa2, or fa3, which takes minutes to compile"
    )


class TritonOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    hopper: Literal["auto", "off"] = Field(
        "auto",
        description="the kernel for long rows on compute capability 9.0: auto uses it where it was faster, off never",
    )
    shared_prefixes: Literal["auto", "always", "off"] = Field(
        "auto",
        description="read a prefix that decoding rows share once for all of them: in steps where that saves time, in "
        "each step with a shared prefix, or never",
    )
