"""Options of other engines that this one does not have by the same name, and what to use instead.

A refused option names its replacement.  A variable of the environment that another engine reads and this one does not
becomes a note, because it would otherwise be ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping

_DRAFTER = 'use drafter="ngram", or drafter={"name": "model", "options": {"model": ...}}, with num_speculative_tokens=N'
_NO_CODE = "the code of a model's directory is never run: leave it out"
_LORA = "adapters are not served: merge the adapter into the weights"
_TEXT = "only text is served: leave it out"
_ONE_DEVICE = "use tensor_parallel_size=N to share a model among devices"

OPTIONS: dict[str, str] = {
    "use_cache": "use enable_prefix_caching=False to compute every prompt anew; the KV cache itself is always used",
    "speculative_model": _DRAFTER,
    "speculative_config": _DRAFTER,
    "draft_model": _DRAFTER,
    "ngram_prompt_lookup_max": _DRAFTER,
    "trust_remote_code": _NO_CODE,
    "code_revision": _NO_CODE,
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_lora_rank": _LORA,
    "limit_mm_per_prompt": _TEXT,
    "mm_processor_kwargs": _TEXT,
    "allowed_local_media_path": _TEXT,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "device_map": _ONE_DEVICE,
    "tp_size": _ONE_DEVICE,
    "distributed_executor_backend": 'use executor="process", "multiprocess" or "ray"',
    "guided_decoding_backend": 'use grammar="llguidance" or "xgrammar"',
    "structured_outputs_config": 'use grammar="llguidance" or "xgrammar"',
    "attention_backend": 'use attention="sdpa", "triton", "flash_attn" or "flashinfer"',
    "attn_implementation": 'use attention="sdpa", "triton", "flash_attn" or "flashinfer"',
    "logits_processors": "use processors=[...], a list of plug-ins",
    "scheduler_cls": "use scheduler=NAME",
    "scheduling_policy": "use scheduler=NAME",
    "compilation_config": 'use graph="auto", "mixed", "decode" or "off"',
    "max_seq_len_to_capture": 'use graph="auto", "mixed", "decode" or "off"',
    "enable_chunked_prefill": 'prompts are cut to max_num_batched_tokens; raise it, or scheduler="prefill-first"',
    "torch_dtype": "use dtype",
    "load_in_8bit": 'use quantizer="llm-int8" or "int8"',
    "load_in_4bit": 'use quantizer="nf4" or "int4"',
    "quantization_config": "use quantizer={name = ..., options = {...}}",
    "max_length": "use max_model_len for the engine, max_tokens in SamplingParams for a request",
    "context_length": "use max_model_len",
    "n_ctx": "use max_model_len",
    "mem_fraction_static": "use gpu_memory_utilization",
    "swap_space": "preempted requests are computed again: leave it out",
    "cpu_offload_gb": "weights are not moved to the CPU: leave it out, or use a quantizer",
    "kv_cache_memory_bytes": "use num_kvcache_blocks, in blocks",
    "disable_log_stats": "LLM logs no statistics: leave it out",
    "task": "models generate: leave it out",
    "runner": "models generate: leave it out",
    "tokenizer_mode": "the tokenizer is the model's: leave it out",
    "use_v2_block_manager": "leave it out",
}

ENVIRONMENT: dict[str, str] = {
    "VLLM_ATTENTION_BACKEND": "use --set attention=NAME (sdpa, triton, flash_attn, flashinfer)",
    "VLLM_TORCH_PROFILER_DIR": "LLM.stop_profile(path) and a server's /stop_profile write the trace into a file; "
    "a server writes it into the folder in which it was started",
    "VLLM_USE_V1": "leave it out",
    "VLLM_API_KEY": "use MINIVLLM_API_KEY",
    "VLLM_LOGGING_LEVEL": "use minivllm serve --log-level LEVEL",
    "VLLM_HOST_IP": "use minivllm serve --host HOST",
    "VLLM_PORT": "use minivllm serve --port PORT",
    "VLLM_WORKER_MULTIPROC_METHOD": "workers are always started afresh: leave it out",
    "VLLM_BATCH_INVARIANT": "use --set batch_invariant=true",
    "VLLM_USE_MODELSCOPE": "models come from a directory or the Hugging Face hub",
}


def option_hint(name: str) -> str:
    """Return what to use instead of another engine's option, as the end of a sentence; "" for an unknown name."""
    hint = OPTIONS.get(name)
    return f" It is another engine's option: {hint}." if hint else ""


def environment_notes(environ: Mapping[str, str]) -> list[str]:
    """Return a note for each variable of vLLM that is set and not read here."""
    return [f"{name} is vLLM's and not read here: {hint}" for name, hint in ENVIRONMENT.items() if environ.get(name)]
