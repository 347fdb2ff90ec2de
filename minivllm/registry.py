"""Find plug-ins by name, choose one of a kind, and say why.

Three stages, each heavier than the one before, each run only when it is needed::

    Entry   package metadata          name, distribution, version, target      no code runs
    Spec    a small module            limits, features, needs, options         no torch
    class   the implementation        imported only once it is chosen          heavy

A ``Catalog`` holds one ``Registry`` per kind of plug-in and never changes.  ``Registry.select`` is a function of the
request and the specs: it returns a ``Selection`` with a reason for every candidate that was refused, and what
``minivllm explain`` prints is that same object.  What a spec does not list is refused, so that a new ability of the
engine cannot silently run on a plug-in that has never heard of it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm.errors import MinivllmError, PluginError, suggest
from minivllm.spec import (
    ANY,
    KINDS,
    RESERVED,
    AtLeast,
    AtMost,
    Kind,
    MultipleOf,
    Needs,
    Range,
    Reason,
    Request,
    Spec,
    check_seam,
)  # fmt: skip
from minivllm.validation import begins, faults, source_of, sourced

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Part

__all__ = [
    "ANY", "KINDS", "RESERVED", "AtLeast", "AtMost", "Candidate", "Catalog", "Entry", "Kind", "MultipleOf", "Needs",
    "Range", "Reason", "Registry", "Request", "Selection", "Spec", "build_part",
    "import_target",
]  # fmt: skip

BUILTIN = "minivllm"  # the distribution that the plug-ins of this package belong to
LOCAL = "local"  # and the one of targets that a user named directly
ENV = "MINIVLLM_PLUGINS"
GROUP = "minivllm"


@dataclass(frozen=True)
class Entry:
    """A plug-in as package metadata knows it."""

    kind: str
    name: str
    target: str
    dist: str
    version: str
    blocked: bool = False

    @property
    def label(self) -> str:
        return f"{self.dist}/{self.name}" if self.dist else self.name

    @property
    def builtin(self) -> bool:
        return self.dist == BUILTIN

    def __str__(self) -> str:
        return f"{self.kind} {self.label!r} ({self.dist} {self.version})"


@dataclass(frozen=True)
class Candidate:
    """An entry that was looked at; it can serve if there is no reason against it."""

    entry: Entry
    spec: Spec | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def suitable(self) -> bool:
        return self.spec is not None and not self.reasons

    @property
    def rank(self) -> tuple[int, str]:
        return (-(self.spec.priority if self.spec else 0), self.entry.label)


@dataclass(frozen=True)
class Selection:
    """A decision with its reasons.  ``skipped`` were not even looked at, because an earlier tier could serve."""

    kind: str
    asked: str
    request: Request
    chosen: Candidate | None
    candidates: tuple[Candidate, ...] = ()
    skipped: tuple[Entry, ...] = ()
    preferred: tuple[str, ...] = ()

    def explain(self) -> str:
        asked = f"{self.asked}, prefer {', '.join(self.preferred)}" if self.preferred else self.asked
        lines = [f"{self.kind} -> {self.chosen.entry.label if self.chosen else 'nothing suitable'}   (asked: {asked})"]
        lines.append(f"  for {self.request}")
        seen = [(c.entry.label, c) for c in self.candidates]
        width = max([len(label) for label, _ in seen] + [len(e.label) for e in self.skipped] + [0])
        for label, c in seen:
            if c is self.chosen:
                lines.append(f"  > {label:{width}}  priority {c.spec.priority if c.spec else 0}")
            elif c.suitable:
                lines.append(f"  - {label:{width}}  priority {c.spec.priority if c.spec else 0}: suitable, not needed")
            else:
                lines.append(f"  x {label:{width}}  {'; '.join(map(str, c.reasons))}")
        lines += [f"  . {e.label:{width}}  not looked at: an earlier choice was suitable" for e in self.skipped]
        return "\n".join(lines)

    def require(self) -> Candidate:
        """The chosen candidate; PluginError (with this object as its ``selection``) if nothing is suitable."""
        if self.chosen is not None:
            return self.chosen
        if self.asked != "auto" and len(self.candidates) == 1:
            refused = self.candidates[0]
            text = f"{self.kind} {refused.entry.label!r} does not fit: {'; '.join(map(str, refused.reasons))}"
        else:
            text = self.explain()
        error = PluginError(text)
        error.selection = self  # type: ignore[attr-defined]
        raise error


class Registry:
    """The plug-ins of one kind.  Immutable; ``entries`` are built-ins first, then by distribution and name."""

    def __init__(self, kind: Kind, entries: Iterable[Entry], allow_targets: Sequence[str] = ()) -> None:
        self.kind, self.allow_targets = kind, tuple(allow_targets)
        self.entries = tuple(sorted(entries, key=lambda e: (not e.builtin, e.dist, e.name)))

    def find(self, name: str) -> Entry:
        """The entry of ``name``, ``dist/name`` or an allowed ``module:Class``; imports nothing."""
        if ":" in name:
            return self._target(name)
        found = [e for e in self.entries if name in (e.name, e.label)]
        if not found:
            raise PluginError(self._unknown(name))
        own = [e for e in found if e.builtin and e.name == name]
        usable = own or [e for e in found if not e.blocked]
        if not usable:
            raise PluginError(f"{found[0]} is blocked by {ENV}.")
        if len(usable) > 1:
            ways = "".join(f"\n    name = {e.label!r}" for e in usable)
            raise PluginError(f"{self.kind.name} {name!r} is offered by {len(usable)} packages. Say which one:{ways}")
        return usable[0]

    def _unknown(self, name: str) -> str:
        known = sorted({e.name for e in self.entries} | {e.label for e in self.entries if not e.builtin})
        hint = suggest(name, known)
        installed = ", ".join(e.name if e.builtin else e.label for e in self.entries) or "none"
        return (
            f"No {self.kind.name} is called {name!r}.{hint}\n"
            f"  Installed: {installed}\n"
            f"  A package adds one with the entry-point group {self.kind.group!r}; "
            "an experiment can say 'module:Class'."
        )

    def _target(self, target: str) -> Entry:
        if not self._allowed(target):
            module = target.partition(":")[0]
            raise PluginError(
                f"{self.kind.name}: {target!r} is a target, and a target runs code. "
                f"Add --allow-target {module} if you trust it (allow_targets=[{module!r}] in Python)"
            )
        return Entry(self.kind.name, target, target, LOCAL, "-")

    def _allowed(self, target: str) -> bool:
        module = target.partition(":")[0]
        return any(target == a or module == a or module.startswith(a + ".") for a in self.allow_targets)

    def spec(self, entry: Entry) -> Spec:
        """Import the spec of an entry.  PluginError names package, version and target."""
        found = _import(entry, entry.target)
        if isinstance(found, Spec):
            return found
        if entry.dist == LOCAL and isinstance(found, type):
            real = f"{found.__module__}:{found.__qualname__}"
            if not self._allowed(real):
                raise PluginError(
                    f"{self.kind.name}: {entry.target!r} is really {real!r}, which is not allowed. "
                    f"Add --allow-target {found.__module__} if you trust it (allow_targets=[...] in Python)"
                )
            own = getattr(found, "spec", None)
            summary = (found.__doc__ or "").partition("\n")[0]
            return own if isinstance(own, Spec) else Spec(real, self.kind.api, summary, limits=ANY)
        raise PluginError(f"{entry}: {entry.target!r} is a {type(found).__name__}, not a minivllm Spec")

    def _consider(self, entry: Entry, request: Request) -> Candidate:
        """Stage two for one entry; a fault of a plug-in that nobody asked for is a reason, not an exception."""
        if entry.blocked:
            return Candidate(entry, None, (Reason(f"blocked by {ENV}"),))
        try:
            spec = self.spec(entry)
        except PluginError as exc:
            return Candidate(entry, None, (Reason(str(exc).partition("\n")[0]),))
        return Candidate(entry, spec, spec.refuse(request, self.kind))

    def select(
        self, request: Request, name: str = "auto", prefer: Sequence[str] = (), everything: bool = False
    ) -> Selection:
        """Choose one.  A name asked for never falls back to another.  ``auto`` takes the best of the built-ins, and
        looks at third parties only if none can serve; with ``prefer`` it takes the first of that list that can.
        ``everything`` looks at all the rest too, for ``explain``; it never changes the choice."""
        one: Candidate | None
        if name != "auto":
            entry = self.find(name)
            spec = self.spec(entry)
            one = Candidate(entry, spec, spec.refuse(request, self.kind))
            looked, rest = [one], [e for e in self.entries if e != entry]
        else:
            looked, rest = self._auto(request, prefer)
            able = [c for c in looked if c.suitable]
            one = (able[0] if prefer else min(able, key=lambda c: c.rank)) if able else None
        if everything:
            looked, rest = looked + [self._consider(e, request) for e in rest], []
        chosen = one if one is not None and one.suitable else None
        skipped = tuple(rest) if chosen is not None and name == "auto" else ()
        return Selection(self.kind.name, name, request, chosen, tuple(looked), skipped, tuple(prefer))

    def _auto(self, request: Request, prefer: Sequence[str]) -> tuple[list[Candidate], list[Entry]]:
        looked: list[Candidate] = []
        for tier in self._tiers(prefer):
            for entry in tier:
                looked.append(self._consider(entry, request) if entry.target else Candidate(entry, None, NOT_INSTALLED))
            if any(c.suitable for c in looked):
                break
        return looked, [e for e in self.entries if e not in {c.entry for c in looked}]

    def _tiers(self, prefer: Sequence[str]) -> list[list[Entry]]:
        if not prefer:
            return [[e for e in self.entries if e.builtin], [e for e in self.entries if not e.builtin]]
        return [[self._preferred(name)] for name in prefer]

    def installed(self, name: str) -> bool:
        """Whether ``name`` or ``dist/name`` is offered, blocked or not; a ``module:Class`` always is."""
        return ":" in name or any(name in (e.name, e.label) for e in self.entries)

    def _preferred(self, name: str) -> Entry:
        """A name of a list.  What is not installed or blocked is passed over, but a misspelt name is told."""
        if self.installed(name):
            found = [e for e in self.entries if name in (e.name, e.label)]
            return found[0] if found and all(e.blocked for e in found) else self.find(name)
        dist, slash, _ = name.rpartition("/")
        near, here = suggest(name, {e.name for e in self.entries}, 0.75), {e.dist for e in self.entries}
        if _normal(dist) in here if slash else near:
            hint = "In a list of names to prefer, one that is not installed is written 'dist/name'."
            raise PluginError(f"{self._unknown(name)}\n  {hint}")
        return Entry(self.kind.name, name, "", "", "-")

    def load(self, candidate: Candidate) -> type:
        """Import the implementation and check that it fills the seam."""
        assert candidate.spec is not None
        found = _import(candidate.entry, candidate.spec.impl)
        check_base(self.kind, candidate.entry, found)
        return found

    def options_model(self, entry: Entry, spec: Spec) -> Any:
        """The pydantic model of a plug-in's options.  PluginError if it cannot be imported or is none."""
        from pydantic import BaseModel

        model = _import(entry, spec.options)
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise PluginError(f"{entry}: {spec.options!r} is no pydantic model of its options")
        return model

    def options(
        self, candidate: Candidate, values: Mapping[str, Any], at: str = "", origins: Mapping[str, str] | None = None
    ) -> Any:
        """The validated options (a pydantic model), or None for a plug-in that has none.  ``at`` is the path to the
        values in the configuration and ``origins`` says where each of its leaves came from."""
        assert candidate.spec is not None
        label, at, origins = candidate.entry.label, at or f"{self.kind.name}.options", origins or {}
        if not candidate.spec.options:
            if values:
                place = begins(source_of(origins, at))
                raise PluginError(f"{place}{label} takes no options: {at} has {', '.join(map(repr, values))}")
            return None
        from pydantic import ValidationError

        model = self.options_model(candidate.entry, candidate.spec)
        try:
            return model(**values)
        except ValidationError as exc:
            lines = "".join(f"\n  {line}" for line in sourced(faults(exc, model, values, at), origins))
            raise PluginError(f"Wrong options for {label}:{lines}") from exc


