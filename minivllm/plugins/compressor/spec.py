"""Describe the built-in compressors."""

from minivllm.registration.spec import ANY, Param, Spec

HERE = "minivllm.plugins.compressor."
API = (1, 2)
DEVICES = {"device": ANY}
KV_BUDGET = Param(
    "kv_budget",
    float,
    None,
    ge=0.0,
    wanted="tokens, or a share of the prompt below 1; 0 means no compression",
    summary="tokens that stay in the KV cache when the request is compressed",
)


def _scorer(target: str, summary: str, options: str = "") -> Spec:
    """Return the spec of a compressor of this package, whose requests may have a budget."""
    impl = HERE + target
    path = HERE + options if options else ""
    params = (KV_BUDGET,)
    return Spec(impl, API, summary, path, limits=DEVICES, params=params)


NONE = Spec(
    impl="minivllm.plugins.compressor.none:NoCompression",
    api=API,
    summary="no compression: every token stays in the KV cache",
    priority=10,
    limits=DEVICES,
)
STREAMING = _scorer("keys:Streaming", "the first tokens and the newest ones stay", "options:StreamingOptions")
KNORM = _scorer("keys:KNorm", "keys with a small norm stay")
KEYDIFF = _scorer("keys:KeyDiff", "keys that differ from the mean of all keys stay")
RANDOM = _scorer("keys:Random", "random tokens stay: the control of an experiment")
_SNAPKV = "tokens to which the last tokens of the prompt attend stay"
SNAPKV = _scorer("attention_weights:SnapKV", _SNAPKV, "options:SnapKVOptions")
TOVA = _scorer("attention_weights:Tova", "tokens to which the newest token attends stay")
_H2O = "tokens that got most attention from the whole prompt stay, and the newest ones"
H2O = _scorer("attention_weights:H2O", _H2O, "options:H2OOptions")
_RKV = "tokens that are attended to and not redundant stay, for long outputs"
RKV = _scorer("attention_weights:RKV", _RKV, "options:RKVOptions")
