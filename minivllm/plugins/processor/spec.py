"""Describe the built-in processors."""

from functools import partial

from minivllm.registration.spec import ANY, Param, Spec

LONGEST = 64  # n-gram
MOST_PENALTY = 100.0

_FEATURES = frozenset({"graph_safe", "multi_position"})
_processor = partial(Spec, api=(1, 4), limits={"device": ANY}, features=_FEATURES)

ALLOWED_TOKENS = _processor(
    impl="minivllm.plugins.processor.allowed_tokens:AllowedTokens",
    summary="only tokens of a list: allowed_token_ids",
)
BAD_WORDS = _processor(
    impl="minivllm.plugins.processor.bad_words:BadWords",
    summary="sequences of tokens that are never generated",
)
LOGIT_BIAS = _processor(
    impl="minivllm.plugins.processor.logit_bias:LogitBias",
    summary="adds a number to the logits of chosen tokens",
)
_NO_REPEAT_NGRAM_SIZE = Param(
    "no_repeat_ngram_size",
    int,
    0,
    ge=0,
    le=LONGEST,
    wanted=f"0 (off) to {LONGEST}",
    summary="no n tokens in a row of prompt and output occur again; 0 means off",
)
NO_REPEAT_NGRAM = _processor(
    impl="minivllm.plugins.processor.no_repeat_ngram:NoRepeatNgram",
    summary="no n tokens in a row occur twice",
    params=(_NO_REPEAT_NGRAM_SIZE,),
)
PENALTIES = _processor(
    impl="minivllm.plugins.processor.penalties:Penalties",
    summary="repetition, presence and frequency penalties",
)
_ENCODER_REPETITION_PENALTY = Param(
    "encoder_repetition_penalty",
    float,
    1.0,
    ge=1e-6,
    le=MOST_PENALTY,
    wanted=f"at least 1e-6, at most {MOST_PENALTY:g}",
    summary="above 1 the tokens of the prompt become more likely, below 1 less likely; 1 means off",
)
PROMPT_PENALTY = _processor(
    impl="minivllm.plugins.processor.prompt_penalty:PromptPenalty",
    summary="makes the prompt's tokens more likely, or less likely",
    params=(_ENCODER_REPETITION_PENALTY,),
)
_TEMPERATURE_SCHEDULE = Param(
    "temperature_schedule",
    dict,
    wanted="a mapping with a 'kind'",
    summary="a temperature that changes from token to token",
)
TEMPERATURE_SCHEDULE = _processor(
    impl="minivllm.plugins.processor.temperature_schedule:TemperatureSchedule",
    summary="a temperature that changes with the position or the entropy",
    params=(_TEMPERATURE_SCHEDULE,),
)
_THINKING_TOKEN_BUDGET = Param(
    "thinking_token_budget",
    int,
    ge=-1,
    le=2**31 - 1,
    wanted="a whole number from 0, or -1 (no limit)",
    summary="most tokens of reasoning before the end tag is forced; 0 means no reasoning, -1 means no limit",
)
_THINKING_TAGS = Param(
    "thinking_tags",
    dict,
    wanted="a mapping with start, end and answer",
    summary="the tags of reasoning, as texts or token ids; {} means the model's tags",
)
THINKING_BUDGET = _processor(
    impl="minivllm.plugins.processor.thinking_budget:ThinkingBudget",
    summary="ends the reasoning after a number of tokens",
    params=(
        _THINKING_TOKEN_BUDGET,
        _THINKING_TAGS,
    ),
)
