"""The options of the configuration, which hold for all requests."""

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    last: int = Field(16, ge=1, description="Number of last tokens that become less likely.")
