"""The options of the configuration."""

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    ageing: float = Field(100.0, gt=0, description="Tokens of work that count like a second of waiting.")
