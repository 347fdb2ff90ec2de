"""What the user wants: defaults < files < environment < ``--set`` < keywords, each value with its origin.

A file is TOML or YAML: the engine's options at the top, the sampling parameters in ``[sampling]`` and the prompts of
``minivllm run`` in ``[run]``.  Every fault is a ConfigError of one line that names the place and what was wanted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from minivllm.config_files import parse_value, read_file
from minivllm.core.hf_config import IN_PACKAGE
from minivllm.errors import ConfigError, RequestError, suggest
from minivllm.registry import validation_lines

ENV_PREFIX = "MINIVLLM__"
CONFIG_VERSION = 1
ALIASES = {"quantization": "quantizer", "kv_cache_dtype": "kv_format"}
TABLES = ("sampling", "run")
DTYPE_NAMES = {"float": "float32", "half": "float16", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class Strict(BaseModel):
    """Unknown keys are refused, nothing is converted silently, and a fault is a ConfigError."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise ConfigError("; ".join(validation_lines(exc, type(self)))) from exc


class Choice(BaseModel):
    """Which plug-in fills a seam: ``name`` (``auto``, ``sdpa``, ``acme/flash``, ``module:Class``) and its options, or
    for ``auto`` a list of names to ``prefer``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field("auto", min_length=1)
    options: dict[str, Any] = {}
    prefer: list[str] = []

    def model_post_init(self, context: Any) -> None:
        if self.prefer and self.name != "auto":
            raise ValueError(f"prefer is only for name = 'auto', and the name is {self.name!r}")
        if self.options and self.name == "auto":
            raise ValueError("options need a name: which plug-in are they for?")


def _choice(value: Any) -> Any:
    if value is None:
        return {}
    return {"name": value} if isinstance(value, str) else value


def _choices(value: Any) -> Any:
    return [_choice(v) for v in value] if isinstance(value, (list, tuple)) else value


def _dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.")  # a torch.dtype is welcome
    return DTYPE_NAMES.get(name, name)


One = Annotated[Choice, BeforeValidator(_choice)]
Several = Annotated[list[Choice], BeforeValidator(_choices)]
Path_ = Annotated[str, BeforeValidator(lambda v: os.fspath(v) if isinstance(v, os.PathLike) else v)]


class EngineConfig(Strict):
    """All options of the engine; names and defaults are vLLM's where it has them."""

    config_version: Literal[1] = Field(CONFIG_VERSION, description="of the form of the file")
    model: Path_ = Field("pocket", min_length=1, description="a directory, a Hugging Face id, pocket or pocket-draft")
    tokenizer: Path_ | None = Field(None, description="where the tokenizer is, if not with the model")
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
    kvcache_block_size: int | None = Field(None, ge=1, description="tokens; None: what the attention back end prefers")
    enable_prefix_caching: bool = Field(True, description="share the KV blocks of equal prefixes")
    enforce_eager: bool = Field(False, description="never run captured graphs: the same as graph=off")
    graph: Literal["auto", "decode", "off"] = Field(
        "auto", description="steps that are captured as CUDA graphs; auto: decode, if attention and model allow it"
    )
    fuse: bool = Field(
        True, description="fused kernels on a GPU, and captured steps, which need them; false: torch's own, one by one"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="processes that share the model, if the executor can")
    run_ahead: int | None = Field(None, ge=0, description="steps in flight beside the newest; None: the executor's")
    batch_invariant: bool = Field(False, description="results do not depend on the batch")
    attention: One = Choice()
    scheduler: One = Choice()
    evictor: One = Choice()
    sampler: One = Choice()
    quantizer: One = Choice()
    model_arch: One = Choice()
    executor: One = Choice()
    kv_format: One = Choice()
    processors: Several = [Choice(name="penalties"), Choice(name="logit_bias")]
    strategies: Several = [Choice(name="single"), Choice(name="parallel")]
    allow_targets: list[str] = Field([], description="modules whose classes may be named; never from a file")

    def __init__(self, **values: Any) -> None:
        super().__init__(**_unalias(values, ""))
        if self.num_kvcache_blocks == 0:
            raise ConfigError("num_kvcache_blocks: want -1 (as many as fit) or a positive number")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "a decode step would not fit; raise the one or lower the other"
            )
        for name in ("processors", "strategies"):
            names = [choice.name for choice in getattr(self, name)]
            if double := next((n for n in names if names.count(n) > 1), None):
                raise ConfigError(f"{name}: {double!r} is there twice")
            if "auto" in names:
                raise ConfigError(f"{name}: each needs a name; 'auto' is for seams that take one plug-in")
        if not self.strategies:
            raise ConfigError("strategies: want at least one")


