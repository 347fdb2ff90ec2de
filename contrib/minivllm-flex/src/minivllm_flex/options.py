"""Options of the back end."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FlexOptions(BaseModel):
    """Attention by FlexAttention."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="Compile the kernel (auto: on a GPU); off spells out the scores of a batch."
    )
