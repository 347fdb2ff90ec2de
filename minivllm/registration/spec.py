"""What a plug-in says about itself: light, standard library only, so that asking costs nothing.

A package imports these names from ``minivllm.plugin`` in the module of its specs, and nothing else of minivllm::

    FLASH = Spec(
        impl="acme.attention:Flash", api=(1, 0), summary="Paged attention for Hopper", priority=50,
        limits={"device": {"cuda"}, "sm": AtLeast(90), "dtype": {"bfloat16"}, "block": MultipleOf(16)},
        features=frozenset({"window"}), prefer={"block": 64}, needs=(Needs("acme_kernels", "2.1", "pip install acme"),),
    )

and names it in its pyproject: ``[project.entry-points."minivllm.attention"]`` ``flash = "acme_spec:FLASH"``.
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
BY_NAME = "approximate: it is chosen by its name only"  # why ``auto`` passes over a plug-in
CONTRACT = "contract version"  # what did not fit, of a package that was written for another minivllm


@dataclass(frozen=True)
class Kind:
    """One contract: plug-ins of it are subclasses of ``base`` and come by the entry-point ``group``.

    ``api`` is the contract's (major, minor); a plug-in fits if its major is equal and its minor is not newer.
    ``facts`` are what ``limits`` may name, ``features`` and ``traits`` what a spec may claim and declare.  The engine
    asks for some of the features; the others are promises to users, and the conformance kit holds plug-ins to all.
    ``open``: facts that a user may leave open, and a spec supply in ``prefer``; ``changed``: what a new major changes.
    """

    name: str
    base: str
    api: tuple[int, int] = (1, 0)
    facts: tuple[str, ...] = ()
    features: Mapping[str, str] = field(default_factory=dict)  # name -> what is claimed
    traits: Mapping[str, str] = field(default_factory=dict)  # name -> what is declared
    open: tuple[str, ...] = ()
    changed: str = ""

    @property
    def group(self) -> str:
        return f"minivllm.{self.name}"


_INVARIANT = {"batch_invariant": "a row's bits do not depend on the rows beside it, nor on how it is cut into chunks"}
_SAMPLING = {
    "graph_safe": "can be captured in a CUDA graph and replayed on new data",
    "multi_position": "serves several positions of one row in a step, so that rows which bind it can speculate",
}
_PROCESSING = {
    **_SAMPLING,
    "own_model": "is given the logits of a model of its own, which its option `model` names; claimed alone",
}
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind(
                "attention",
                _SEAMS + "attention:AttentionBackend",
                api=(1, 5),
                facts=("device", "sm", "dtype", "kv_format", "dim_qk", "dim_v", "queries_per_kv", "block"),
                features={
                    "window": "sliding windows",
                    "sinks": "a learned logit per head that takes probability and gives no value",
                    "softcap": "scores s become softcap * tanh(s / softcap)",
                    "alibi": "a slope of each head times the distance of a key is taken off its score (ALiBi)",
                    "v_in_k": "values are the first dim_v elements of the key (multi-head latent attention)",
                    "lse": "gives the logarithm of the softmax's denominator",
                    "repeatable": "the same step gives the same bits",
                    **_INVARIANT,
                },
                traits={
                    "graph": "steps that can be captured in a CUDA graph: none, decode or mixed",
                    "plan": "where plan() works: host or device",
                    "drafts": "how a row's drafts come: `apart`, as decode rows (the default), or `merged`, as tokens "
                    "of one row, which is for those that read a few tokens as fast as one",
                    "approximate": "True: a query attends to some of the keys that it may see, which `selected` gives; "
                    "such a back end is chosen by its name only",
                },
                open=("block",),
            ),
            Kind(
                "drafter",
                _SEAMS + "drafter:Drafter",
                facts=("device",),
                features={"draft_model": "works with a model of its own, which its option `model` names"},
                traits={"drafts": "how many tokens it can draft for a row in a step, if there is a limit; 0: none"},
            ),
            Kind("evictor", _SEAMS + "evictor:Evictor", api=(1, 1), traits={"order": "it keeps: lru, fifo or lfu"}),
            Kind(
                "executor",
                _SEAMS + "executor:Executor",
                api=(2, 4),
                changed="Wiring nests since 2.0 (wiring.num_blocks is wiring.cache.num_kvcache_blocks, "
                "wiring.run_ahead is wiring.steps.run_ahead): see docs/compatibility.md",
                facts=("device", "tensor_parallel_size"),
                traits={
                    "unused": "seams that it does not run, with spaces between: a plug-in chosen for one is refused",
                    "made_up": "it computes no model: target of a function (token ids, vocabulary) that gives the "
                    "logits f32 [V] of the next token, which the conformance kit compares with instead",
                    "cluster": "the option that, where it is set, names devices which this machine does not see",
                },
            ),
            Kind(
                "grammar",
                _SEAMS + "grammar:Grammar",
                api=(1, 1),
                features={
                    "json": "compiles JSON schemas",
                    "regex": "compiles regular expressions, with ASCII classes",
                    "choice": "compiles lists of texts",
                    "grammar": "compiles grammars in Lark's notation and in GBNF",
                },
            ),
            Kind("hooks", "minivllm.runtime.hooks:Hooks", api=(1, 2)),
            Kind("kvformat", _SEAMS + "kvformat:KVFormat", facts=("device", "sm", "dtype", "holds")),
            Kind(
                "model",
                _SEAMS + "model:ModelArch",
                api=(2, 3),
                changed="a model may be a table since 2.0 (ModelArch.describe); Parts.rotary takes a decoder.Rope, "
                "step.wanted is step.logits_indices, picks is takes_logits_indices: see docs/compatibility.md",
                facts=("device", "dtype", "architecture", "model_type"),
                features={**_INVARIANT, "any_architecture": "serves what no other plug-in names, and is asked last"},
                traits={"ignores": "fields of config.json that change nothing, beside those that every model ignores"},
            ),
            Kind("processor", _SEAMS + "sampling:Processor", api=(1, 4), facts=("device",), features=_PROCESSING),
            Kind(
                "quantizer",
                _SEAMS + "quantizer:Quantizer",
                api=(1, 6),
                facts=("device", "sm", "dtype", "checkpoint"),
                features=_INVARIANT | {"sliceable": "to quantize a slice of a tensor is to slice the quantized one"},
                traits={
                    "bits": "bits of a quantized weight element, scales not counted",
                    "exponent": "how many of these are an exponent's: steps then go by the size of an element",
                    "inputs": "bits that products round activations to, a row at a time by its largest",
                    "table": "the numbers that codes stand for, where they are no grid of steps, in their order",
                    "group": "inputs of a row that share a scale; all of them without it",
                },
            ),
            Kind("sampler", _SEAMS + "sampling:Sampler", api=(1, 4), facts=("device",), features=_SAMPLING),
            Kind(
                "scheduler",
                _SEAMS + "scheduler:SchedulerPolicy",
                api=(1, 2),
                features={"starvation_free": "a request waits for a bounded time under a steady stream of others"},
            ),
            Kind("strategy", _SEAMS + "strategy:DecodingStrategy", api=(1, 4)),
        )
    }
)
# (kind, trait) -> (whether a value has the form, the form in words)
TRAIT_FORMS: Mapping[tuple[str, str], tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
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
    }
)
OPTION_OF = {  # kind -> its option in the configuration, where that is called otherwise
    "kvformat": "kv_format", "model": "model_arch", "processor": "processors", "strategy": "strategies",
}  # fmt: skip
RESERVED = ("kvstore", "trimmer")  # groups whose contract is not written yet
ASKED = ("processor", "sampler", "strategy")  # kinds that may declare parameters of requests


@dataclass(frozen=True)
class AtLeast:
    least: float

    def allows(self, value: Any) -> bool:
        return _number(value) and value >= self.least

    def __str__(self) -> str:
        return f"at least {self.least}"


@dataclass(frozen=True)
class AtMost:
    most: float

    def allows(self, value: Any) -> bool:
        return _number(value) and value <= self.most

    def __str__(self) -> str:
        return f"at most {self.most}"


@dataclass(frozen=True)
class Range:
    """Both ends belong to it."""

    least: float
    most: float

    def allows(self, value: Any) -> bool:
        return _number(value) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least} to {self.most}"


@dataclass(frozen=True)
class MultipleOf:
    step: int

    def allows(self, value: Any) -> bool:
        return _number(value) and value > 0 and value % self.step == 0

    def __str__(self) -> str:
        return f"multiples of {self.step}"


@dataclass(frozen=True)
class Any_:
    def allows(self, value: Any) -> bool:
        return True

    def __str__(self) -> str:
        return "anything"


ANY = Any_()


def allows(limit: Any, value: Any) -> bool:
    """Whether a limit allows a value; of a set of values each must be allowed."""
    if isinstance(value, Set):
        return all(allows(limit, v) for v in value)
    return value in limit if isinstance(limit, Set) else limit.allows(value)


def describe(limit: Any) -> str:
    if isinstance(limit, Set):
        numbers = all(_number(v) for v in limit)
        if numbers and len(limit) > 4:
            low, high = min(limit), max(limit)
            step = (high - low) / (len(limit) - 1)
            if step.is_integer() and limit == set(range(low, high + 1, int(step))):
                return f"{low} to {high} in steps of {int(step)}"
        return "{" + ", ".join(str(v) for v in sorted(limit, key=None if numbers else str)) + "}"
    return str(limit)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Reason:
    """Why a candidate is refused: ``what`` did not fit, what was wanted, what it has, what to do about it."""

    what: str
    want: str = ""
    have: str = ""
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: want {self.want}, supports {self.have}" if self.want else self.what
        return f"{text}  ({self.fix})" if self.fix else text


@dataclass(frozen=True)
class Needs:
    """A module that must be installed, at least in ``version``; ``install`` is the command that does it.

    ``dist`` names the distribution whose version counts, where several fill one package (``flash_attn`` is filled by
    two); else it is the one that brings the module's top package.
    """

    module: str
    version: str = ""
    install: str = ""
    dist: str = ""

    def __post_init__(self) -> None:
        if self.version and not self.version[0].isdigit():
            raise ValueError(f"Needs({self.module!r}): version={self.version!r}: want the lowest one, such as '2.1'")

    def missing(self) -> Reason | None:
        if not _installed(self.module):
            return Reason(f"needs {self.module}, which is not installed", fix=self.install)
        if self.version:
            from packaging.version import Version

            have = self.installed_version()
            if have is None:
                return Reason(
                    f"{self.module} has no version", f"at least {self.version}", "an unknown one", self.install
                )
            if Version(have) < Version(self.version):
                return Reason(self.module, f"at least {self.version}", have, self.install)
        return None

    def installed_version(self) -> str | None:
        """The version of the distribution that brings the module; None if that cannot be told."""
        top = self.module.partition(".")[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self.dist or top)
        if self.dist:
            return None
        # Only now: it reads the metadata of every package there is, which takes seconds.
        with contextlib.suppress(Exception):  # some package has broken metadata
            return importlib.metadata.version(importlib.metadata.packages_distributions()[top][0])
        return None


def _installed(module: str) -> bool:
    """Whether a module can be found, without importing the packages that it is in, which may be heavy."""
    try:
        top, *rest = module.split(".")
        spec = importlib.util.find_spec(top)
        for name in rest:
            if spec is None or spec.submodule_search_locations is None:
                return False
            # by its last name: a namespace package would look for its parent among the imported modules
            spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
        return spec is not None
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True)
class PluginQuery:
    """What the engine asks of a plug-in: facts with a value (a set means: each of them), and features wanted."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        parts = [f"{key}={plain(value)}" for key, value in self.facts.items()]
        parts += [f"features={{{', '.join(sorted(self.features))}}}"] if self.features else []
        return ", ".join(parts) or "anything"


