"""Options of the attention back end and of the executor."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AcceleratorOptions(BaseModel):
    """The device that runs the steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["accelerator", "reference"] = Field(
        "accelerator",
        description="accelerator calls the functions of device.py; reference calls those of reference.py, on the CPU.",
    )
