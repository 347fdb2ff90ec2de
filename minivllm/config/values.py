"""The options of the engine and of ``minivllm run``: names, defaults, limits and descriptions for users."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from minivllm.config.base import Strict, refuse
from minivllm.config.layers import ConfigShape, unalias
from minivllm.config.server import ServerConfig
from minivllm.errors import shown, want_name

# The default processors, in order.  Masks may be anywhere; a processor that divides logits must be last.
PROCESSORS = (
    "penalties", "logit_bias", "bad_words", "allowed_tokens", "no_repeat_ngram", "thinking_budget",
    "temperature_schedule",
)  # fmt: skip
CONFIG_VERSION = 1
ALIASES = {
    "quantization": "quantizer", "kv_cache_dtype": "kv_format", "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
}  # fmt: skip
POOLS = ("auto", "none", "threads", "process")  # names of ``tokenizer_pool``
MOST_POOL = 256
DTYPE_NAMES = {"float": "float32", "half": "float16", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


# names of devices in vLLM and torch for which this package has no plug-ins
OTHER_DEVICES = ("neuron", "tpu", "xla", "xpu", "hpu", "npu", "mps", "rocm", "hip")
OTHER_DEVICE_PARTS = (
    "a package must supply its parts (device, attention, executor). Start from "
    "contrib/minivllm-accelerator-template, see docs/accelerators.md"
)


class PluginChoice(BaseModel):
    """The chosen plug-in of a seam (kind of plug-in): ``name`` (``auto``, ``sdpa``, ``acme/flash``, ``module:Class``)
    and its options, or for ``auto`` a list of names to ``prefer``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field("auto", min_length=1)
    options: dict[str, Any] = {}
    prefer: list[str] = []

    def model_post_init(self, context: Any) -> None:
        """Check that ``prefer`` and ``options`` fit to ``name``.  ValueError if not."""
        if self.prefer and self.name != "auto":
            raise ValueError(f"prefer is only for name = 'auto', and the name is {shown(self.name)}")
        if "auto" in self.prefer:
            raise ValueError("prefer: expected names of plug-ins, not 'auto'")
        if self.options and self.name == "auto":
            raise ValueError("options without name: set name to the plug-in that the options are for")


def _choice(value: Any) -> Any:
    """Return a value for ``PluginChoice``, made from a plug-in's name, a table or None.

    ValueError for anything else."""
    if value is None:
        return {}
    names = [value]
    if isinstance(value, Mapping):
        names = [value.get("name"), *_listed(value.get("prefer"))]
    for name in names:
        if isinstance(name, type):
            raise ValueError(f"{name.__name__} is a class: {want_name(name)}")
    if not isinstance(value, (str, Mapping, PluginChoice)):
        raise ValueError(f"{shown(value)} is not a plug-in: expected a name, or a table with name and options")
    if isinstance(value, str):
        return {"name": value}
    return value


def _listed(value: Any) -> list[Any]:
    """Return the elements of a list or tuple, and an empty list for anything else."""
    if isinstance(value, (list, tuple)):
        return list(value)
    return []


def _choices(value: Any) -> Any:
    """Return a list of values for ``PluginChoice``, made from a list of plug-ins' names and tables.

    ValueError for anything else."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{shown(value)} is not a list: expected names, or tables with name and options")
    return [_choice(v) for v in value]


def _list_or_one(value: Any) -> Any:
    """Return a list of values for ``PluginChoice``, made from a list of plug-ins' names and tables, or a single one."""
    return _choices([value] if isinstance(value, (str, Mapping, PluginChoice)) else value)


def _impl(value: Any) -> Any:
    """Return a value of ``model_impl``, with "minivllm" for "vllm" (vLLM's name for its own model classes)."""
    return "minivllm" if value == "vllm" else value


def _dtype(value: Any) -> Any:
    """Return the name of a dtype, which may be a ``torch.dtype`` or a short name."""
    name = str(value).removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)


