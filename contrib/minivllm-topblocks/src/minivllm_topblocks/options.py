"""Options of the back end."""

from pydantic import BaseModel, ConfigDict, Field


class TopBlocksOptions(BaseModel):
    """Attention to the best blocks of a context."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    blocks: int = Field(16, ge=2, description="blocks of the context that a row which decodes attends to")
