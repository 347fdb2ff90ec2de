"""Options of other engines that this engine does not have under the same name, and what to use instead.

An error for such an option names its replacement.  If the value of an option asks for the behaviour that this engine
has anyway, the option is accepted with a note.  An environment variable of another engine that is not read here also
becomes a note, because it would otherwise be ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.errors import suggest

_DRAFTER = 'use drafter="ngram", or drafter={"name": "model", "options": {"model": ...}}, with num_speculative_tokens=N'
_NO_CODE = "the code of a model's directory is never run: leave it out"
_IMAGES = "use max_images=N, the largest number of images of a request; 0 means text only"
_IMAGE_DATA = "images come as data in a request, and no path or URL is opened: leave it out"
_PIXELS = "the checkpoint's own image processor prepares images: leave it out"
_ONE_DEVICE = "use tensor_parallel_size=N to share a model among devices"

OPTIONS: dict[str, str] = {
    "use_cache": "use enable_prefix_caching=False to compute every prompt anew; the KV cache itself is always used",
    "speculative_model": _DRAFTER,
    "speculative_config": _DRAFTER,
    "draft_model": _DRAFTER,
    "ngram_prompt_lookup_max": _DRAFTER,
    "trust_remote_code": _NO_CODE,
    "code_revision": _NO_CODE,
    "limit_mm_per_prompt": _IMAGES,
    "mm_processor_kwargs": _PIXELS,
    "allowed_local_media_path": _IMAGE_DATA,
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
    "use_v2_block_manager": "leave it out",
}

# hint <- options of vLLM, SGLang, transformers and llama.cpp; a name that ends in * is a prefix
_MORE = """\
use model <- model_path model_id model_name_or_path
use max_num_seqs <- max_running_requests max_batch_size n_seq_max
use max_num_batched_tokens <- chunked_prefill_size max_prefill_tokens n_batch n_ubatch
use num_kvcache_blocks, in blocks <- max_total_tokens
use kvcache_block_size <- page_size
use seed <- random_seed
use kv_format <- type_k type_v
use download_dir <- cache_dir
set HF_TOKEN <- hf_token token use_auth_token
set HF_HUB_OFFLINE=1 <- local_files_only
use tensor_parallel_size=N to share a model among devices <- dp_size pp_size ep_size nnodes node_rank master_addr \
    master_port data_parallel_* pipeline_parallel_* prefill_context_parallel_* decode_context_parallel_* \
    enable_expert_parallel enable_eplb enable_dbo all2all_* expert_placement_* n_gpu_layers tensor_split split_mode
use the table sampling, as sampling={"temperature": 0.5} <- override_generation_config
use hf_overrides={"rope_scaling": {...}}, keys of config.json <- rope_scaling rope_freq_scale
use hf_overrides={"rope_theta": ...}, keys of config.json <- rope_theta rope_freq_base
use hf_overrides={...}, keys of config.json <- hf_config_path config_format disable_sliding_window \
    json_model_override_args
use attention="sdpa", "triton", "flash_attn" or "flashinfer" <- flash_attn disable_cascade_attn
use attention={"name": ..., "options": {...}} <- attention_config
use sampler=NAME <- sampling_backend
use grammar="llguidance" or "xgrammar" <- grammar_backend
use drafter="ngram", or drafter={"name": "model", "options": {"model": ...}}, with num_speculative_tokens=N <- \
    speculative_* spec_decoding_* ngram_prompt_lookup_* num_lookahead_slots
use graph="auto", "mixed", "decode" or "off" <- cuda_graph_* cudagraph_* disable_cuda_graph max_cudagraph_capture_size \
    max_context_len_to_capture optimization_level enable_torch_compile torch_compile
use enable_prefix_caching=False <- disable_radix_cache
use enable_prefix_caching=True or False <- prefix_caching_hash_algo cache_prompt
use run_ahead=0 to plan no step ahead <- async_scheduling disable_overlap_schedule
use executor=NAME <- worker_cls worker_extension_cls
use scheduler=NAME <- schedule_policy schedule_conservativeness max_num_partial_prefills max_long_partial_prefills \
    long_prefill_token_threshold num_scheduler_steps
use quantizer="nf4" or "int4", with dtype for what is computed <- bnb_4bit_*
use quantizer=NAME <- torchao_config
use chat_template <- chat_format
use logprobs in SamplingParams <- logits_all
use use_tqdm=False of generate <- use_tqdm_on_load
use hooks=["opentelemetry"] <- otlp_traces_endpoint collect_detailed_traces
use enable_lora=True and lora_request of generate <- lora_* fully_sharded_loras
use max_images=0 <- language_model_only
use image_cache_mb=N, MiB of image features on the device <- mm_processor_cache_*
images come as data in a request, and no path or URL is opened: leave it out <- allowed_media_domains
the checkpoint's own encoder and image processor are used: leave it out <- mm_* media_io_kwargs skip_mm_profiling \
    disable_chunked_mm_input interleave_mm_strings mmproj
