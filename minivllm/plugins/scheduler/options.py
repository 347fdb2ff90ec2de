"""Options of the policies in this folder."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

CLOSED = ConfigDict(extra="forbid", frozen=True)


class AdaptiveOptions(BaseModel):
    """Options of the policy ``adaptive``: the longest time, in seconds and as a share of a target for the first token,
    for which new requests are held back to be admitted together.
    """

    model_config = CLOSED

    max_hold: float = Field(0.1, ge=0, le=10, description="Seconds that the oldest newcomer is held back at most.")
    ttft_share: float = Field(
        0.25, ge=0, le=1, description="Share of the tightest target of late for a first token that may be spent so."
    )
    default_ttft_ms: float | None = Field(
        None, gt=0, le=1e9, description="Target of a request without ttft_ms; none: it bears max_hold."
    )


class PriorityOptions(BaseModel):
    """Options of the policy ``priority``: how fast waiting raises a priority, its range, and the lead that preempts a
    row.
    """

    model_config = CLOSED

    ageing: float = Field(
        30.0, gt=0, le=1e6, description="Seconds of waiting that are worth one level of priority; large is strict."
    )
    levels: int = Field(10, ge=1, le=1000, description="A priority counts as at most this, and at least minus this.")
    preempt: float | None = Field(
        None,
        gt=0,
        le=2000,
        description="Levels, with ageing, by which a waiting request must precede a running one to preempt it; none: "
        "it waits.",
    )


class ShortestJobOptions(BaseModel):
    """Options of the policy ``shortest-job``: the delay for each expected token, or for each expected second, and the
    longest delay of a request.
    """

    model_config = CLOSED

    seconds_per_token: float = Field(
        0.25, gt=0, description="Seconds that a request is put back for each output token expected of it."
    )
    prefill_cost: float = Field(0.02, ge=0, description="Cost of a token of the prompt, in output tokens.")
    max_wait: float = Field(
        300.0, gt=0, le=1e6, description="No request is put back by more seconds than this, however long it is."
    )
    ageing: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Put a request back by this many times its own seconds, as the predictor expects them, in place of "
        "seconds_per_token (none: do not; also while the predictor expects no times).",
    )


class DeadlineOptions(BaseModel):
    """Options of the policy ``deadline``: default target, speeds of prefill and decode, longest wait, preemption, and
    the prompt tokens that are always allowed in a step.
    """

    model_config = CLOSED

    default_ttft_ms: float = Field(10_000.0, gt=0, le=1e9, description="Target of a request without ttft_ms.")
    prefill_rate: float = Field(
        20_000.0, gt=0, description="Prompt tokens per second: when a request has to start to be in time."
    )
    decode_rate: float = Field(
        50.0, gt=0, description="Output tokens per second of a request: when an answer with a deadline has to start."
    )
    max_wait: float = Field(
        30.0, ge=0, le=1e6, description="Seconds of waiting after which a request goes first, in time or not."
    )
    preempt: bool = Field(
        False,
        description="Whether a request that can still be in time preempts the row whose next token is due last.",
    )
    min_chunk: int = Field(
        64, ge=1, description="Prompt tokens that a step may always hold, however late running requests are."
    )


class PrefixAwareOptions(BaseModel):
    """Options of the policy ``prefix-aware``: after how many seconds of waiting a request precedes all others."""

    model_config = CLOSED

    max_wait: float = Field(10.0, ge=0, le=1e6, description="Seconds of waiting after which a request goes first.")


class FairOptions(BaseModel):
    """Options of the policy ``fair``: how much service a prompt token and a generated token count, and the longest
    wait.
    """

    model_config = CLOSED

    input_cost: float = Field(1.0, ge=0, description="Service that a token of a prompt counts as.")
    output_cost: float = Field(2.0, gt=0, description="Service that a generated token counts as.")
    max_wait: float = Field(
        300.0, gt=0, le=1e6, description="Seconds of waiting after which a request goes first, so that nobody starves."
    )


class PrefillFirstOptions(BaseModel):
    """Options of the policy ``prefill-first``: when a prefill phase begins, and which prompts one step may contain."""

    model_config = CLOSED

    batch: int = Field(1, ge=1, description="Wait for this many newcomers before a prefill phase begins.")
    max_hold: float = Field(
        0.05, ge=0, le=10, description="Seconds that the oldest newcomer waits for others at most, while batch > 1."
    )
    ratio: float = Field(
        2.0, gt=1, description="Newcomers of one step have prompts whose lengths differ by less than this factor."
    )
    prefill_cap: int | None = Field(None, ge=1, description="Prompt tokens of a step at most; none: the token budget.")


class StaticOptions(BaseModel):
    """Options of the policy ``static``: the number of sequences in a batch, and how long a batch waits to fill."""

    model_config = CLOSED

    batch: int | None = Field(None, ge=1, description="Sequences in a batch; none: max_num_seqs.")
    max_hold: float = Field(
        0.05, ge=0, le=10, description="Seconds that the oldest waits for a batch to fill before it starts as it is."
    )