def _overrides(value: Any) -> Any:
    """Return ``hf_overrides`` as a dict, after a check that it is a table of JSON values.

    ValueError names the wrong key."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{shown(value)} is not a table: expected keys of config.json with their values")
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        at, node = todo.pop()
        if isinstance(node, Mapping):
            for key, inner in node.items():
                if not isinstance(key, str):
                    place = f" in {at}" if at else ""
                    raise ValueError(f"the key {shown(key)}{place} is a {type(key).__name__}: expected text")
                todo.append((f"{at}.{key}" if at else key, inner))
        elif isinstance(node, (list, tuple)):
            todo += [(at, inner) for inner in node]
        elif isinstance(node, float) and not math.isfinite(node):
            raise ValueError(f"{at}={node}: expected a finite number")
        elif node is not None and not isinstance(node, (bool, int, float, str)):
            raise ValueError(f"{at} is a {type(node).__name__}: expected a JSON value, such as a number, text or list")
    return dict(value)


def _pool(value: Any) -> Any:
    """Return the fields of the option ``tokenizer_pool``, made from a name or a table.

    ValueError for anything else."""
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not set(table) <= {"name", "size"}:
        raise ValueError(f"{shown(value)}: expected a name, or a table with name and size")
    name, size = table.get("name", "auto"), table.get("size")
    if name == "ray":
        raise ValueError("name='ray': Ray actors cannot convert text in this engine; use threads or process")
    if name not in POOLS:
        raise ValueError(f"name={shown(name)}: expected {', '.join(POOLS)}")
    if size is not None and (type(size) is not int or not 1 <= size <= MOST_POOL):
        raise ValueError(f"size={shown(size)}: expected a whole number from 1 to {MOST_POOL}")
    return {"name": name} if size is None else {"name": name, "size": size}


def _path(value: Any) -> Any:
    """Return a path object as text, and any other value unchanged."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


Overrides = Annotated[dict[str, Any], BeforeValidator(_overrides)]
Pool = Annotated[dict[str, Any], BeforeValidator(_pool)]
One = Annotated[PluginChoice, BeforeValidator(_choice)]
Several = Annotated[list[PluginChoice], BeforeValidator(_choices)]
ListOrOne = Annotated[list[PluginChoice], BeforeValidator(_list_or_one)]
Path_ = Annotated[str, BeforeValidator(_path)]
DType = Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_dtype)]
Impl = Annotated[Literal["auto", "minivllm", "transformers"], BeforeValidator(_impl)]


