"""The options of the engine and of a run: names, defaults, limits, and what a user is told of each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from minivllm.config.base import Strict, refusal
from minivllm.config.layers import ConfigShape, unalias
from minivllm.config.server import ServerConfig
from minivllm.errors import shown, want_name
from minivllm.validation import FieldFault

PROCESSORS = (  # what applies to a request that asks for it, in this order: masks may come anywhere, a divisor last
    "penalties", "logit_bias", "bad_words", "allowed_tokens", "no_repeat_ngram", "temperature_schedule",
)  # fmt: skip
CONFIG_VERSION = 1
ALIASES = {
    "quantization": "quantizer", "kv_cache_dtype": "kv_format", "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
}  # fmt: skip
DTYPE_NAMES = {"float": "float32", "half": "float16", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class PluginChoice(BaseModel):
    """Which plug-in fills a seam: ``name`` (``auto``, ``sdpa``, ``acme/flash``, ``module:Class``) and its options, or
    for ``auto`` a list of names to ``prefer``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field("auto", min_length=1)
    options: dict[str, Any] = {}
    prefer: list[str] = []

    def model_post_init(self, context: Any) -> None:
        if self.prefer and self.name != "auto":
            raise ValueError(f"prefer is only for name = 'auto', and the name is {shown(self.name)}")
        if "auto" in self.prefer:
            raise ValueError("prefer: want names of plug-ins, and 'auto' is none")
        if self.options and self.name == "auto":
            raise ValueError("options need a name: which plug-in are they for?")


