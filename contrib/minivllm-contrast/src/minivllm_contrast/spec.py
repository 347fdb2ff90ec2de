"""The spec of the processor."""

from minivllm.plugin import ANY, Param, Spec

CONTRAST = Spec(
    impl="minivllm_contrast.processor:Contrast",
    api=(1, 4),
    summary="contrastive decoding: what the model likes and a smaller one does not",
    options="minivllm_contrast.options:ContrastOptions",
    limits={"device": ANY},
    features=frozenset({"own_model"}),
    params=(
        Param("contrast_beta", float, ge=0, le=100, summary="weight of the smaller model; 0: only the limit below"),
        Param(
            "contrast_alpha",
            float,
            gt=0,
            le=1,
            wanted="a number in (0, 1]",
            summary="tokens that are less likely than this times the likeliest never come",
        ),
    ),
)
