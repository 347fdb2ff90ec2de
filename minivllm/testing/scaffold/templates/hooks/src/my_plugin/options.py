"""The options of the configuration."""

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    last: int = Field(1000, ge=1, description="Number of last steps in the percentiles.")