@dataclass(frozen=True)
class Spec:
    """What a plug-in says about itself, without importing its implementation.

    ``limits`` gives the values that each fact may have (a set, ``AtLeast``, ``AtMost``, ``Range``, ``MultipleOf`` or
    ``ANY``); a fact that is not listed is refused, and so is a feature that is not in ``features``.  ``limits=ANY``
    leaves the facts unchecked, as for a class without a spec that a user names by ``module:Class``.  ``prefer`` holds
    values for facts that the user left open (the KV block size).  ``traits`` are declarations that the engine reads
    and nobody matches (``graph``: none, decode, mixed).  ``params`` are the parameters of requests that a processor,
    sampler or strategy has of its own.  ``check`` says what limits cannot.
    """

    impl: str
    api: tuple[int, int]
    summary: str
    options: str = ""  # target of a pydantic model with extra="forbid"; "" = the plug-in takes no options
    priority: int = 0
    limits: Any = field(default_factory=dict)  # Mapping of fact -> limit, or ANY
    features: frozenset[str] = frozenset()
    needs: tuple[Needs, ...] = ()
    prefer: Mapping[str, Any] = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=dict)
    params: tuple[Param, ...] = ()
    check: Callable[[PluginQuery], Sequence[Reason]] | None = None

    def __post_init__(self) -> None:
        """TypeError for a field of the wrong form: at once, where its author sees it, not while somebody chooses."""
        limits = {} if self.limits == ANY else self.limits
        for name, well, want in (
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
            if not well:
                raise TypeError(f"Spec {name}={getattr(self, name)!r}: want {want}")
        for fact, limit in limits.items():
            if not isinstance(limit, Set) and not hasattr(limit, "allows"):
                raise TypeError(f"Spec limits[{fact!r}]={limit!r}: want a set, AtLeast, AtMost, Range, MultipleOf, ANY")
        for name, words in [("features", self.features), *((f"limits[{fact!r}]", v) for fact, v in limits.items())]:
            if isinstance(words, Set) and len(words) > 1 and all(isinstance(w, str) and len(w) == 1 for w in words):
                raise TypeError(f"Spec {name}={set(words)!r}: these are the letters of a text; want {{'the text'}}")

    @property
    def reads(self) -> frozenset[str]:
        """Names of the parameters that it declares, for the ``reads`` of its class."""
        return frozenset(param.name for param in self.params)

    @property
    def plain_traits(self) -> dict[str, Any]:
        """The traits that the engine reads: words and numbers."""
        return {name: value for name, value in self.traits.items() if isinstance(value, (str, int, float))}

    def trait_faults(self, kind: Kind) -> list[Reason]:
        """Return a reason for each trait whose value has another form than the seam wants."""
        return [
            Reason(f"trait {name!r}", form[1], repr(value))
            for name, value in self.traits.items()
            if (form := TRAIT_FORMS.get((kind.name, name))) is not None and not form[0](value)
        ]

    @property
    def approximate(self) -> bool:
        """Whether its results are approximate by declaration, so that it is chosen by its name only."""
        return self.traits.get("approximate") is True

    def listed(self, fact: str) -> list[str]:
        """The values of a fact that are served, in order, where the limits list them."""
        limit = self.limits.get(fact) if isinstance(self.limits, Mapping) else None
        return sorted(limit) if isinstance(limit, (set, frozenset)) else []

    def refuse(self, request: PluginQuery, kind: Kind) -> tuple[Reason, ...]:
        """Every reason why this plug-in cannot serve the request; empty if it can."""
        if self.api[0] != kind.api[0] or self.api[1] > kind.api[1]:
            newer = tuple(self.api) > kind.api
            fix = f"written for {'a newer' if newer else 'an older'} minivllm: upgrade {'minivllm' if newer else 'it'}"
            fix += f"; {kind.changed}" if kind.changed and not newer else ""
            return (Reason(CONTRACT, version(kind.api), version(self.api), fix),)
        reasons = self.trait_faults(kind)
        reasons += [
            Reason(key, plain(value), describe(self.limits[key]) if key in self.limits else "nothing (not declared)")
            for key, value in (request.facts.items() if self.limits != ANY else ())
            if key not in self.limits or not allows(self.limits[key], value)
        ]
        reasons += [Reason(f"feature {name!r} not declared") for name in sorted(request.features - self.features)]
        reasons += [reason for needs in self.needs if (reason := needs.missing()) is not None]
        if self.check is not None and not reasons:
            reasons += self.check(request)
            if wrong := [r for r in reasons if not isinstance(r, Reason)]:
                raise TypeError(f"check() gave {wrong[0]!r}: want a list of Reason")
        return tuple(reasons)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _texts(value: Any) -> bool:
    """Return whether a value is a collection of texts, and not a text, which is one of its letters."""
    return isinstance(value, (set, frozenset, tuple, list)) and all(map(_text, value))


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _tuple_of(value: Any, kind: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, kind) for one in value)


