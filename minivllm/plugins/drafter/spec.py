"""Describe the built-in drafters."""

from functools import partial

from minivllm.registration.spec import ANY, Spec

HERE = "minivllm.plugins.drafter"
GRAPH_SAFE = frozenset({"graph_safe"})
TARGET_HEAD = GRAPH_SAFE | {"target_head"}
_drafter = partial(Spec, api=(1, 3), limits={"device": ANY})

NONE = _drafter(
    impl=f"{HERE}.none:NoDrafts",
    summary="no drafts: every step generates one token of a row",
    priority=10,
    traits={"drafts": 0},
)
NGRAM = _drafter(
    impl=f"{HERE}.ngram:NGram",
    summary="prompt lookup: propose the tokens that followed an earlier occurrence of the last tokens",
    options=f"{HERE}.options:NGramOptions",
    features=GRAPH_SAFE,
)
MODEL = _drafter(
    impl=f"{HERE}.model:ModelDrafter",
    summary="a smaller model with the same tokenizer proposes tokens",
    options=f"{HERE}.options:ModelOptions",
    features=GRAPH_SAFE | {"draft_model"},
)
MTP = _drafter(
    impl=f"{HERE}.mtp:MTP",
    summary="the checkpoint's own head for next-token prediction proposes tokens",
    options=f"{HERE}.options:HeadOptions",
    features=TARGET_HEAD,
)
EAGLE3 = _drafter(
    impl=f"{HERE}.eagle3:Eagle3",
    summary="a separate EAGLE-3 head, which reads hidden states of three layers, proposes tokens",
    options=f"{HERE}.options:HeadOptions",
    features=TARGET_HEAD,
)
SUFFIX = _drafter(
    impl=f"{HERE}.suffix:Suffix",
    summary="what followed the longest end of the text, in it and in earlier outputs",
    options=f"{HERE}.options:SuffixOptions",
    features=frozenset({"host_tokens"}),
)
