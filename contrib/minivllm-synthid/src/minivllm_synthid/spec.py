"""The spec of the sampler."""

from minivllm.plugin import ANY, Param, Spec

SYNTHID = Spec(
    impl="minivllm_synthid.sampler:SynthId",
    api=(1, 2),
    summary="temperature, top-k and top-p, with a watermark that a detector finds (SynthID-Text, Nature 2024)",
    options="minivllm_synthid.options:SynthIdOptions",
    limits={"device": ANY},
    features=frozenset({"graph_safe"}),
    params=(Param("watermark", bool, summary="marks the answer; the option `always` says what holds without it"),),
)
