"""Options of the policy."""

from pydantic import BaseModel, ConfigDict, Field


class SrptOptions(BaseModel):
    """Shortest remaining predicted time first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_wait: float = Field(30.0, gt=0, description="Seconds after which a request goes before all that wait less.")
    prefill_cost: float = Field(
        0.02, ge=0, description="Cost of computing a token of the prompt, in tokens that are generated."
    )
    learn: bool = Field(True, description="Learn how long answers are, by tenant and length of the prompt.")
    least_seen: int = Field(8, ge=1, description="Answers of a kind to have seen before what was learned counts.")
    preemptible: float = Field(
        0.8, ge=0, le=1, description="Share of its predicted output after which a request is not preempted any more."
    )