class EngineConfig(Strict):
    """All options of the engine.  Names and defaults are those of vLLM, where it has the option."""

    config_version: Literal[1] = Field(1, description="version of the file format")
    model: Path_ = Field(
        "pocket", min_length=1, description="a directory, a GGUF file, a Hugging Face id, pocket or pocket-draft"
    )
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a model on the Hugging Face hub; None: main"
    )
    tokenizer: Path_ | None = Field(
        None,
        min_length=1,
        description="directory or Hugging Face id of the tokenizer; None: the model's",
    )
    tokenizer_revision: str | None = Field(
        None,
        min_length=1,
        description="branch, tag or commit of the tokenizer; None: as for the model, if it is the same",
    )
    download_dir: Path_ | None = Field(
        None, min_length=1, description="folder for downloaded models; None: the one of HF_HUB_CACHE or HF_HOME"
    )
    chat_template: Path_ | None = Field(
        None,
        min_length=1,
        description="chat template: a file, the text of a Jinja template, or the name of one of the model's templates; "
        "None: the model's default",
    )
    tokenizer_mode: One = PluginChoice()
    tokenizer_pool: Pool = Field(
        {"name": "auto"},
        description="converts long lists of texts: a name (auto, none, threads, process), or a table with name and "
        "size, the number of threads or processes; auto: threads if they are faster",
    )
    skip_tokenizer_init: bool = Field(False, description="load no tokenizer; prompts and outputs are token ids")
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = Field(
        "auto", description="format of the weights; pt: files of torch.save; dummy: random weights"
    )
    generation_config: Path_ = Field(
        "auto",
        min_length=1,
        description="sampling defaults from generation_config.json: auto (the model's), none, or the path of a file",
    )
    hf_overrides: Overrides = Field({}, description="keys that replace keys of the model's config.json")
    dtype: DType = Field(
        "auto", description="dtype of weights and activations; auto: the checkpoint's, or bfloat16 or float32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA if torch sees it")
    seed: int = Field(0, description="seed of requests without one, and of dummy weights")
    max_num_seqs: int = Field(512, ge=1, description="largest number of running sequences")
    max_num_batched_tokens: int = Field(16384, ge=1, description="largest number of tokens in a step")
    max_model_len: int | None = Field(
        None, ge=1, description="largest number of tokens of prompt and output; None: the model's, at most 4096"
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of the device's memory to use in total")
    num_kvcache_blocks: int = Field(-1, ge=-1, description="blocks of the KV cache; -1: as many as fit")
    kvcache_block_size: int | None = Field(
        None, ge=1, le=1 << 20, description="tokens of a block; None: as the attention back end prefers"
    )
    enable_prefix_caching: bool = Field(True, description="share the KV blocks of equal prefixes")
    num_state_checkpoints: int = Field(
        -1,
        ge=-1,
        description="copies of recurrent states, with which a request can begin behind a cached prefix; -1: as many as "
        "fit into a fifth of the memory that is left",
    )
    partial_prefix_hits: bool = Field(
        True, description="reuse the first tokens of a cached block if a shared prefix ends inside it"
    )
    kv_budget: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="tokens of a request that a compressor keeps in the KV cache, or a share of its prompt below 1; 0: "
        "only requests with a kv_budget of their own are compressed",
    )
    compress_every: int = Field(
        0, ge=0, description="generated tokens between two compressions of a request; 0: one at the end of its prompt"
    )
    pressure_budget: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="tokens of a running request, or below 1 a share of its computed tokens, that stay when KV blocks "
        "are short; requests are then compressed before one is preempted; requests with kv_budget=0 are not; 0: never",
    )
    enforce_eager: bool = Field(False, description="never use CUDA graphs: the same as graph=off")
    graph: Literal["auto", "mixed", "decode", "off"] = Field(
        "auto",
        description="steps captured as CUDA graphs (on a CPU: run by native code); mixed: decode steps and steps with "
        "prompts; auto: as many as the attention back end allows",
    )
    graph_captures: Literal["gradual", "start"] = Field(
        "gradual",
        description="when the sizes of steps are captured on a GPU; gradual: those of first requests before the engine "
        "is ready, the others while it serves; start: all before it is ready",
    )
    compile_ahead: bool | None = Field(
        None,
        description="compile the kernels of a first start on a GPU on several cores before they run; None: if no "
        "part of another package runs on the device; false: one after another, each at its first launch",
    )
    fuse: bool = Field(True, description="use fused kernels on a GPU; false: separate operations of torch")
    unfused: list[Literal["pairs", "norms", "gate", "draw"]] = Field(
        [],
        max_length=4,
        description="kinds of fused kernels to replace by torch's operations: pairs (matrix products of few rows with "
        "norm or gate), norms (with the preceding addition), gate, draw (samplers and penalties)",
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs",
        description="raw: of the model's logits; processed: after penalties, temperature and limits, as for the draw",
    )
    max_logprobs: int = Field(
        20, ge=-1, description="largest number of log-probabilities per token; -1: the whole vocabulary"
    )
    max_tap_bytes: int = Field(256 << 20, ge=0, description="largest size of the values that a request reads with taps")
    energy: Annotated[str, Field(pattern=r"^(off|on|rapl|rapl:.+)$")] = Field(
        "off", description="measure energy and divide it among requests: on (the device's counter), rapl, rapl:FOLDER"
    )
    enable_lora: bool = Field(False, description="serve adapters (LoRA) that requests name: adds lora to adapters")
    max_loras: int = Field(8, ge=1, le=512, description="adapters on the device at the same time")
    max_lora_rank: int = Field(16, ge=1, le=512, description="largest rank of adapters, for methods with ranks (lora)")
    max_cpu_loras: int | None = Field(
        None, ge=1, le=65536, description="adapters in host memory; None: four times max_loras"
    )
    max_images: int = Field(
        16, ge=0, le=64, description="largest number of images of a request; 0: text only, without the image encoder"
    )
    image_cache_mb: int = Field(1024, ge=1, description="MiB of image features on the device")
    tensor_parallel_size: int = Field(1, ge=1, description="processes that share the model")
    run_ahead: int | None = Field(
        None, ge=0, description="steps in flight besides the newest one; None: the executor's choice"
    )
    tpot_target_ms: Annotated[float, Field(gt=0, le=60000)] | Literal["auto", "off"] = Field(
        "off",
        description="milliseconds of a step in which rows decode; auto: a multiple of the shortest step of decodes; "
        "off: no bound (in a server: auto)",
    )
    num_speculative_tokens: int = Field(4, ge=1, le=64, description="largest number of drafts of a row in a step")
    speculate: Literal["auto", "always"] = Field(
        "auto", description="auto: no drafts at batch sizes at which they were measured to be slower; always"
    )
    captured_drafts: bool | Literal["auto"] = Field(
        "auto",
        description="capture steps with drafts and calls of the drafter in CUDA graphs; auto: on one GPU, unless "
        "graph=off",
    )
    drafts_ahead: Literal["auto", "off"] = Field(
        "auto",
        description="auto: plan a row with drafts while its last step is in flight, where the executor can; off: after "
        "the result",
    )
    batch_invariant: bool = Field(False, description="make the results of a request independent of other requests")
    attention: One = PluginChoice()
    scheduler: One = PluginChoice()
    predictor: One = PluginChoice()
    evictor: One = PluginChoice()
    sampler: One = PluginChoice()
    quantizer: One = PluginChoice()
    model_arch: One = PluginChoice()
    model_impl: Impl = Field(
        "auto",
        description="minivllm: the plug-in for the architecture; transformers: the class in transformers; auto: the "
        "plug-in, or the class in transformers if there is no plug-in for the architecture",
    )
    executor: One = PluginChoice()
    kv_format: One = PluginChoice()
    grammar: One = PluginChoice()
    drafter: One = PluginChoice()
    compressor: One = PluginChoice()
    encoder: One = PluginChoice()
    processors: Several = [PluginChoice(name=name) for name in PROCESSORS]
    strategies: Several = [PluginChoice(name="single"), PluginChoice(name="parallel"), PluginChoice(name="beam")]
    hooks: Several = []
    kvstore: ListOrOne = []
    adapters: ListOrOne = []
    grammar_compile_seconds: float = Field(
        0.8, gt=0, le=60, description="largest time for compiling a grammar of a client"
    )
    grammar_compile_mb: int = Field(512, ge=16, description="largest memory in MB for compiling a grammar of a client")
    grammar_workers: int = Field(2, ge=1, le=64, description="processes that compile grammars")
    grammar_cache_mb: int = Field(64, ge=0, description="MB of compiled grammars to keep")
    allow_targets: list[str] = Field([], description="modules whose classes may be used as plug-ins; never from a file")

    @field_validator("device", mode="before")
    @classmethod
    def _is_built_in(cls, device: Any) -> Any:
        """Return the device unchanged.  ValueError for a device for which no built-in plug-in exists, such as "tpu"."""
        if device in OTHER_DEVICES:
            raise ValueError(f"no back end for {device} is built in: {OTHER_DEVICE_PARTS}; use cpu or cuda")
        return device

    def __init__(self, **values: Any) -> None:
        """Set the options, under any of their names, and check that they are consistent.  ConfigError if not."""
        super().__init__(**unalias(values, ALIASES, lambda _: ""))
        if self.num_kvcache_blocks == 0:
            refuse("num_kvcache_blocks", "num_kvcache_blocks=0: expected -1 (as many as fit) or a positive number")
        if self.max_num_batched_tokens < self.max_num_seqs:
            set_by_user = [n for n in ("max_num_batched_tokens", "max_num_seqs") if n in self.model_fields_set]
            refuse(
                set_by_user[0] if set_by_user else "",
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "a decode step would not fit; raise the former or lower the latter",
            )
        for name in SEVERAL:
            names = [choice.name for choice in getattr(self, name)]
            for i, plugin in enumerate(names):
                if plugin in names[:i]:
                    refuse(f"{name}.{i}", f"{name}: {shown(plugin)} is there twice")
                if plugin == "auto":
                    refuse(f"{name}.{i}", f"{name}: each needs a name; 'auto' is for seams that take one plug-in")
        if not self.strategies:
            refuse("strategies", "strategies: expected at least one")


