"""Options of the sampler."""

from pydantic import BaseModel, ConfigDict, Field


class SynthIdOptions(BaseModel):
    """Watermarked sampling; the detector needs the same ``key``, ``context`` and ``layers``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: int = Field(0x5EED, ge=-(2**63), lt=2**63, description="The secret: who knows it can detect the watermark.")
    context: int = Field(4, ge=1, le=16, description="Tokens before the one that is drawn that choose its noise.")
    layers: int = Field(30, ge=1, le=32, description="Rounds of the tournament: more are easier to detect.")
    remember: int = Field(1024, ge=1, le=65536, description="Contexts of a sequence that do not mark again.")
    always: bool = Field(False, description="Mark every request, not only those with watermark=true.")
