"""What the user wants: defaults < files < environment < ``--set`` < keywords, each value with its origin.

A file is TOML or YAML: the engine's options at the top, the sampling parameters in ``[sampling]``, the prompts of
``minivllm run`` in ``[run]`` and the settings of ``minivllm serve`` in ``[server]``.  Every fault is a ConfigError of
one line that names the place and what was wanted.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from minivllm.config.base import Strict, refusal
from minivllm.config.files import parse_value, read_chain
from minivllm.config.layers import ConfigShape, Layers, unalias
from minivllm.config.requires import check_requirements
from minivllm.config.server import ServerConfig
from minivllm.errors import ConfigError, RequestError, brief, shown, want_name
from minivllm.loading.hf_config import IN_PACKAGE
from minivllm.validation import FieldFault, begins, source_of, sourced

PROCESSORS = (  # what applies to a request that asks for it, in this order: masks may come anywhere, a divisor last
    "penalties", "logit_bias", "bad_words", "allowed_tokens", "no_repeat_ngram", "temperature_schedule",
)  # fmt: skip
ENV_PREFIX = "MINIVLLM__"
MOST_NAME = 256  # characters of a variable's name
CONFIG_VERSION = 1
ALIASES = {"quantization": "quantizer", "kv_cache_dtype": "kv_format"}
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


def _dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.")  # a torch.dtype is welcome
    return DTYPE_NAMES.get(name, name)


One = Annotated[PluginChoice, BeforeValidator(_choice)]
Several = Annotated[list[PluginChoice], BeforeValidator(_choices)]
Path_ = Annotated[str, BeforeValidator(lambda v: os.fspath(v) if isinstance(v, os.PathLike) else v)]


class EngineConfig(Strict):
    """All options of the engine; names and defaults are vLLM's where it has them."""

    config_version: Literal[1] = Field(1, description="of the form of the file")
    model: Path_ = Field("pocket", min_length=1, description="a directory, a Hugging Face id, pocket or pocket-draft")
    tokenizer: Path_ | None = Field(None, description="where the tokenizer is, if not with the model")
    chat_template: Path_ | None = Field(
        None, min_length=1, description="a file with a Jinja template for chats, or its text; None: the model's own"
    )
    skip_tokenizer_init: bool = Field(False, description="token ids in, token ids out")
    load_format: Literal["auto", "safetensors", "dummy"] = Field("auto", description="dummy: random weights")
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
        "auto", description="steps captured as CUDA graphs; mixed: decode steps too; auto: what attention allows"
    )
    fuse: bool = Field(
        True, description="kernels on a GPU that join layers, or a sampler's operations; false: torch's own, one by one"
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs", description="of the model's logits, or of what is drawn from: penalties, temperature, limits"
    )
    max_logprobs: int = Field(20, ge=-1, description="that a request may ask for; -1: the whole vocabulary")
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
    top=tuple(EngineConfig.model_fields), tables=TABLES, seams=SEAMS, several=SEVERAL,
    choice=tuple(PluginChoice.model_fields), aliases=ALIASES, version=CONFIG_VERSION,
)  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """A whole configuration.  ``origins`` says for each leaf that is no default where it came from, ``files`` which
    files were read, in the order in which they were laid, ``notes`` what a user should know."""

    engine: EngineConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)
    run: RunConfig = field(default_factory=RunConfig)
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    server: ServerConfig = field(default_factory=ServerConfig)


