"""What the built-in model architectures say about themselves."""

from minivllm.spec import ANY, Spec

WINDOWS = ("use_sliding_window", "max_window_layers")  # transformers makes ``layer_types`` of them, which is read


def family(target: str, summary: str, architecture: str, model_type: str, ignores: tuple[str, ...] = ()) -> Spec:
    """``architecture`` is what config.json calls it, ``model_type`` names transformers' config class; ``ignores`` are
    fields of that class which change nothing."""
    return Spec(
        impl=f"minivllm.plugins.model.{target}",
        api=(2, 1),
        summary=summary,
        limits={"architecture": {architecture}, "model_type": {model_type}, "device": ANY, "dtype": ANY},
        features=frozenset({"batch_invariant"}),  # made of the layers it is given
        traits={"ignores": ignores},
    )


COHERE = family("cohere:Cohere", "Command R", "CohereForCausalLM", "cohere")
COHERE2 = family("cohere:Cohere2", "Command R7B and A", "Cohere2ForCausalLM", "cohere2")
GEMMA2 = family("gemma:Gemma2", "Gemma 2", "Gemma2ForCausalLM", "gemma2")
GEMMA3 = family("gemma:Gemma3", "Gemma 3, text", "Gemma3ForCausalLM", "gemma3_text", ("attn_logit_softcapping",))
GLM4 = family("glm4:Glm4", "GLM-4-0414 and GLM-Z1", "Glm4ForCausalLM", "glm4", ("ignore_keys_at_rope_validation",))
GPT2 = family(
    "gpt2:GPT2",
    "GPT-2",
    "GPT2LMHeadModel",
    "gpt2",
    (
        "reorder_and_upcast_attn",  # the softmax is in float32 whatever it says
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    ),
)
GRANITE = family("granite:Granite", "Granite 3", "GraniteForCausalLM", "granite")
LLAMA = family("llama:Llama", "Llama 2 and 3", "LlamaForCausalLM", "llama", ("pretraining_tp",))
MISTRAL = family("mistral:Mistral", "Mistral and Nemo", "MistralForCausalLM", "mistral")
OLMO2 = family("olmo:Olmo2", "OLMo 2", "Olmo2ForCausalLM", "olmo2")
OLMO3 = family("olmo:Olmo3", "OLMo 3", "Olmo3ForCausalLM", "olmo3")
OPT = family("opt:OPT", "OPT with norms before", "OPTForCausalLM", "opt", ("dropout", "init_std", "layerdrop"))
PHI3 = family("phi3:Phi3", "Phi 3 and 4", "Phi3ForCausalLM", "phi3", ("original_max_position_embeddings",))
QWEN2 = family("qwen2:Qwen2", "Qwen 2 and 2.5", "Qwen2ForCausalLM", "qwen2", WINDOWS)
QWEN3 = family("qwen3:Qwen3", "Qwen 3, dense; pocket is one", "Qwen3ForCausalLM", "qwen3", WINDOWS)
SMOLLM3 = family(
    "smollm3:SmolLM3", "SmolLM 3", "SmolLM3ForCausalLM", "smollm3", ("use_sliding_window", "no_rope_layer_interval")
)
STARCODER2 = family(
    "starcoder2:Starcoder2", "StarCoder 2", "Starcoder2ForCausalLM", "starcoder2", ("embedding_dropout",)
)
