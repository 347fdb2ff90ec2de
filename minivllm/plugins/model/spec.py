"""Specs of the built-in model architectures."""

from collections.abc import Mapping
from typing import Any

from minivllm.device.native import library
from minivllm.registration.spec import ANY, Needs, PluginQuery, Reason, Spec

# transformers computes ``layer_types`` from these fields, and ``layer_types`` is read
WINDOWS = ("use_sliding_window", "max_window_layers")
# model type -> fields of transformers' config class that have no effect, in addition to those that every model ignores
IGNORED: Mapping[str, tuple[str, ...]] = {
    "bloom": ("pretraining_tp", "slow_but_exact"),
    "gemma3_text": ("attn_logit_softcapping",),
    # the softmax is always in float32, so that reorder_and_upcast_attn has no effect
    "gpt2": (
        "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout",
    ),
    # transformers computes ``attention_layers`` from attention_types, and ``attention_layers`` is read
    "gpt_neo": ("attention_types", "resid_dropout", "embed_dropout", "classifier_dropout"),
    "gpt_oss": ("hidden_act",),
    "lfm2": ("full_attn_idxs",),
    "llama": ("pretraining_tp",),
    "mixtral": ("router_jitter_noise",),
    "mpt": ("max_seq_len", "learned_pos_emb", "init_device", "embedding_fraction", "norm_type", "emb_pdrop"),
    "opt": ("dropout", "init_std", "layerdrop"),
    "phi3": ("original_max_position_embeddings",),
    "qwen2": WINDOWS,
    "qwen2_moe": WINDOWS,
    "qwen3": WINDOWS,
    "qwen3_moe": ("use_sliding_window",),
    "smollm3": ("use_sliding_window", "no_rope_layer_interval"),
    "starcoder2": ("embedding_dropout",),
}  # fmt: skip


def invariant_states(query: PluginQuery) -> list[Reason]:
    """Return a reason to refuse batch invariance for gated delta nets: on a CPU it needs the native library, which is
    missing.
    """
    if "batch_invariant" not in query.features or query.facts.get("device") != "cpu" or library.load() is not None:
        return []
    fix = f"remove batch_invariant: the native part of minivllm is missing ({library.why_not()})"
    return [Reason("device with batch_invariant", "cpu", "{cuda}", fix)]


def family(target: str, summary: str, architecture: str, model_type: str) -> Spec:
    """Return the spec of a model family.

    ``target`` is the module and the class of the plug-in.  ``architecture`` is its name in config.json, and
    ``model_type`` that of transformers' config class.
    """
    limits: dict[str, Any] = {"architecture": {architecture}, "model_type": {model_type}}
    limits |= {"device": ANY, "dtype": ANY}
    return Spec(
        impl=f"minivllm.plugins.model.{target}",
        api=(2, 8),
        summary=summary,
        limits=limits,
        features=frozenset({"batch_invariant"}),  # all layers of the families support it
        traits={"ignores": IGNORED.get(model_type, ())},
        check=invariant_states if target.startswith("qwen3_5:") else None,
    )


