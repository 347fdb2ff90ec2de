"""The spec of a plug-in: its properties as data.  It uses the standard library only, so reading a spec is cheap.

A package imports these names from ``minivllm.plugin`` in its module of specs, and nothing else of minivllm::

    FLASH = Spec(
        impl="acme.attention:Flash", api=(1, 0), summary="Paged attention for Hopper", priority=50,
        limits={"device": {"cuda"}, "sm": AtLeast(90), "dtype": {"bfloat16"}, "block": MultipleOf(16)},
        features=frozenset({"window"}), prefer={"block": 64}, needs=(Needs("acme_kernels", "2.1", "pip install acme"),),
    )

and names the spec in its pyproject: ``[project.entry-points."minivllm.attention"]`` ``flash = "acme_spec:FLASH"``.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from minivllm.errors import PluginError, shown, suggest
from minivllm.registration.parameters import Param as Param

_SEAMS = "minivllm.core.interfaces."
BY_NAME = "approximate: it is chosen by its name only"  # the reason for which ``auto`` skips a plug-in
CONTRACT = "contract version"  # ``Reason.what`` if a package was written for another version of the contract


@dataclass(frozen=True)
class Kind:
    """A seam: a contract that plug-ins implement.  They are subclasses of ``base`` and are installed under the
    entry-point ``group``.

    ``api`` is the (major, minor) version of the contract.  A plug-in fits if its major version is equal and its minor
    version is not newer.  ``changed`` describes the changes of the last major version.

    ``facts`` are the names that ``Spec.limits`` may have, ``features`` the names that a spec may list as features, and
    ``traits`` the names that it may declare.  The engine requires some of the features; the other ones are promises to
    users.  The conformance kit tests all of them.  ``open`` names the facts that a user may leave open and that
    ``Spec.prefer`` may supply.
    """

    name: str
    base: str
    api: tuple[int, int] = (1, 0)
    facts: tuple[str, ...] = ()
    features: Mapping[str, str] = field(default_factory=dict)  # name -> description
    traits: Mapping[str, str] = field(default_factory=dict)  # name -> description
    open: tuple[str, ...] = ()
    changed: str = ""

    @property
    def group(self) -> str:
        """Return the name of the entry-point group."""
        return f"minivllm.{self.name}"


_INVARIANT = {
    "batch_invariant": "the bits of a row depend neither on the other rows of the step nor on its split into chunks"
}
_SAMPLING = {
    "graph_safe": "can be captured in a CUDA graph and replayed on new data",
    "multi_position": "handles several positions of a row in one step, so that rows which use it can speculate",
}
_PROCESSING = {
    **_SAMPLING,
    "own_model": "receives the logits of a second model, which its option `model` names; no other feature with it",
}
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind(
                "adapter",
                _SEAMS + "adapter:AdapterMethod",
                api=(1, 2),
                facts=("device",),
                traits={
                    "peft_type": "the `peft_type` of the folders that the method reads",
                    "ranked": "whether the method uses `max_lora_rank`, True by default; False refuses the option "
                    "for engines without a method that uses it",
                },
            ),
            Kind(
                "attention",
                _SEAMS + "attention:AttentionBackend",
                api=(1, 7),
                facts=("device", "sm", "dtype", "kv_format", "dim_qk", "dim_v", "queries_per_kv", "block"),
                features={
                    "window": "sliding windows",
                    "sinks": "a learned logit per head that receives probability but adds no value",
                    "softcap": "scores s become softcap * tanh(s / softcap)",
                    "alibi": "the slope of a head times the distance of a key is subtracted from its score (ALiBi)",
                    "v_in_k": "values are the first dim_v elements of the key (multi-head latent attention)",
                    "spans": "a token of an image sees the later tokens of the image (`AttnMeta.host_sees`)",
                    "lse": "returns the logarithm of the softmax's denominator",
                    "repeatable": "the same step gives the same bits",
                    **_INVARIANT,
                },
                traits={
                    "graph": "steps that can be captured in a CUDA graph: none, decode or mixed",
                    "plan": "where plan() runs: host or device",
                    "drafts": "the form of a row's drafts: `apart`, as decoding rows (the default), or `merged`, as "
                    "tokens of one row, for back ends that read a few tokens as fast as one",
                    "approximate": "True means that a query attends to some of the keys that it may see, which "
                    "`selected` returns; such a back end is chosen by its name only",
                },
                open=("block",),
            ),
            Kind("compressor", _SEAMS + "compressor:Compressor", api=(1, 2), facts=("device",)),
            Kind(
                "drafter",
                _SEAMS + "drafter:Drafter",
                api=(1, 3),
                facts=("device",),
                features={
                    "draft_model": "uses a second model, which its option `model` names",
                    "target_head": "has layers that read hidden states of the served model: `Drafter.head`",
                    "host_tokens": "reads tokens on the host: `Ask.history`, `Ask.owner` and `learn`",
                    "graph_safe": "`propose` can be captured in a CUDA graph and replayed on new data",
                },
                traits={"drafts": "the largest number of drafts of a row in a step; 0 means no limit"},
            ),
            Kind(
                "encoder",
                _SEAMS + "encoder:ImageEncoder",
                api=(1, 4),
                facts=("device", "dtype", "model_type"),
                features={
                    "graph_safe": "`encode` can be captured in a CUDA graph and replayed on values of an equal shape: "
                    "it does not wait for the device, and frees nothing that it has read",
                },
            ),
            Kind(
                "evictor",
                _SEAMS + "evictor:Evictor",
                api=(1, 2),
                traits={"order": "the order of eviction: lru, fifo or lfu"},
            ),
            Kind(
                "executor",
                _SEAMS + "executor:Executor",
                api=(2, 17),
                changed="Wiring nests since 2.0 (wiring.num_blocks is wiring.cache.num_kvcache_blocks, "
                "wiring.run_ahead is wiring.steps.run_ahead): see docs/compatibility.md",
                facts=("device", "tensor_parallel_size"),
                traits={
                    "unused": "seams that the executor does not run, separated by spaces; a plug-in for one is refused",
                    "made_up": "for an executor without a model: `module:function`; the function (token ids, "
                    "vocabulary) returns the logits f32 [V] of the next token, with which the conformance kit "
                    "compares the executor's tokens",
                    "cluster": "name of the option which, if set, names devices of other machines",
                },
            ),
            Kind(
                "grammar",
                _SEAMS + "grammar:Grammar",
                api=(1, 2),
                features={
                    "json": "compiles JSON schemas",
                    "regex": "compiles regular expressions, with ASCII classes",
                    "choice": "compiles lists of texts",
                    "grammar": "compiles grammars in Lark's notation and in GBNF",
                    "reply": "compiles grammars of answers with calls of functions, in which tags are tokens",
                },
            ),
            Kind("hooks", "minivllm.runtime.hooks:Hooks", api=(1, 2)),
            Kind("kvformat", _SEAMS + "kvformat:KVFormat", facts=("device", "sm", "dtype", "holds")),
            Kind(
                "kvstore",
                _SEAMS + "kvstore:KVStore",
                api=(1, 1),
                features={"durable": "pages survive the process that stored them"},
            ),
            Kind(
                "model",
                _SEAMS + "model:ModelArch",
                api=(2, 8),
                changed="a model may be a table since 2.0 (ModelArch.describe); Parts.rotary takes a decoder.Rope, "
                "step.wanted is step.logits_indices, picks is takes_logits_indices: see docs/compatibility.md",
                facts=("device", "dtype", "architecture", "model_type"),
                features={
                    **_INVARIANT,
                    "any_architecture": "serves architectures that no other plug-in names, and is considered last",
                },
                traits={"ignores": "fields of config.json without effect, in addition to those that all models ignore"},
            ),
            Kind("parser", "minivllm.runtime.replies:ReplyParser"),
            Kind("predictor", _SEAMS + "predictor:Predictor"),
            Kind("processor", _SEAMS + "sampling:Processor", api=(1, 4), facts=("device",), features=_PROCESSING),
            Kind(
                "quantizer",
                _SEAMS + "quantizer:Quantizer",
                api=(1, 7),
                facts=("device", "sm", "dtype", "checkpoint"),
                features=_INVARIANT
                | {"sliceable": "quantizing a slice of a tensor equals slicing the quantized tensor"},
                traits={
                    "bits": "bits of a quantized weight element, scales not counted",
                    "exponent": "how many of these bits are an exponent; the step size then depends on the element",
                    "inputs": "bits to which products round activations, with a scale from the largest of each row",
                    "table": "the numbers that codes stand for, in ascending order, if they are not evenly spaced",
                    "group": "number of inputs of a row that share a scale; all of them if it is not declared",
                    "online": "for a reader of quantized checkpoints: the plug-in that is used instead of it for a "
                    "checkpoint that is not quantized",
                },
            ),
            Kind(
                "router",
                "minivllm.core.interfaces.router:ReplicaRouter",
                features={"sticky": "all requests of a session go to the same replica while it accepts requests"},
            ),
            Kind("sampler", _SEAMS + "sampling:Sampler", api=(1, 4), facts=("device",), features=_SAMPLING),
            Kind(
                "scheduler",
                _SEAMS + "scheduler:SchedulerPolicy",
                api=(1, 5),
                features={"starvation_free": "a request waits for a bounded time under a steady stream of others"},
            ),
            Kind("strategy", _SEAMS + "strategy:DecodingStrategy", api=(1, 4)),
            Kind(
                "tokenizer",
                _SEAMS + "tokenizer:TokenizerBackend",
                facts=("format", "tokenizer_class"),
                features={"lossless": "every text comes back unchanged from `encode_plain` and `decode`"},
            ),
        )
    }
)
# (kind, trait) -> (function that checks a value, the accepted values in words)
TRAIT_FORMS: Mapping[tuple[str, str], tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        ("adapter", "peft_type"): (lambda v: _text(v), "a name, such as 'LORA'"),
        ("adapter", "ranked"): (lambda v: isinstance(v, bool), "True or False"),
        ("attention", "graph"): (lambda v: v in ("none", "decode", "mixed"), "'none', 'decode' or 'mixed'"),
        ("attention", "plan"): (lambda v: v in ("host", "device"), "'host' or 'device'"),
        ("attention", "drafts"): (lambda v: v in ("apart", "merged"), "'apart' or 'merged'"),
        ("attention", "approximate"): (lambda v: isinstance(v, bool), "True or False"),
        ("drafter", "drafts"): (lambda v: _whole(v), "a whole number >= 0"),
        ("evictor", "order"): (lambda v: v in ("lru", "fifo", "lfu"), "'lru', 'fifo' or 'lfu'"),
        ("executor", "unused"): (
            lambda v: isinstance(v, str) and set(v.split()) <= set(KINDS),
            "names of seams in one text, with spaces between",
        ),
        ("executor", "made_up"): (lambda v: _text(v) and ":" in v, "'package.module:function'"),
        ("executor", "cluster"): (lambda v: _text(v), "the name of an option"),
        ("model", "ignores"): (lambda v: _texts(v), "a collection of names, such as {'embedding_size'}"),
        ("quantizer", "bits"): (lambda v: _number(v) and v > 0, "a number > 0"),
        ("quantizer", "exponent"): (lambda v: _whole(v), "a whole number >= 0"),
        ("quantizer", "inputs"): (lambda v: _whole(v), "a whole number >= 0"),
        ("quantizer", "table"): (
            lambda v: isinstance(v, (tuple, list)) and all(map(_number, v)),
            "a tuple of numbers",
        ),
        ("quantizer", "group"): (lambda v: _whole(v), "a whole number >= 0"),
        ("quantizer", "online"): (lambda v: _text(v), "the name of a plug-in"),
    }
)
OPTION_OF = {  # kind -> name of its option in the configuration, for kinds where they differ
    "adapter": "adapters", "kvformat": "kv_format", "model": "model_arch", "parser": "server.tool_parser",
    "processor": "processors", "router": "server.router", "strategy": "strategies", "tokenizer": "tokenizer_mode",
}  # fmt: skip
RESERVED = ("trimmer",)  # kinds without a contract in this version
REQUESTED = ("processor", "sampler", "strategy", "compressor")  # kinds that may declare parameters of requests


@dataclass(frozen=True)
class AtLeast:
    """A limit: numbers that are not below ``least``."""

    least: float

    def allows(self, value: Any) -> bool:
        """Return whether the limit accepts a value."""
        return _number(value) and value >= self.least

    def __str__(self) -> str:
        return f"at least {self.least}"


@dataclass(frozen=True)
class AtMost:
    """A limit: numbers that are not above ``most``."""

    most: float

    def allows(self, value: Any) -> bool:
        """Return whether the limit accepts a value."""
        return _number(value) and value <= self.most

    def __str__(self) -> str:
        return f"at most {self.most}"


@dataclass(frozen=True)
class Range:
    """A limit: numbers from ``least`` to ``most``, both included."""

    least: float
    most: float

    def allows(self, value: Any) -> bool:
        """Return whether the limit accepts a value."""
        return _number(value) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least} to {self.most}"


@dataclass(frozen=True)
class MultipleOf:
    """A limit: positive multiples of ``step``."""

    step: int

    def allows(self, value: Any) -> bool:
        """Return whether the limit accepts a value."""
        return _number(value) and value > 0 and value % self.step == 0

    def __str__(self) -> str:
        return f"multiples of {self.step}"


@dataclass(frozen=True)
class Any_:
    """A limit that accepts every value."""

    def allows(self, value: Any) -> bool:
        """Return True."""
        return True

    def __str__(self) -> str:
        return "anything"


ANY = Any_()


def allows(limit: Any, value: Any) -> bool:
    """Return whether a limit accepts a value, or each value of a set."""
    if isinstance(value, Set):
        return all(allows(limit, v) for v in value)
    return value in limit if isinstance(limit, Set) else limit.allows(value)


def describe(limit: Any) -> str:
    """Return a limit in words; evenly spaced numbers as "16 to 256 in steps of 16"."""
    if not isinstance(limit, Set):
        return str(limit)
    numbers = all(_number(v) for v in limit)
    if numbers and len(limit) > 4:
        low, high = min(limit), max(limit)
        step = (high - low) / (len(limit) - 1)
        if step.is_integer() and limit == set(range(low, high + 1, int(step))):
            return f"{low} to {high} in steps of {int(step)}"
    values = sorted(limit, key=None if numbers else str)
    return "{" + ", ".join(map(str, values)) + "}"


def _number(value: Any) -> bool:
    """Return whether a value is a number and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Reason:
    """The reason why a candidate is refused.

    ``what`` is the feature that does not fit.  ``want`` is the required value, and ``have`` the supported values.
    ``fix`` is advice, or the description of a feature that is missing.
    """

    what: str
    want: str = ""
    have: str = ""
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: expected {self.want}, supports {self.have}" if self.want else self.what
        return f"{text}  ({self.fix})" if self.fix else text


