"""The spec of the compressor."""

from minivllm.plugin import ANY, Needs, Spec

KVPRESS = Spec(
    impl="minivllm_kvpress.compressor:PressCompressor",
    api=(1, 0),
    summary="tokens that a press of the package kvpress scores highest stay",
    options="minivllm_kvpress.options:PressOptions",
    limits={"device": ANY},
    needs=(Needs("kvpress", "0.5.5", "pip install 'kvpress>=0.5.5'"),),
)