def _version(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(type(n) is int for n in value)


def check_seam(seam: str | None) -> str | None:
    """The kind that a user means, by its own name or its option's; PluginError if there is none."""
    kind = next((k for k, option in OPTION_OF.items() if option == seam), seam)
    if kind is not None and kind not in KINDS:
        raise PluginError(f"No seam is called {shown(seam)}.{suggest(kind, KINDS)} There are: {', '.join(KINDS)}.")
    return kind


def version(api: tuple[int, int]) -> str:
    return ".".join(str(n) for n in api)


def plain(value: Any) -> str:
    """A fact as it is shown: a set of one is its member."""
    return str(next(iter(value))) if isinstance(value, Set) and len(value) == 1 else describe(value)


@dataclass(frozen=True)
class Part:
    """A chosen plug-in: the import target, the options, and the name in a configuration.  Plain data, as in JSON."""

    name: str  # "minivllm/sdpa"
    target: str  # "minivllm.plugins.attention.sdpa:Sdpa"
    options: Mapping[str, Any] = field(default_factory=dict)
    options_target: str = ""  # the pydantic model of the options
    features: tuple[str, ...] = ()  # what its spec claims
    traits: Mapping[str, Any] = field(default_factory=dict)  # and declares
    source: str = ""  # "acme 1.0, entry point 'acme_spec:FLASH'": whom an error names

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # JSON knows no tuples