@dataclass(frozen=True)
class Needs:
    """A module that must be installed, with at least version ``version``.  ``install`` is the command that installs it.

    ``dist`` names the distribution whose version is compared, if several distributions contain the same package (two
    contain ``flash_attn``).  By default, it is the distribution that contains the top package of the module.
    """

    module: str
    version: str = ""
    install: str = ""
    dist: str = ""

    def __post_init__(self) -> None:
        if self.version and not self.version[0].isdigit():
            raise ValueError(
                f"Needs({self.module!r}): version={self.version!r}: expected the lowest version, such as '2.1'"
            )

    def missing(self) -> Reason | None:
        """Return the reason why the needed module is missing or too old, or None if it is installed."""
        if not _installed(self.module):
            return Reason(f"needs {self.module}, which is not installed", fix=self.install)
        if not self.version:
            return None
        from packaging.version import Version

        want = f"at least {self.version}"
        have = self.installed_version()
        if have is None:
            return Reason(f"{self.module} has no version", want, "an unknown one", self.install)
        if Version(have) < Version(self.version):
            return Reason(self.module, want, have, self.install)
        return None

    def installed_version(self) -> str | None:
        """Return the version of the distribution ``dist``, or of the one that contains the module; None if it is
        unknown."""
        top = self.module.partition(".")[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self.dist or top)
        if self.dist:
            return None
        # The table of all packages is searched last, because reading their metadata takes seconds.
        with contextlib.suppress(Exception):  # any package may have broken metadata
            return importlib.metadata.version(importlib.metadata.packages_distributions()[top][0])
        return None


