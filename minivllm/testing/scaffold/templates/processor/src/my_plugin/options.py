"""Options: what the configuration sets, for all requests."""

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    last: int = Field(16, ge=1, description="How many of the last tokens are made less likely.")
