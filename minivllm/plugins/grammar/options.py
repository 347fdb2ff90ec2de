"""Options of the grammar plug-ins."""

from pydantic import BaseModel, ConfigDict, Field


class GrammarOptions(BaseModel):
    """Options of both grammar libraries."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: int = Field(0, ge=0, le=256, description="that fill masks at most; 0: the cores but two, at most 16")