def _installed(module: str) -> bool:
    """Return whether a module can be found.  Its parent packages are not imported, because they may be heavy."""
    try:
        top, *rest = module.split(".")
        spec = importlib.util.find_spec(top)
        for name in rest:
            if spec is None or spec.submodule_search_locations is None:
                return False
            # Only the last part of the dotted name is looked up, in the folders of its parent, because a lookup of the
            # full name would import the parent package.
            spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
        return spec is not None
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True)
class PluginQuery:
    """The requirements of the engine for a plug-in: facts with their values (each value of a set must be supported),
    and features."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        parts = [f"{key}={plain(value)}" for key, value in self.facts.items()]
        parts += [f"features={{{', '.join(sorted(self.features))}}}"] if self.features else []
        return ", ".join(parts) or "anything"


@dataclass(frozen=True)
class Spec:
    """The properties of a plug-in, available without importing its implementation.

    ``limits`` maps each fact to its supported values: a set, ``AtLeast``, ``AtMost``, ``Range``, ``MultipleOf`` or
    ``ANY``.  A fact that is not listed is refused, and so is a feature that is not in ``features``.  ``limits=ANY``
    disables the check of facts.  This is the default for a class without a spec, which a user names as
    ``module:Class``.

    ``prefer`` holds values for facts that the user left open, such as the KV block size.  ``traits`` are declarations
    that the engine reads without comparing them to a request (such as ``graph``: none, decode, mixed).  ``params`` are
    additional request parameters of a processor, sampler or strategy.  ``check`` returns reasons that limits cannot
    express.
    """

    impl: str
    api: tuple[int, int]
    summary: str
    options: str = ""  # "module:Class" of a pydantic model with extra="forbid"; "" means that there are no options
    priority: int = 0
    limits: Any = field(default_factory=dict)  # a mapping of fact -> limit, or ANY
    features: frozenset[str] = frozenset()
    needs: tuple[Needs, ...] = ()
    prefer: Mapping[str, Any] = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=dict)
    params: tuple[Param, ...] = ()
    check: Callable[[PluginQuery], Sequence[Reason]] | None = None

    def __post_init__(self) -> None:
        """Check the types of all fields.  TypeError is raised here, where the author sees it, and not when a user
        chooses the plug-in."""
        limits = {} if self.limits == ANY else self.limits
        for name, ok, want in (
            ("impl", _text(self.impl) and ":" in self.impl, "'package.module:Class'"),
            ("api", _version(self.api), "(major, minor)"),
            ("summary", isinstance(self.summary, str), "a line of text"),
            ("options", isinstance(self.options, str), "'package.module:Class'"),
            ("priority", isinstance(self.priority, int), "a whole number"),
            ("limits", isinstance(limits, Mapping), "a dict of fact -> limit, or ANY"),
            ("features", isinstance(self.features, Set), "a frozenset of names"),
            ("needs", _tuple_of(self.needs, Needs), "(Needs(...),)"),
            ("prefer", isinstance(self.prefer, Mapping), "a dict of fact -> value"),
            ("traits", isinstance(self.traits, Mapping), "a dict"),
            ("params", _tuple_of(self.params, Param), "(Param(...),)"),
            ("check", self.check is None or callable(self.check), "a function (PluginQuery) -> [Reason]"),
        ):
            if not ok:
                raise TypeError(f"Spec {name}={getattr(self, name)!r}: expected {want}")
        for fact, limit in limits.items():
            if not isinstance(limit, Set) and not hasattr(limit, "allows"):
                raise TypeError(
                    f"Spec limits[{fact!r}]={limit!r}: expected a set, AtLeast, AtMost, Range, MultipleOf, ANY"
                )
        for name, words in [("features", self.features), *((f"limits[{fact!r}]", v) for fact, v in limits.items())]:
            if isinstance(words, Set) and len(words) > 1 and all(isinstance(w, str) and len(w) == 1 for w in words):
                raise TypeError(f"Spec {name}={set(words)!r}: these are the letters of a text; expected {{'the text'}}")

    @property
    def reads(self) -> frozenset[str]:
        """Return the names of the declared request parameters, for the attribute ``reads`` of the class."""
        return frozenset(param.name for param in self.params)

    @property
    def plain_traits(self) -> dict[str, Any]:
        """Return the traits whose values are texts or numbers."""
        return {name: value for name, value in self.traits.items() if isinstance(value, (str, int, float))}

    def trait_faults(self, kind: Kind) -> list[Reason]:
        """Return a reason for each trait whose value has a wrong form."""
        reasons = []
        for name, value in self.traits.items():
            is_valid, words = TRAIT_FORMS.get((kind.name, name), (lambda v: True, ""))
            if not is_valid(value):
                reasons.append(Reason(f"trait {name!r}", words, repr(value)))
        return reasons

    @property
    def approximate(self) -> bool:
        """Return whether the plug-in declares approximate results, so that it is chosen by its name only."""
        return self.traits.get("approximate") is True

    def listed(self, fact: str) -> list[str]:
        """Return the supported values of a fact in order, or an empty list if its limit is not a set."""
        limit = self.limits.get(fact) if isinstance(self.limits, Mapping) else None
        return sorted(limit) if isinstance(limit, (set, frozenset)) else []

    def refuse(self, request: PluginQuery, kind: Kind) -> tuple[Reason, ...]:
        """Return all reasons why the plug-in cannot serve a request.  The result is empty if it can.

        TypeError if the spec's function ``check`` returns anything but a list of Reason."""
        if self.api[0] != kind.api[0] or self.api[1] > kind.api[1]:
            if tuple(self.api) > kind.api:
                fix = "written for a newer minivllm: upgrade minivllm"
            else:
                fix = "written for an older minivllm: upgrade it"
                fix += f"; {kind.changed}" if kind.changed else ""
            return (Reason(CONTRACT, version(kind.api), version(self.api), fix),)
        reasons = self.trait_faults(kind)
        for fact, value in request.facts.items() if self.limits != ANY else ():
            if fact not in self.limits:
                reasons.append(Reason(fact, plain(value), "nothing (not declared)"))
            elif not allows(self.limits[fact], value):
                reasons.append(Reason(fact, plain(value), describe(self.limits[fact])))
        for name in sorted(request.features - self.features):
            reasons.append(Reason(f"feature {name!r} not declared", fix=kind.features.get(name, "")))
        reasons += filter(None, [needs.missing() for needs in self.needs])
        if self.check is not None and not reasons:
            reasons += self.check(request)
            for reason in reasons:
                if not isinstance(reason, Reason):
                    raise TypeError(f"check() gave {reason!r}: expected a list of Reason")
        return tuple(reasons)


