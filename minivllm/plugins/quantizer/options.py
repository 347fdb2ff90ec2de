"""Options of the quantizers in this folder."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Int8Options(BaseModel):
    """Weight-only int8, one symmetric scale per output channel."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    skip: list[str] = Field(
        default_factory=list,
        description='Modules to leave unquantized, as shell patterns over their names: "layers.0.*", "*.mlp.down".',
    )
    lm_head: bool = Field(default=False, description="Quantize the output head too; a tied one gets its own int8 copy.")
