"""Options of the built-in drafters."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class NGramOptions(BaseModel):
    """Options of the drafter ``ngram`` (prompt lookup): the least and the largest number of tokens that must match."""

    model_config = ConfigDict(extra="forbid")

    prompt_lookup_max: int = Field(4, ge=1, le=32, description="tokens that are compared at most")
    prompt_lookup_min: int = Field(2, ge=1, le=32, description="tokens that must be equal")

    @model_validator(mode="after")
    def _in_order(self) -> NGramOptions:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            most = self.prompt_lookup_max
            raise ValueError(f"prompt_lookup_min={self.prompt_lookup_min}: expected at most prompt_lookup_max={most}")
        return self


class SuffixOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    min_match: int = Field(2, ge=1, le=64, description="tokens that must be equal")
    max_match: int = Field(32, ge=1, le=64, description="tokens that are compared at most")
    min_share: float = Field(
        0.2, ge=0, le=1, description="share of the matching places that must continue with the drafts"
    )
    drafts_per_match: float = Field(2.0, gt=0, le=64, description="drafts for each matching token, at most")
    kept_tokens: int = Field(
        65536, ge=0, le=1 << 24, description="tokens of earlier outputs that are kept; 0 uses the row's own tokens only"
    )

    @model_validator(mode="after")
    def _in_order(self) -> SuffixOptions:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match={self.min_match}: expected at most max_match={self.max_match}")
        return self


class ModelOptions(BaseModel):
    """The draft model."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(
        "pocket-draft", min_length=1, description="a directory, a Hugging Face id, pocket or pocket-draft"
    )
    revision: str | None = Field(
        None, min_length=1, description="of a model that is a Hugging Face id: a branch, a tag or a commit"
    )


class HeadOptions(BaseModel):
    """Options of a head whose files are separate from the model's."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("", description="directory or Hugging Face id of the head; pocket-mtp is the head of pocket")
    revision: str | None = Field(
        None, min_length=1, description="of a head that is a Hugging Face id: a branch, a tag or a commit"
    )
