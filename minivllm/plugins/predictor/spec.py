"""Describe the built-in predictors."""

from minivllm.registration.spec import Spec

_HERE = "minivllm.plugins.predictor"

NONE = Spec(
    impl=f"{_HERE}.lengths:NoPredictor",
    api=(1, 0),
    summary="predicts nothing; requests are planned with expected_tokens, or their limit",
    priority=10,
)
ORACLE = Spec(
    impl=f"{_HERE}.lengths:Oracle",
    api=(1, 0),
    summary="the true length of a trace's answers times log-normal noise, for simulations",
    options=f"{_HERE}.options:OracleOptions",
)
PROMPT = Spec(
    impl=f"{_HERE}.lengths:PromptFeatures",
    api=(1, 0),
    summary="a regression on features of the prompt, learned while the engine serves",
    options=f"{_HERE}.options:PromptOptions",
)
HISTORY = Spec(
    impl=f"{_HERE}.lengths:ClientHistory",
    api=(1, 0),
    summary="the mean length of the client's earlier answers",
    options=f"{_HERE}.options:HistoryOptions",
)