NOT_INSTALLED = (Reason("not installed"),)


class Catalog(Mapping[str, Registry]):
    """One registry per kind.  Made once from package metadata, never changed, handed to whoever chooses."""

    def __init__(self, entries: Iterable[Entry], allow_targets: Sequence[str] = ()) -> None:
        self.entries, self.allow_targets = tuple(entries), tuple(allow_targets)
        self._registries = {
            name: Registry(kind, (e for e in self.entries if e.kind == name), allow_targets)
            for name, kind in KINDS.items()
        }
        self.reserved = tuple(e for e in self.entries if e.kind in RESERVED)

    @classmethod
    def discover(
        cls, environ: Mapping[str, str] | None = None, entry_points: Any = None, allow_targets: Sequence[str] = ()
    ) -> Catalog:
        """Built-ins and what installed packages offer; runs no code of theirs.  ``entry_points`` is what
        ``importlib.metadata.entry_points()`` returns, which takes 10 ms and is called once."""
        from minivllm import __version__
        from minivllm.plugins.specs import BUILTINS

        offered = importlib.metadata.entry_points() if entry_points is None else entry_points
        entries = {
            (kind, BUILTIN, name): Entry(kind, name, target, BUILTIN, __version__) for kind, name, target in BUILTINS
        }
        for kind in (*KINDS, *RESERVED):
            for point in offered.select(group=f"{GROUP}.{kind}"):
                dist = _normal(point.dist.name) if point.dist is not None else "unknown"
                version = point.dist.version if point.dist is not None else "-"
                target = point.value.partition("[")[0].strip()  # extras are no business of ours
                # an editable install beside a wheel offers the same name twice: it is one plug-in
                entries.setdefault((kind, dist, point.name), Entry(kind, point.name, target, dist, version))
        return cls(_block(entries.values(), os.environ if environ is None else environ), allow_targets)

    def overlay(self, kind: str, name: str, target: str) -> Catalog:
        """A copy in which ``target`` is offered too, as ``local/name``: for experiments and tests in Python."""
        entry = Entry(self[kind].kind.name, name, target, LOCAL, "-")
        return Catalog((*self.entries, entry), (*self.allow_targets, target.partition(":")[0]))

    def allow(self, targets: Sequence[str]) -> Catalog:
        """A copy in which ``module:Class`` targets of these modules may be chosen."""
        return Catalog(self.entries, (*self.allow_targets, *targets))

    def __getitem__(self, kind: str) -> Registry:
        if kind in RESERVED:
            raise PluginError(f"The seam {kind!r} is reserved: this version of minivllm has no contract for it yet.")
        check_seam(kind)
        return self._registries[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._registries

    def __iter__(self) -> Iterator[str]:
        return iter(self._registries)

    def __len__(self) -> int:
        return len(self._registries)


def _block(entries: Iterable[Entry], environ: Mapping[str, str]) -> list[Entry]:
    """Mark what MINIVLLM_PLUGINS shuts out: unset = all visible, empty = none, ``a,b`` = only these distributions,
    ``-a`` = all but this one.  Built-ins are always visible."""
    entries, text = list(entries), environ.get(ENV)
    if text is None:
        return entries
    words = [w for w in re.split(r"[,\s]+", text) if w]
    only = {_normal(w) for w in words if not w.startswith("-")}
    without = {_normal(w[1:]) for w in words if w.startswith("-")}
    dists = {e.dist for e in entries if not e.builtin}
    if unknown := sorted((only | without) - dists):
        raise PluginError(
            f"{ENV} names {', '.join(unknown)}, but no such package offers a minivllm plugin. "
            f"Installed: {', '.join(sorted(dists)) or 'none'}."
        )
    shut = without if without and not only else (dists - only) | without
    return [replace(e, blocked=not e.builtin and e.dist in shut) for e in entries]


def _normal(dist: str) -> str:
    return re.sub(r"[-_.]+", "-", dist).lower()  # PEP 503


def check_base(kind: Kind, entry: Entry | str, found: Any) -> None:
    """PluginError unless ``found`` is a subclass of the kind's base class."""
    base = import_target(kind.base)
    if not (isinstance(found, type) and issubclass(found, base)):
        what = found.__qualname__ if isinstance(found, type) else f"a {type(found).__name__}"
        raise PluginError(f"{entry}: {what} is not a subclass of {kind.base.replace(':', '.')}")


def import_target(target: str) -> Any:
    """Import ``package.module:Name`` (or ``:Name.attribute``).  The exceptions of the import pass through."""
    module, _, path = target.partition(":")
    if not path or not module:
        raise ImportError(f"{target!r} is not of the form 'package.module:Name'")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def build_part(kind: str, part: Part, *context: Any) -> Any:
    """Make a chosen plug-in: ``Class(options, *context)``, or ``Class()`` for the model seam, which takes nothing.

    Works in any process that has the packages installed; PluginError names the plug-in if the import fails, the class
    does not fill the seam, or it cannot be made.
    """
    try:
        found = import_target(part.target)
        options = import_target(part.options_target)(**part.options) if part.options_target else None
    except (Exception, SystemExit) as exc:
        text = f"{kind} {part.name!r} could not be imported from {part.target!r}: {type(exc).__name__}: {exc}"
        raise PluginError(text) from exc
    check_base(KINDS[kind], f"{kind} {part.name!r}", found)
    try:
        return found() if kind == "model" and options is None else found(options, *context)
    except MinivllmError:
        raise
    except Exception as exc:
        raise PluginError(f"{kind} {part.name!r} could not be made: {type(exc).__name__}: {exc}") from exc


def _import(entry: Entry, target: str) -> Any:
    # SystemExit too: a module that calls sys.exit() when imported must not end the engine without a word
    try:
        return import_target(target)
    except (Exception, SystemExit) as exc:
        raise PluginError(f"{entry} could not be imported from {target!r}: {type(exc).__name__}: {exc}") from exc