def load_config(
    files: Sequence[str | os.PathLike[str]] = (),
    sets: Sequence[str] = (),
    keywords: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    """Lay the sources over one another and check the whole.  ConfigError names the source of what is wrong.

    ``files`` are TOML or YAML, ``sets`` are texts ``key=value``, ``flags`` are options with a flag of their own on the
    command line, ``keywords`` are those of a Python call; each wins over what stands before it here, and the
    environment (``environ``, default ``os.environ``) comes after the files.
    """
    layers, names = Layers(SHAPE), []
    over = functools.partial(_lay_over, sets, dict(flags or {}), dict(keywords or {}), environ)
    for given in files:
        for file in read_chain(given, other=functools.partial(_ask_hooks, layers, over)):
            layers.add(_relative(file.values, Path(file.name).resolve().parent), file.where)
            names.append(file.name)
    over(layers)
    return _finish(layers, tuple(names))


def _ask_hooks(layers: Layers, over: Callable[[Layers], None], path: str) -> Mapping[str, Any] | None:
    """The table in a file of another format, if a hook reads it that all that is there without the file enables."""
    from .other_formats import read_by_hook

    there = copy.deepcopy(layers)
    over(there)
    return read_by_hook(path, there.tree.get("hooks"), there.tree.get("allow_targets"))


def _lay_over(
    sets: Sequence[str], flags: Mapping[str, Any], keywords: Mapping[str, Any], environ: Mapping[str, str] | None,
    layers: Layers,
) -> None:  # fmt: skip
    """What counts more than files."""
    environ = os.environ if environ is None else environ
    given: dict[tuple[str, ...], str] = {}
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and len(name) > MOST_NAME:
            raise ConfigError(f"{brief(name)}: a name of {len(name)} characters; want at most {MOST_NAME}")
        if name.startswith(ENV_PREFIX):  # sorted: a NAME comes before its OPTIONS
            top, *rest = name.removeprefix(ENV_PREFIX).lower().split("__")
            path = (ALIASES.get(top, top), *rest)
            if path in given:
                raise ConfigError(f"{'.'.join(path)} is given twice, as {given[path]} and as {name}")
            given[path] = name
            layers.put(path, parse_value(text), _always(name))
        elif name.startswith("MINIVLLM_") and name[9:].lower() in EngineConfig.model_fields:
            layers.notes.append(f"{name} is not read: want two underscores, {ENV_PREFIX}{name[9:]}")
    layers.assign([_assignment(text) for text in sets], "--set", trusted=True)
    layers.add(flags, _always("command line"), trusted=True)
    layers.add(keywords, _always("keyword"), trusted=True)


def _always(source: str) -> Callable[[tuple[Any, ...]], str]:
    return lambda _: source


def _assignment(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {shown(text)}: want key=value, for example --set scheduler.name=fcfs")
    return key.strip().split("."), parse_value(value)


def _finish(layers: Layers, files: tuple[str, ...]) -> Loaded:
    """Check the merged tree against the models."""
    values, origins = dict(layers.tree), layers.origins
    tables = {name: values.pop(name, {}) for name in TABLES}
    requires = _checked(RequiresConfig, tables["requires"], origins, "requires")
    check_requirements(requires.plugins, origins)
    engine = _checked(EngineConfig, values, origins)
    run = _checked(RunConfig, tables["run"], origins, "run")
    sampling = _sampling(tables["sampling"], origins)
    server = _checked(ServerConfig, tables["server"], origins, "server")
    return Loaded(engine, sampling, run, dict(origins), tuple(layers.notes), tuple(requires.plugins), files, server)


def _checked(model: Any, values: Mapping[str, Any], origins: Mapping[str, str], at: str = "") -> Any:
    try:
        return model(**values)
    except ConfigError as exc:
        found = [
            FieldFault(".".join(filter(None, (at, f.path))), f"{at}.{f.text}" if at else f.text) for f in exc.faults
        ]
        raise ConfigError("; ".join(sourced(found, origins))) from exc


def _sampling(values: dict[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    from minivllm.core.interfaces.params import SamplingParams

    values, bias = dict(values), values.get("logit_bias")
    try:
        if bias is not None:  # the keys of a TOML table are strings
            values["logit_bias"] = {int(token): by for token, by in bias.items()}
        SamplingParams.make(**values)
    except RequestError as exc:
        raise ConfigError(f"{begins(source_of(origins, f'sampling.{exc.param}'))}sampling: {exc}") from exc
    except (ValueError, AttributeError):
        at = begins(source_of(origins, "sampling.logit_bias"))
        raise ConfigError(f"{at}sampling: logit_bias={shown(bias)}: want a table with token ids as keys") from None
    return values


def is_template(text: str) -> bool:
    """Whether a ``chat_template`` is the template itself rather than the name of a file."""
    return "{{" in text or "{%" in text


def _relative(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths in a file are relative to it.  A model is a path if it looks like one or is there as a directory."""
    for key in ("model", "tokenizer"):
        text = values.get(key)
        if (
            isinstance(text, str)
            and text not in ("", *IN_PACKAGE)
            and (text.startswith(("./", "../")) or os.path.isdir(folder / text))
        ):
            values[key] = os.path.normpath(folder / text)
    template = values.get("chat_template")
    if isinstance(template, str) and template and not is_template(template):
        values["chat_template"] = os.path.normpath(folder / template)
    run = values.get("run")
    if isinstance(run, dict):
        for key in ("prompts_file", "output", "record"):
            if isinstance(run.get(key), str):
                run[key] = os.path.normpath(folder / run[key])
    server = values.get("server")
    if isinstance(server, dict):
        for key in ("api_key_file", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            if isinstance(server.get(key), str) and server[key]:
                server[key] = os.path.normpath(folder / server[key])
    return values
