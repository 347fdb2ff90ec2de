"""What the built-in drafters say about themselves."""

from minivllm.registration.spec import ANY, Spec

HERE = "minivllm.plugins.drafter"

NONE = Spec(
    impl=f"{HERE}.none:NoDrafts",
    api=(1, 1),
    summary="no drafts: every step gives a row one token",
    priority=10,
    limits={"device": ANY},
    traits={"drafts": 0},
)
NGRAM = Spec(
    impl=f"{HERE}.ngram:NGram",
    api=(1, 1),
    summary="prompt lookup: what followed when the last tokens were there before",
    options=f"{HERE}.options:NGramOptions",
    limits={"device": ANY},
)
MODEL = Spec(
    impl=f"{HERE}.model:ModelDrafter",
    api=(1, 1),
    summary="a smaller model with the same tokenizer guesses",
    options=f"{HERE}.options:ModelOptions",
    limits={"device": ANY},
    features=frozenset({"draft_model"}),
)
SUFFIX = Spec(
    impl=f"{HERE}.suffix:Suffix",
    api=(1, 1),
    summary="what followed the longest end of the text, in it and in earlier outputs",
    options=f"{HERE}.options:SuffixOptions",
    limits={"device": ANY},
    features=frozenset({"host_tokens"}),
)