BLOOM = family("bloom:Bloom", "BLOOM and BLOOMZ", "BloomForCausalLM", "bloom")
COHERE = family("cohere:Cohere", "Command R", "CohereForCausalLM", "cohere")
COHERE2 = family("cohere:Cohere2", "Command R7B and A", "Cohere2ForCausalLM", "cohere2")
FALCON = family("falcon:Falcon", "Falcon 1", "FalconForCausalLM", "falcon")
GEMMA2 = family("gemma:Gemma2", "Gemma 2", "Gemma2ForCausalLM", "gemma2")
GEMMA3 = family("gemma:Gemma3", "Gemma 3, text", "Gemma3ForCausalLM", "gemma3_text")
GLM4 = family("glm4:Glm4", "GLM-4-0414 and GLM-Z1", "Glm4ForCausalLM", "glm4")
GPT2 = family("gpt2:GPT2", "GPT-2", "GPT2LMHeadModel", "gpt2")
GPT_NEO = family("gpt_neo:GPTNeo", "GPT-Neo", "GPTNeoForCausalLM", "gpt_neo")
GPT_OSS = family("gpt_oss:GptOss", "GPT-OSS", "GptOssForCausalLM", "gpt_oss")
GRANITE = family("granite:Granite", "Granite 3", "GraniteForCausalLM", "granite")
LFM2 = family("lfm2:Lfm2", "LFM2, text", "Lfm2ForCausalLM", "lfm2")
LFM2_MOE = family("lfm2:Lfm2Moe", "LFM2, mixture of experts, text", "Lfm2MoeForCausalLM", "lfm2_moe")
LLAMA = family("llama:Llama", "Llama 2 and 3", "LlamaForCausalLM", "llama")
MINISTRAL3 = family("mistral:Ministral3", "Ministral 3", "Ministral3ForCausalLM", "ministral3")
MISTRAL = family("mistral:Mistral", "Mistral and Nemo", "MistralForCausalLM", "mistral")
MIXTRAL = family("mixtral:Mixtral", "Mixtral", "MixtralForCausalLM", "mixtral")
MPT = family("mpt:Mpt", "MPT", "MptForCausalLM", "mpt")
OLMO2 = family("olmo:Olmo2", "OLMo 2", "Olmo2ForCausalLM", "olmo2")
OLMO3 = family("olmo:Olmo3", "OLMo 3", "Olmo3ForCausalLM", "olmo3")
OPT = family("opt:OPT", "OPT with norms before", "OPTForCausalLM", "opt")
PHI3 = family("phi3:Phi3", "Phi 3 and 4", "Phi3ForCausalLM", "phi3")
QWEN2 = family("qwen2:Qwen2", "Qwen 2 and 2.5", "Qwen2ForCausalLM", "qwen2")
QWEN2_MOE = family("qwen2_moe:Qwen2Moe", "Qwen 1.5 and 2, mixture of experts", "Qwen2MoeForCausalLM", "qwen2_moe")
QWEN3 = family("qwen3:Qwen3", "Qwen 3, dense; pocket is one", "Qwen3ForCausalLM", "qwen3")
QWEN3_MOE = family("qwen3_moe:Qwen3Moe", "Qwen 3, mixture of experts", "Qwen3MoeForCausalLM", "qwen3_moe")
QWEN3_5 = family("qwen3_5:Qwen35", "Qwen 3.5, dense, text", "Qwen3_5ForCausalLM", "qwen3_5_text")
QWEN3_5_MOE = family(
    "qwen3_5:Qwen35Moe", "Qwen 3.5, mixture of experts, text", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"
)
QWEN3_NEXT = family("qwen3_5:Qwen3Next", "Qwen 3 Next", "Qwen3NextForCausalLM", "qwen3_next")
SMOLLM3 = family("smollm3:SmolLM3", "SmolLM 3", "SmolLM3ForCausalLM", "smollm3")
STABLELM = family("stablelm:StableLm", "StableLM 2", "StableLmForCausalLM", "stablelm")
STARCODER2 = family("starcoder2:Starcoder2", "StarCoder 2", "Starcoder2ForCausalLM", "starcoder2")


def _requested_for_any(query: PluginQuery) -> list[Reason]:
    """Return a reason not to choose this plug-in while plug-ins that name the architecture are considered."""
    if "architecture" not in query.facts or "any_architecture" in query.features:
        return []
    return [Reason("is used if no other plug-in serves the architecture", fix="or always with model_impl=transformers")]


TRANSFORMERS = Spec(
    impl="minivllm.plugins.model.fallback.arch:TransformersArch",
    api=(2, 8),
    summary="Any other causal language model of transformers, with the engine's attention and layers inside",
    limits={"architecture": ANY, "model_type": ANY, "device": ANY, "dtype": ANY},
    features=frozenset({"any_architecture"}),
    needs=(Needs("transformers", "5.17", "pip install -U transformers"),),
    check=_requested_for_any,
)