def _text(value: Any) -> bool:
    """Return whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value)


def _texts(value: Any) -> bool:
    """Return whether a value is a collection of texts. A text itself, a collection of letters, is refused."""
    return isinstance(value, (set, frozenset, tuple, list)) and all(map(_text, value))


def _whole(value: Any) -> bool:
    """Return whether a value is a whole number >= 0."""
    return type(value) is int and value >= 0


def _tuple_of(value: Any, kind: type) -> bool:
    """Return whether a value is a tuple of instances of a class."""
    return isinstance(value, tuple) and all(isinstance(element, kind) for element in value)


def _version(value: Any) -> bool:
    """Return whether a value has the form (major, minor)."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(type(n) is int for n in value)


def check_seam(seam: str | None) -> str | None:
    """Return the kind of plug-in that a user named by its kind or by its configuration option.

    PluginError if there is no such kind.  None is returned unchanged.
    """
    kind = next((k for k, option in OPTION_OF.items() if option == seam), seam)
    if kind is not None and kind not in KINDS:
        raise PluginError(f"No seam is called {shown(seam)}.{suggest(kind, KINDS)} There are: {', '.join(KINDS)}.")
    return kind


def version(api: tuple[int, int]) -> str:
    """Return a contract version as text."""
    return ".".join(str(n) for n in api)


def plain(value: Any) -> str:
    """Return the value of a fact as text.  A set with one value is shown as that value."""
    return str(next(iter(value))) if isinstance(value, Set) and len(value) == 1 else describe(value)


@dataclass(frozen=True)
class Part:
    """A chosen plug-in as plain data that can be sent as JSON: import target, options, and the name in a
    configuration."""

    name: str  # "minivllm/sdpa"
    target: str  # "minivllm.plugins.attention.sdpa:Sdpa"
    options: Mapping[str, Any] = field(default_factory=dict)
    options_target: str = ""  # "module:Class" of the pydantic model of the options, "" without options
    features: tuple[str, ...] = ()  # features of the plug-in's spec
    # traits of the plug-in's spec whose values are texts or numbers
    traits: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""  # origin of the plug-in for error messages, such as "acme 1.0, entry point 'acme_spec:FLASH'"

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # JSON has lists only
