"""What the built-in processors say about themselves."""

from minivllm.registration.spec import ANY, Param, Spec

LONGEST = 64  # n-gram
MOST_PENALTY = 100.0

ALLOWED_TOKENS = Spec(
    impl="minivllm.plugins.processor.allowed_tokens:AllowedTokens",
    api=(1, 4),
    summary="only tokens of a list: allowed_token_ids",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
)
BAD_WORDS = Spec(
    impl="minivllm.plugins.processor.bad_words:BadWords",
    api=(1, 4),
    summary="sequences of tokens that must not come",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
)
LOGIT_BIAS = Spec(
    impl="minivllm.plugins.processor.logit_bias:LogitBias",
    api=(1, 4),
    summary="adds a number to the logits of chosen tokens",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
)
NO_REPEAT_NGRAM = Spec(
    impl="minivllm.plugins.processor.no_repeat_ngram:NoRepeatNgram",
    api=(1, 4),
    summary="no n tokens in a row come twice",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
    params=(
        Param(
            "no_repeat_ngram_size",
            int,
            0,
            ge=0,
            le=LONGEST,
            wanted=f"0 (off) to {LONGEST}",
            summary="n: no n tokens in a row of prompt and output come again; 0: off",
        ),
    ),
)
PENALTIES = Spec(
    impl="minivllm.plugins.processor.penalties:Penalties",
    api=(1, 4),
    summary="repetition, presence and frequency penalties",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
)
PROMPT_PENALTY = Spec(
    impl="minivllm.plugins.processor.prompt_penalty:PromptPenalty",
    api=(1, 4),
    summary="makes the prompt's tokens likelier, or less likely",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
    params=(
        Param(
            "encoder_repetition_penalty",
            float,
            1.0,
            ge=1e-6,
            le=MOST_PENALTY,
            wanted=f"at least 1e-6, at most {MOST_PENALTY:g}",
            summary="above 1 the tokens of the prompt become likelier, below 1 less likely; 1: off",
        ),
    ),
)
TEMPERATURE_SCHEDULE = Spec(
    impl="minivllm.plugins.processor.temperature_schedule:TemperatureSchedule",
    api=(1, 4),
    summary="a temperature that changes with the position or the entropy",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
    params=(
        Param(
            "temperature_schedule",
            dict,
            wanted="a mapping with a 'kind'",
            summary="a temperature that changes from token to token",
        ),
    ),
)
THINKING_BUDGET = Spec(
    impl="minivllm.plugins.processor.thinking_budget:ThinkingBudget",
    api=(1, 4),
    summary="ends the reasoning after a number of tokens",
    limits={"device": ANY},
    features=frozenset({"graph_safe", "multi_position"}),
    params=(
        Param(
            "thinking_token_budget",
            int,
            ge=-1,
            le=2**31 - 1,
            wanted="a whole number from 0, or -1 (no limit)",
            summary="most tokens of reasoning, before the end tag is forced; 0: no reasoning; -1: no limit",
        ),
        Param(
            "thinking_tags",
            dict,
            wanted="a mapping with start, end and answer",
            summary="the tags of reasoning, as texts or token ids; {}: those of the model",
        ),
    ),
)