requests have token ids, text or images: leave it out <- enable_mm_embeds enable_prompt_embeds
models generate: leave it out <- convert is_embedding pooler_config override_pooler_config embedding
use tokenizer_pool={"name": "threads", "size": N} <- tokenizer_pool_*
the tokenizer is the model's: leave it out <- use_fast
weights are not moved to the CPU: leave it out, or use a quantizer <- offload_* max_memory
use kvstore="cpu" to keep KV blocks in host memory, or kvstore="disk" <- kv_offloading_* kv_transfer_config
LLM.sleep and LLM.wake need no option: leave it out <- enable_sleep_mode
an LLM answers no HTTP requests: use it with minivllm serve <- api_server_count served_model_name \
    reasoning_parser tool_call_parser
use Python's logging, of the logger minivllm <- disable_log_requests log_level verbose aggregate_engine_logging
minivllm has no equivalent: leave it out <- calculate_kv_scales preemption_mode stream_interval \
    kv_events_config kv_sharing_fast_prefill model_loader_extra_config ignore_patterns mamba_* \
    low_cpu_mem_usage use_safetensors safetensors_load_strategy disable_custom_all_reduce max_parallel_loading_workers \
    disable_hybrid_kv_cache_manager ray_workers_use_nsight kv_cache_dtype_skip_layers logits_processor_pattern \
    show_hidden_metrics_for_version use_mmap use_mlock n_threads watchdog_timeout
"""


def _names(table: str) -> dict[str, str]:
    """Return the hint of each name in a table of lines ``hint <- names``."""
    lines = (line.partition(" <- ") for line in table.replace("\\\n", " ").splitlines())
    return {name: hint for hint, _, names in lines for name in names.split()}


OPTIONS |= _names(_MORE)

# Lines "reason <- options": the reason why these options of vLLM need no equivalent if they have the given values.
_NEUTRAL = """\
the code of a model's directory is never run <- trust_remote_code=False
prefills are always cut to the token budget <- enable_chunked_prefill=True
the next step of a GPU is always planned ahead <- async_scheduling=True
models generate <- task=generate|auto runner=generate|auto convert=auto|none
config.json is read <- config_format=auto|hf
the seam grammar chooses <- guided_decoding_backend=auto
preempted requests are computed again <- preemption_mode=recompute
there is one <- pipeline_parallel_size=1 data_parallel_size=1 decode_context_parallel_size=1 \
    prefill_context_parallel_size=1 api_server_count=1 nnodes=1
nothing is moved to it <- swap_space=0|0.0 cpu_offload_gb=0|0.0 kv_offloading_size=0|0.0
images are read if the model has an encoder for them <- language_model_only=False
an engine sleeps only at a call of sleep <- enable_sleep_mode=False
experts are divided like all other weights <- enable_expert_parallel=False
no request is logged <- disable_log_requests=True
the engine logs no statistics <- disable_log_stats=True
"""


def _neutral(table: str) -> dict[str, tuple[list[str], str]]:
    """Return (accepted values as text, reason) for each option in a table of lines ``reason <- option=value|value``."""
    found = {}
    for line in table.replace("\\\n", " ").splitlines():
        why, _, options = line.partition(" <- ")
        for option in options.split():
            name, _, values = option.partition("=")
            found[name] = values.split("|"), why
    return found


NEUTRAL = _neutral(_NEUTRAL)

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
    """Return a sentence that names the replacement of another engine's option, or "" for an unknown name."""
    hint = OPTIONS.get(name)
    if hint is None and "_" in name:
        hint = next((OPTIONS[key] for key in OPTIONS if key.endswith("*") and name.startswith(key[:-1])), None)
    return f" It is another engine's option; {hint}." if hint else ""


def neutral_note(name: str, value: Any) -> str:
    """Return why another engine's option needs nothing at this value, or "" if the option or value is not in the
    table."""
    values, why = NEUTRAL.get(name, ((), ""))
    return f"{name}={value} is another engine's option, and needs nothing here: {why}" if str(value) in values else ""


# environment variables of minivllm whose names do not begin with MINIVLLM__
VARIABLES = (
    "MINIVLLM_ADMIN_KEY", "MINIVLLM_API_KEY", "MINIVLLM_CHECK", "MINIVLLM_ISA", "MINIVLLM_NATIVE", "MINIVLLM_PLUGINS",
    "MINIVLLM_PLUGIN_TIMEOUT", "MINIVLLM_STRICT_PLUGINS",
)  # fmt: skip


def environment_notes(environ: Mapping[str, str]) -> list[str]:
    """Return a note for each environment variable that is set and not read here: vLLM's, and names that differ little
    from a variable of minivllm."""
    notes = [f"{name} is vLLM's and not read here: {hint}" for name, hint in ENVIRONMENT.items() if environ.get(name)]
    for name in environ:
        if name.startswith("MINIVLLM_") and name not in VARIABLES and not name.startswith("MINIVLLM__"):
            near = suggest(name, VARIABLES, 0.85)
            notes += [f"{name} is not read.{near}"] if near else []
    return notes