class RunConfig(Strict):
    """The ``[run]`` table: what ``minivllm run`` does.  Relative paths are relative to the file that names them."""

    prompts: list[str] = Field([], description="prompts, or user messages with chat = true")
    prompts_file: str | None = Field(None, description="one prompt a line; .jsonl: strings or objects with a 'prompt'")
    output: str | None = Field(None, description="JSON lines, one a prompt; default standard output")
    chat: bool = Field(False, description="apply the chat template to each prompt")


SEAMS = tuple(name for name, f in EngineConfig.model_fields.items() if f.annotation is Choice)


@dataclass(frozen=True)
class Loaded:
    """A whole configuration.  ``origins`` says for each leaf that is no default where it came from."""

    engine: EngineConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)
    run: RunConfig = field(default_factory=RunConfig)
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load_config(
    files: Sequence[str | os.PathLike[str]] = (),
    sets: Sequence[str] = (),
    keywords: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Lay the sources over one another and check the whole.  ConfigError names the source of what is wrong."""
    layers = _Layers()
    for file in files:
        layers.add(_relative(read_file(file), Path(file).resolve().parent), str(file))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):  # sorted: a NAME comes before its OPTIONS
            layers.put(name.removeprefix(ENV_PREFIX).lower().split("__"), parse_value(text), name)
    layers.put_all([_assignment(text) for text in sets], "--set")
    layers.add(dict(keywords or {}), "keyword")
    return layers.finish()


def _assignment(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: want key=value, for example --set scheduler.name=fcfs")
    return key.strip().split("."), parse_value(value)


class _Layers:
    """The merged tree and, for each leaf, the source that wrote it last."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []

    def add(self, values: Mapping[str, Any], source: str) -> None:
        for key, value in _unalias(values, source).items():
            self.put([key], value, source)

    def put_all(self, assignments: Sequence[tuple[list[str], Any]], source: str) -> None:
        """Names first: a new name drops the options of the old one, not those that come with it."""
        for path, value in sorted(assignments, key=lambda a: not (a[0][-1] == "name" or a[0][0] == a[0][-1])):
            self.put(path, value, source)

    def put(self, path: Sequence[str], value: Any, source: str) -> None:
        path = [ALIASES.get(path[0], path[0]), *path[1:]]
        self._check_key(path, source)
        if len(path) == 1 and path[0] in SEAMS and isinstance(value, str):
            path = [path[0], "name"]
        if isinstance(value, Mapping) and value and not (path[0] == "sampling" and len(path) == 2):
            self.put_all([([*path, str(key)], inner) for key, inner in value.items()], source)
        else:
            self._write(path, value, source)

    def _write(self, path: Sequence[str], value: Any, source: str) -> None:
        if len(path) == 2 and path[0] in SEAMS and path[1] == "name":
            self._drop_options(path[0], value, source)
        node = self.tree
        for i, key in enumerate(path[:-1]):
            inner = node.setdefault(key, {})
            if not isinstance(inner, dict):
                dotted = ".".join(path[: i + 1])
                where = self.origins.get(dotted, "elsewhere")
                raise ConfigError(f"{_from(source)}{'.'.join(path)}: {dotted} is {inner!r} from {where}, not a table")
            node = inner
        dotted = ".".join(path)
        for old in [o for o in self.origins if o.startswith(dotted + ".")]:
            del self.origins[old]
        node[path[-1]] = value
        self.origins[dotted] = source

    def _drop_options(self, seam: str, name: Any, source: str) -> None:
        """Another plug-in does not take over the options that were written for the one before."""
        old = self.tree.get(seam)
        if isinstance(old, dict) and old.get("name", name) != name:
            gone = [key for key in ("options", "prefer") if old.pop(key, None)]
            prefixes = tuple(f"{seam}.{key}" for key in gone)
            self.origins = {leaf: s for leaf, s in self.origins.items() if not (gone and leaf.startswith(prefixes))}
            if gone:
                self.notes.append(f"{source}: {seam} is now {name!r}; {' and '.join(gone)} of {old['name']!r} dropped")

    def _check_key(self, path: Sequence[str], source: str) -> None:
        """Refuse an unknown name here, where the source is known."""
        top, known = path[0], [*EngineConfig.model_fields, *ALIASES, *TABLES]
        if top not in known:
            raise ConfigError(f"{_from(source)}unknown option {top!r}.{suggest(top, known)}")
        inner = {"run": RunConfig.model_fields, **dict.fromkeys(SEAMS, Choice.model_fields)}.get(top)
        if len(path) > 1 and inner is None and top != "sampling":
            raise ConfigError(f"{_from(source)}{'.'.join(path)}: {top!r} is a value, not a table")
        if len(path) > 1 and inner is not None and path[1] not in inner:
            raise ConfigError(f"{_from(source)}unknown option {'.'.join(path[:2])!r}.{suggest(path[1], inner)}")
        if top == "allow_targets" and source not in ("keyword", "--set"):
            raise ConfigError(
                f"{source}: allow_targets may come from the command line (--allow-target) or from Python only: "
                "what names code must not be what allows it"
            )

    def finish(self) -> Loaded:
        values = dict(self.tree)
        tables = {name: values.pop(name, {}) for name in TABLES}
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise ConfigError(f"{self.origins.get(name)}: {name} is a {type(table).__name__}: want a table")
        try:
            engine = EngineConfig(**values)
            run = self._at("run", lambda: RunConfig(**tables["run"]))
        except ConfigError as exc:
            raise ConfigError(self._sourced(str(exc))) from exc
        self._check_sampling(tables["sampling"])
        return Loaded(engine, tables["sampling"], run, dict(self.origins), tuple(self.notes))

    def _at(self, name: str, make: Any) -> Any:
        try:
            return make()
        except ConfigError as exc:
            raise ConfigError(f"{name}.{exc}") from exc

    def _sourced(self, message: str) -> str:
        """Put the source of the first leaf that the message names before it."""
        path = message.partition(":")[0]
        while path:
            source = next((s for leaf, s in self.origins.items() if leaf == path or leaf.startswith(path + ".")), None)
            if source is not None:
                return _from(source) + message
            path = path.rpartition(".")[0]
        return message

    def _check_sampling(self, values: dict[str, Any]) -> None:
        from minivllm.core.request import SamplingParams

        bias = values.get("logit_bias")
        try:
            if isinstance(bias, Mapping):  # the keys of a TOML table are strings
                values["logit_bias"] = {int(token): by for token, by in bias.items()}
            SamplingParams.make(**values)
        except RequestError as exc:
            source = self.origins.get(f"sampling.{exc.param}", "keyword")
            raise ConfigError(f"{_from(source)}sampling: {exc}") from exc
        except ValueError:
            source = self.origins["sampling.logit_bias"]
            raise ConfigError(f"{_from(source)}sampling: logit_bias={bias!r}: want token ids as keys") from None


def _from(source: str) -> str:
    """How a message begins; keywords of a Python call need no telling."""
    return "" if source in ("", "keyword") else f"{source}: "


def _unalias(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Other engines' names for the same thing."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = ALIASES.get(key, key)
        if name in found:
            raise ConfigError(f"{_from(source)}{name} is given twice, also as {key!r}")
        found[name] = value
    return found


def _relative(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths in a file are relative to it.  A model is a path if it looks like one or is there as a directory."""
    for key in ("model", "tokenizer"):
        text = values.get(key)
        if (
            isinstance(text, str)
            and text not in IN_PACKAGE
            and (text.startswith(("./", "../")) or (folder / text).is_dir())
        ):
            values[key] = os.path.normpath(folder / text)
    run = values.get("run")
    if isinstance(run, dict):
        for key in ("prompts_file", "output"):
            if isinstance(run.get(key), str):
                run[key] = os.path.normpath(folder / run[key])
    return values