def _choice(value: Any) -> Any:
    if value is None:
        return {}
    names = [value.get("name"), *_listed(value.get("prefer"))] if isinstance(value, Mapping) else [value]
    for name in names:
        if isinstance(name, type):
            raise ValueError(f"{name.__name__} is a class: {want_name(name)}")
    if not isinstance(value, (str, Mapping, PluginChoice)):
        raise ValueError(f"{shown(value)} is no plug-in: want a name, or a table with name and options")
    return {"name": value} if isinstance(value, str) else value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _choices(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{shown(value)} is no list: want names, or tables with name and options")
    return [_choice(v) for v in value]


def _impl(value: Any) -> Any:
    return "minivllm" if value == "vllm" else value  # what vLLM's users write for the engine's own


def _dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.")  # a torch.dtype is welcome
    return DTYPE_NAMES.get(name, name)


def _overrides(value: Any) -> Any:
    """Check ``hf_overrides``: a table of what JSON holds."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{shown(value)} is no table: want keys of config.json with their values")
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        at, found = todo.pop()
        if isinstance(found, Mapping):
            if (key := next((key for key in found if not isinstance(key, str)), None)) is not None:
                raise ValueError(f"the key {shown(key)}{at and f' in {at}'} is a {type(key).__name__}: want text")
            todo += [(f"{at}.{key}" if at else key, inner) for key, inner in found.items()]
        elif isinstance(found, (list, tuple)):
            todo += [(at, inner) for inner in found]
        elif isinstance(found, float) and not math.isfinite(found):
            raise ValueError(f"{at}={found}: want a finite number")
        elif found is not None and not isinstance(found, (bool, int, float, str)):
            raise ValueError(f"{at} is a {type(found).__name__}: want what JSON holds, as a number, text or list")
    return dict(value)


Overrides = Annotated[dict[str, Any], BeforeValidator(_overrides)]
One = Annotated[PluginChoice, BeforeValidator(_choice)]
Several = Annotated[list[PluginChoice], BeforeValidator(_choices)]
Path_ = Annotated[str, BeforeValidator(lambda v: os.fspath(v) if isinstance(v, os.PathLike) else v)]


class EngineConfig(Strict):
    """All options of the engine; names and defaults are vLLM's where it has them."""

    config_version: Literal[1] = Field(1, description="of the form of the file")
    model: Path_ = Field(
        "pocket", min_length=1, description="a directory, a GGUF file, a Hugging Face id, pocket or pocket-draft"
    )
    revision: str | None = Field(
        None, min_length=1, description="of a model by a Hugging Face id: a branch, a tag or a commit; None: main"
    )
    tokenizer: Path_ | None = Field(
        None,
        min_length=1,
        description="where the tokenizer is, if not with the model: a directory, or such an id",
    )
    tokenizer_revision: str | None = Field(
        None, min_length=1, description="of a tokenizer by an id; None: the model's, if it is its own"
    )
    download_dir: Path_ | None = Field(
        None, min_length=1, description="the cache of models by ids; None: that of HF_HUB_CACHE or HF_HOME"
    )
    chat_template: Path_ | None = Field(
        None,
        min_length=1,
        description="a file with a Jinja template for chats, its text, or the name of one of the model's; None: the "
        "model's own",
    )
    skip_tokenizer_init: bool = Field(False, description="token ids in, token ids out")
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = Field(
        "auto", description="pt: files of torch.save; dummy: random weights"
    )
    generation_config: Path_ = Field(
        "auto",
        min_length=1,
        description="sampling defaults of generation_config.json: auto (the model's), none, or the path of another one",
    )
    hf_overrides: Overrides = Field({}, description="keys that take the place of those in the model's config.json")
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_dtype)] = Field(
        "auto", description="of weights and activations; auto: the checkpoint's, on a CPU what it is fast in"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA if torch sees it")
    seed: int = Field(0, description="of requests that bring none, and of dummy weights")
    max_num_seqs: int = Field(512, ge=1, description="sequences that run at once")
    max_num_batched_tokens: int = Field(16384, ge=1, description="tokens of a step")
    max_model_len: int | None = Field(None, ge=1, description="prompt and output; None: the model's, at most 4096")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of the device's memory for everything")
    num_kvcache_blocks: int = Field(-1, ge=-1, description="-1: as many as fit")
    kvcache_block_size: int | None = Field(
        None, ge=1, le=1 << 20, description="tokens; None: what the attention back end prefers"
    )
    enable_prefix_caching: bool = Field(True, description="share the KV blocks of equal prefixes")
    partial_prefix_hits: bool = Field(
        True, description="copy the first tokens of a cached block where a prefix ends in it"
    )
    enforce_eager: bool = Field(False, description="never run captured graphs: the same as graph=off")
    graph: Literal["auto", "mixed", "decode", "off"] = Field(
        "auto",
        description="steps captured as CUDA graphs, on a CPU as calls of the native part; mixed: also those with parts "
        "of prompts; auto: what attention allows",
    )
    fuse: bool = Field(
        True, description="kernels on a GPU that join layers, or a sampler's operations; false: torch's own, one by one"
    )
    unfused: list[Literal["pairs", "norms", "gate", "draw"]] = Field(
        [],
        max_length=4,
        description="kernels of `fuse` that give way to torch's operations: pairs, products of few rows with norm "
        "or gate; norms, with the addition before them; gate; draw, samplers and penalties",
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs", description="of the model's logits, or of what is drawn from: penalties, temperature, limits"
    )
    max_logprobs: int = Field(20, ge=-1, description="that a request may ask for; -1: the whole vocabulary")
    max_tap_bytes: int = Field(256 << 20, ge=0, description="float32 values that a request may read by taps")
    energy: Annotated[str, Field(pattern=r"^(off|on|rapl|rapl:.+)$")] = Field(
        "off", description="count joules and share them among requests: on (the device's counter), rapl, rapl:FOLDER"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="processes that share the model, if the executor can")
    run_ahead: int | None = Field(None, ge=0, description="steps in flight beside the newest; None: the executor's")
    num_speculative_tokens: int = Field(4, ge=1, le=64, description="tokens that a drafter guesses for a row and step")
    speculate: Literal["auto", "always"] = Field(
        "auto", description="auto: not at batch sizes at which it was measured to be slower than no drafts"
    )
    batch_invariant: bool = Field(False, description="results do not depend on the batch")
    attention: One = PluginChoice()
    scheduler: One = PluginChoice()
    evictor: One = PluginChoice()
    sampler: One = PluginChoice()
    quantizer: One = PluginChoice()
    model_arch: One = PluginChoice()
    model_impl: Annotated[Literal["auto", "minivllm", "transformers"], BeforeValidator(_impl)] = Field(
        "auto", description="plug-ins that name the architecture, or transformers' class; auto: that where none does"
    )
    executor: One = PluginChoice()
    kv_format: One = PluginChoice()
    grammar: One = PluginChoice()
    drafter: One = PluginChoice()
    processors: Several = [PluginChoice(name=name) for name in PROCESSORS]
    strategies: Several = [PluginChoice(name="single"), PluginChoice(name="parallel"), PluginChoice(name="beam")]
    hooks: Several = []
    grammar_compile_seconds: float = Field(0.8, gt=0, le=60, description="that compiling a client's grammar may take")
    grammar_compile_mb: int = Field(512, ge=16, description="memory that compiling a client's grammar may take")
    grammar_workers: int = Field(2, ge=1, le=64, description="grammars that are compiled at once, a process each")
    grammar_cache_mb: int = Field(64, ge=0, description="of compiled grammars that are kept")
    allow_targets: list[str] = Field([], description="modules whose classes may be named; never from a file")

    def __init__(self, **values: Any) -> None:
        super().__init__(**unalias(values, ALIASES, lambda _: ""))
        if self.num_kvcache_blocks == 0:
            what = "num_kvcache_blocks=0: want -1 (as many as fit) or a positive number"
            raise refusal([FieldFault("num_kvcache_blocks", what)])
        if self.max_num_batched_tokens < self.max_num_seqs:
            what = (
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "a decode step would not fit; raise the one or lower the other"
            )
            given = [n for n in ("max_num_batched_tokens", "max_num_seqs") if n in self.model_fields_set]
            raise refusal([FieldFault(given[0] if given else "", what)])
        for name in SEVERAL:
            names = [choice.name for choice in getattr(self, name)]
            for i, plugin in enumerate(names):
                if plugin in names[:i]:
                    raise refusal([FieldFault(f"{name}.{i}", f"{name}: {shown(plugin)} is there twice")])
                if plugin == "auto":
                    what = f"{name}: each needs a name; 'auto' is for seams that take one plug-in"
                    raise refusal([FieldFault(f"{name}.{i}", what)])
        if not self.strategies:
            raise refusal([FieldFault("strategies", "strategies: want at least one")])


class RunConfig(Strict):
    """The ``[run]`` table: what ``minivllm run`` does.  Relative paths are relative to the file that names them."""

    prompts: list[str] = Field([], description="prompts, or user messages with chat = true")
    prompts_file: str | None = Field(None, description="one prompt a line; .jsonl: strings or objects with a 'prompt'")
    output: str | None = Field(None, description="JSON lines, one a prompt; default standard output")
    chat: bool = Field(False, description="apply the chat template to each prompt")
    record: str | None = Field(None, description="a .json file for the bill of materials and the results of the run")


class RequiresConfig(Strict):
    """The ``[requires]`` table: what must be installed, checked before anything else is."""

    plugins: list[str] = Field([], description='packages with their versions, as pip has them: "acme-attn>=1.2"')


SEAMS = tuple(name for name, f in EngineConfig.model_fields.items() if f.annotation is PluginChoice)
SEVERAL = tuple(name for name, f in EngineConfig.model_fields.items() if f.annotation == list[PluginChoice])
TABLES = {
    "sampling": None, "run": tuple(RunConfig.model_fields), "requires": tuple(RequiresConfig.model_fields),
    "server": tuple(ServerConfig.model_fields),
}  # fmt: skip
SHAPE = ConfigShape(
    top=tuple(EngineConfig.model_fields),
    tables=TABLES,
    seams=SEAMS,
    several=SEVERAL,
    free=("hf_overrides",),
    choice=tuple(PluginChoice.model_fields),
    aliases=ALIASES,
    version=CONFIG_VERSION,
)
