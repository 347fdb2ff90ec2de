"""Options of the back end."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FlexOptions(BaseModel):
    """Attention by FlexAttention."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compile: Literal["auto", "off"] = Field(
        "auto", description="auto compiles the kernel on a GPU; off, and a CPU, spell out the scores of a batch."
    )
