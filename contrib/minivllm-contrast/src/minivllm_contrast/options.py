"""Options of the processor."""

from pydantic import BaseModel, ConfigDict, Field


class ContrastOptions(BaseModel):
    """The smaller model, and the value of each of the two parameters for requests that set only the other one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        "pocket-draft",
        min_length=1,
        description="The smaller model, with the tokenizer of the model: a directory, or a Hugging Face id.",
    )
    revision: str | None = Field(
        None, min_length=1, description="Of a model that is a Hugging Face id: a branch, a tag or a commit."
    )
    beta: float = Field(0.5, ge=0, le=100, description="contrast_beta of a request that sets contrast_alpha alone.")
    alpha: float = Field(0.1, gt=0, le=1, description="contrast_alpha of a request that sets contrast_beta alone.")
