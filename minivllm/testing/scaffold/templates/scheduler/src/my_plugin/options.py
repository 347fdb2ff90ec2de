"""Options: what the configuration sets."""

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    ageing: float = Field(100.0, gt=0, description="Tokens of work that a second of waiting is worth.")