class RunConfig(Strict):
    """The ``[run]`` table: the work of ``minivllm run``.  Relative paths are relative to the file that contains
    them."""

    prompts: list[str] = Field([], description="prompts, or user messages with chat = true")
    prompts_file: str | None = Field(
        None, description="file with a prompt per line; .jsonl: strings or objects with a 'prompt'"
    )
    output: str | None = Field(
        None, description="file for the results, a JSON line for each prompt; None: standard output"
    )
    chat: bool = Field(False, description="apply the chat template to each prompt")
    record: str | None = Field(None, description=".json file for the bill of materials and the results of the run")


class RequiresConfig(Strict):
    """The ``[requires]`` table: packages that must be installed.  They are checked before the other options."""

    plugins: list[str] = Field([], description='packages with their versions, as for pip: "acme-attn>=1.2"')


def _options_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the options with values of a type."""
    return tuple(name for name, field in EngineConfig.model_fields.items() if field.annotation == kind)


SEAMS = _options_of(PluginChoice)
SEVERAL = _options_of(list[PluginChoice])
TABLES = {
    "sampling": None, "run": tuple(RunConfig.model_fields), "requires": tuple(RequiresConfig.model_fields),
    "server": tuple(ServerConfig.model_fields),
}  # fmt: skip
SHAPE = ConfigShape(
    top=tuple(EngineConfig.model_fields),
    tables=TABLES,
    seams=SEAMS,
    several=SEVERAL,
    free=("hf_overrides", "tokenizer_pool"),
    choice=tuple(PluginChoice.model_fields),
    alone=("kvstore", "adapters"),
    aliases=ALIASES,
    version=CONFIG_VERSION,
)
