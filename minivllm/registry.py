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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm.errors import MinivllmError, OptionError, PluginError, describe_error, note_part, shown, suggest
from minivllm.registration.spec import (
    ANY,
    BY_NAME,
    CONTRACT,
    KINDS,
    RESERVED,
    AtLeast,
    AtMost,
    Kind,
    MultipleOf,
    Needs,
    PluginQuery,
    Range,
    Reason,
    Spec,
    check_seam,
)
from minivllm.validation import begins, faults, source_of, sourced

from .registration import discovery, given
from .registration.candidate import Candidate
from .registration.discovery import ENV, LOCAL, STRICT, BrokenEntry, Entry
from .registration.fresh import import_target
from .registration.importing import guarded_import

if TYPE_CHECKING:
    from minivllm.registration.spec import Part

__all__ = [
    "ANY",
    "KINDS",
    "RESERVED",
    "AtLeast",
    "AtMost",
    "Candidate",
    "Catalog",
    "Entry",
    "Kind",
    "MultipleOf",
    "Needs",
    "PluginQuery",
    "Range",
    "Reason",
    "Registry",
    "Selection",
    "Spec",
    "build_part",
    "import_target",
]  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """A decision with its reasons.  ``skipped`` were not even looked at, because an earlier tier could serve."""

    kind: str
    asked: str
    request: PluginQuery
    chosen: Candidate | None
    candidates: tuple[Candidate, ...] = ()
    skipped: tuple[Entry, ...] = ()
    preferred: tuple[str, ...] = ()

    @property
    def supplied(self) -> dict[str, Any]:
        """What the user left open and the chosen plug-in supplies, say the KV block size."""
        spec = self.chosen.spec if self.chosen is not None else None
        left = [f for f in KINDS[self.kind].open if f not in self.request.facts] if spec is not None else []
        return {fact: spec.prefer[fact] for fact in left if spec is not None and fact in spec.prefer}

    @property
    def approximate(self) -> bool:
        """Whether the chosen plug-in declares that its results are approximate."""
        return self.chosen is not None and self.chosen.spec is not None and self.chosen.spec.approximate

    def explain(self) -> str:
        asked = f"{self.asked}, prefer {', '.join(self.preferred)}" if self.preferred else self.asked
        lines = [f"{self.kind} -> {self.chosen.entry.label if self.chosen else 'nothing suitable'}   (asked: {asked})"]
        lines.append(f"  for {self.request}")
        seen = [(c.entry.label, c) for c in self.candidates]
        width = max([len(label) for label, _ in seen] + [len(e.label) for e in self.skipped] + [0])
        for label, c in seen:
            if c is self.chosen:
                lines.append(f"  > {label:{width}}  priority {c.spec.priority if c.spec else 0}")
                lines += ["      approximate: queries attend to some of the keys that they may see"] * self.approximate
                lines += [f"      supplies {fact}={v}: it was left open" for fact, v in self.supplied.items()]
            elif c.suitable:
                lines.append(f"  - {label:{width}}  priority {c.spec.priority if c.spec else 0}: suitable, not needed")
            else:
                lines.append(f"  x {label:{width}}  {'; '.join(map(str, c.reasons))}")
        lines += [f"  . {e.label:{width}}  not looked at: an earlier choice was suitable" for e in self.skipped]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON: what was asked, what was chosen, and the reasons against the others."""
        facts = {fact: sorted(v) if isinstance(v, (set, frozenset)) else v for fact, v in self.request.facts.items()}
        return {
            "seam": self.kind,
            "asked": self.asked,
            "preferred": list(self.preferred),
            "facts": facts,
            "features": sorted(self.request.features),
            "chosen": self.chosen.entry.label if self.chosen is not None else None,
            "approximate": self.approximate,
            "supplied": self.supplied,
            "candidates": [c.as_dict() for c in self.candidates],
            "skipped": [e.label for e in self.skipped],
        }

    def widen(self, registry: Registry) -> Selection:
        """The same choice with all other plug-ins looked at too."""
        seen = {c.entry for c in self.candidates}
        more = [registry._consider(e, self.request) for e in registry.entries if e not in seen]
        return replace(self, candidates=(*self.candidates, *more), skipped=())

    def without(self, error: PluginError) -> Selection:
        """The same with the chosen plug-in refused after all: its implementation is broken."""
        broken = tuple(replace(c, reasons=(Reason(str(error)),)) if c is self.chosen else c for c in self.candidates)
        return replace(self, chosen=None, candidates=broken)

    def require(self) -> Candidate:
        """The chosen candidate; PluginError (with this object as its ``selection``) if nothing is suitable, OptionError
        if that was asked for by its name."""
        if self.chosen is not None:
            return self.chosen
        if self.asked != "auto" and len(self.candidates) == 1:
            refused = self.candidates[0]
            who = f"{self.kind} {shown(refused.entry.label)}" if refused.entry.builtin else str(refused.entry)
            text = f"{who} does not fit: {'; '.join(map(str, refused.reasons))}"
            old = any(reason.what == CONTRACT for reason in refused.reasons)
            error = PluginError(text) if old else OptionError(text)
        else:
            error = PluginError(self.explain())
        error.selection = self  # type: ignore[attr-defined]
        raise error


class Registry:
    """The plug-ins of one kind.  Immutable; ``entries`` are built-ins first, then by distribution and name."""

    def __init__(
        self, kind: Kind, entries: Iterable[Entry], allow_targets: Sequence[str] = (), strict: bool = False
    ) -> None:
        self.kind, self.allow_targets, self.strict = kind, tuple(allow_targets), strict
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
            ways = "".join(f"\n    name = {shown(e.label)}" for e in usable)
            raise PluginError(
                f"{self.kind.name} {shown(name)} is offered by {len(usable)} packages. Say which one:{ways}"
            )
        return usable[0]

    def _unknown(self, name: str) -> str:
        known = sorted({e.name for e in self.entries} | {e.label for e in self.entries if not e.builtin})
        dist, slash, bare = name.rpartition("/")
        hint = suggest(f"{discovery.normal(dist)}{slash}{bare}", known)
        installed = ", ".join(e.name if e.builtin else e.label for e in self.entries) or "none"
        return (
            f"No {self.kind.name} is called {shown(name)}.{hint}\n"
            f"  Installed: {installed}\n"
            f"  A package adds one with the entry-point group {shown(self.kind.group)}; "
            "an experiment can say 'module:Class'."
        )

    def _target(self, target: str) -> Entry:
        if given.is_given(target):
            if (one := given.find(target)) is None:
                who = f"{self.kind.name}: {shown(target)} was a class of the program that wrote this"
                raise PluginError(f"{who}; {given.WANTED}")
            return Entry(self.kind.name, one.name, target, LOCAL, "-")
        module, _, name = target.partition(":")
        if module.endswith(".py") or "/" in module:
            stem = module.rpartition("/")[2].removesuffix(".py")
            want = f"want '{stem}:{name}' and --allow-target {stem}, in the folder of {stem}.py"
            raise PluginError(f"{self.kind.name}: {shown(target)} is a path, and a target names a module: {want}")
        if not self._allowed(target):
            raise PluginError(
                f"{self.kind.name}: {shown(target)} is a target, and a target runs code. "
                f"Add --allow-target {module} if you trust it (allow_targets=[{shown(module)}] in Python)"
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
            its = given.is_given(entry.target)
            if its:
                real = entry.target
            elif not self._allowed(real):
                raise PluginError(
                    f"{self.kind.name}: {shown(entry.target)} is really {shown(real)}, which is not allowed. "
                    f"Add --allow-target {found.__module__} if you trust it (allow_targets=[...] in Python)"
                )
            own = getattr(found, "spec", None)
            summary = (found.__doc__ or "").partition("\n")[0]
            if isinstance(own, Spec):
                return replace(own, impl=real) if its else own
            return Spec(real, self.kind.api, summary, limits=ANY)
        raise PluginError(f"{entry}: {shown(entry.target)} is a {type(found).__name__}, not a minivllm Spec")

    def _judge(self, entry: Entry, request: PluginQuery) -> Candidate:
        """Stage two for one entry.  PluginError if its spec, or the check in it, is broken."""
        if entry.blocked:
            return Candidate(entry, None, (Reason(f"blocked by {ENV}"),))
        spec = self.spec(entry)
        try:
            reasons = spec.refuse(request, self.kind)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # as when it is imported: a panic in Rust too
            raise PluginError(f"{entry}: its spec cannot answer: {describe_error(exc)}") from exc
        return Candidate(entry, spec, reasons)

    def _consider(self, entry: Entry, request: PluginQuery) -> Candidate:
        """The same for a plug-in that nobody asked for: its fault is a reason, unless MINIVLLM_STRICT_PLUGINS=1."""
        try:
            found = self._judge(entry, request)
            by_name = found.suitable and found.spec is not None and found.spec.approximate
            return replace(found, reasons=(Reason(BY_NAME),)) if by_name else found
        except PluginError as exc:
            if self.strict:
                raise PluginError(f"{exc}\n  (Nobody asked for it; it is an error because of {STRICT}=1.)") from exc
            return Candidate(entry, None, (Reason(str(exc).partition("\n")[0]),))

    def select(
        self, request: PluginQuery, name: str = "auto", prefer: Sequence[str] = (), everything: bool = False
    ) -> Selection:
        """Choose one.  A name asked for never falls back to another.  ``auto`` takes the best of the built-ins, and
        looks at third parties only if none can serve; with ``prefer`` it takes the first of that list that can, where
        a plug-in that is not installed or does not fit is passed over, and one that is broken is an error.
        ``everything`` looks at all the rest too, for ``explain``; it never changes the choice."""
        one: Candidate | None
        if name != "auto":
            entry = self.find(name)
            one = self._judge(entry, request)
            looked, rest = [one], [e for e in self.entries if e != entry]
        else:
            looked, rest = self._auto(request, prefer)
            able = [c for c in looked if c.suitable]
            one = (able[0] if prefer else min(able, key=lambda c: c.rank)) if able else None
        chosen = one if one is not None and one.suitable else None
        skipped = tuple(rest) if chosen is not None and name == "auto" else ()
        made = Selection(self.kind.name, name, request, chosen, tuple(looked), skipped, tuple(prefer))
        return made.widen(self) if everything else made

    def _auto(self, request: PluginQuery, prefer: Sequence[str]) -> tuple[list[Candidate], list[Entry]]:
        looked: list[Candidate] = []
        if prefer:
            for name in prefer:
                looked.append(self._preferred(name, request))
                if looked[-1].suitable:
                    break
        else:
            for own in (True, False):
                looked += [self._consider(e, request) for e in self.entries if e.builtin is own]
                if any(c.suitable for c in looked):
                    break
        return looked, [e for e in self.entries if e not in {c.entry for c in looked}]

    def installed(self, name: str) -> bool:
        """Whether ``name`` or ``dist/name`` is offered, blocked or not; a ``module:Class`` always is."""
        return ":" in name or any(name in (e.name, e.label) for e in self.entries)

    def _preferred(self, name: str, request: PluginQuery) -> Candidate:
        """A name of a list.  What is not installed or blocked is passed over, but a misspelt name is told."""
        if self.installed(name):
            found = [e for e in self.entries if name in (e.name, e.label)]
            return self._judge(found[0] if found and all(e.blocked for e in found) else self.find(name), request)
        dist, slash, _ = name.rpartition("/")
        near, here = suggest(name, {e.name for e in self.entries}, 0.75), {e.dist for e in self.entries}
        if discovery.normal(dist) in here if slash else near:
            hint = "In a list of names to prefer, one that is not installed is written 'dist/name'."
            raise PluginError(f"{self._unknown(name)}\n  {hint}")
        return Candidate(Entry(self.kind.name, name, "", "", "-"), None, NOT_INSTALLED)

    def load(self, candidate: Candidate) -> type:
        """Import the implementation and check that it fills the seam.  PluginError names package, version and entry
        point."""
        assert candidate.spec is not None
        import_target(self.kind.base)  # and torch with it, which is not the plug-in's time
        found = _import(candidate.entry, candidate.spec.impl)
        check_base(self.kind, candidate.entry, found)
        return found

    def options_model(self, entry: Entry, spec: Spec) -> Any:
        """The pydantic model of a plug-in's options.  PluginError if it cannot be imported or is none."""
        from pydantic import BaseModel

        model = _import(entry, spec.options)
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise PluginError(f"{entry}: {shown(spec.options)} is no pydantic model of its options")
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
                more = (
                    "; a class of yours has them by a spec (docs/plugins.md)" if candidate.entry.dist == "local" else ""
                )
                raise OptionError(f"{place}{label} takes no options: {at} has {', '.join(map(repr, values))}{more}")
            return None
        from pydantic import ValidationError

        model = self.options_model(candidate.entry, candidate.spec)
        try:
            return model(**values)
        except ValidationError as exc:
            lines = "".join(f"\n  {line}" for line in sourced(faults(exc, model, values, at), origins))
            raise OptionError(f"Wrong options for {label}:{lines}") from exc
        except Exception as exc:
            text = (
                f"{candidate.entry}: {shown(candidate.spec.options)} cannot take options: {type(exc).__name__}: {exc}"
            )
            raise PluginError(text) from exc


NOT_INSTALLED = (Reason("not installed"),)


class Catalog(Mapping[str, Registry]):
    """One registry per kind.  Made once from package metadata, never changed, handed to whoever chooses."""

    def __init__(
        self,
        entries: Iterable[Entry],
        allow_targets: Sequence[str] = (),
        faults: Iterable[BrokenEntry] = (),
        strict: bool = False,
    ) -> None:
        self.entries, self.allow_targets = tuple(entries), tuple(allow_targets)
        self.faults, self.strict = tuple(faults), strict
        self._registries = {
            name: Registry(kind, (e for e in self.entries if e.kind == name), allow_targets, strict)
            for name, kind in KINDS.items()
        }
        self.reserved = tuple(e for e in self.entries if e.kind in RESERVED)

    @classmethod
    def discover(
        cls, environ: Mapping[str, str] | None = None, entry_points: Any = None, allow_targets: Sequence[str] = ()
    ) -> Catalog:
        """Built-ins and what installed packages offer; runs no code of theirs.  ``entry_points`` is what
        ``importlib.metadata.entry_points()`` returns; without it the metadata is asked, once a process."""
        entries, faults, strict = discovery.find(environ, entry_points)
        return cls(entries, allow_targets, faults, strict)

    def overlay(self, kind: str, name: str, target: str) -> Catalog:
        """A copy in which ``target`` is offered too, as ``local/name``: for experiments and tests in Python."""
        entry = Entry(self[kind].kind.name, name, target, LOCAL, "-")
        allowed = (*self.allow_targets, target.partition(":")[0])
        return Catalog((*self.entries, entry), allowed, self.faults, self.strict)

    def allow(self, targets: Sequence[str]) -> Catalog:
        """A copy in which ``module:Class`` targets of these modules may be chosen."""
        return Catalog(self.entries, (*self.allow_targets, *targets), self.faults, self.strict)

    def __getitem__(self, kind: str) -> Registry:
        if kind in RESERVED:
            raise PluginError(
                f"The seam {shown(kind)} is reserved: this version of minivllm has no contract for it yet."
            )
        check_seam(kind)
        return self._registries[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._registries

    def __iter__(self) -> Iterator[str]:
        return iter(self._registries)

    def __len__(self) -> int:
        return len(self._registries)


def check_base(kind: Kind, entry: Entry | str, found: Any) -> None:
    """PluginError unless ``found`` is a subclass of the kind's base class that implements all it must."""
    base = import_target(kind.base)
    if not (isinstance(found, type) and issubclass(found, base)):
        what = found.__qualname__ if isinstance(found, type) else f"a {type(found).__name__}"
        raise PluginError(f"{entry}: {what} is not a subclass of {kind.base.replace(':', '.')}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise PluginError(f"{entry}: {found.__qualname__} does not implement {', '.join(missing)}")


def build_part(kind: str, part: Part, *context: Any) -> Any:
    """Make a chosen plug-in: ``Class(options, *context)``, or ``Class()`` for the model seam, which takes nothing.

    Works in any process that has the packages installed; PluginError names the plug-in if the import fails, the class
    does not fill the seam, or it cannot be made.
    """
    who = f"{kind} {shown(part.name)} ({part.source})" if part.source else f"{kind} {shown(part.name)}"
    found = guarded_import(who, part.target, part.source)
    check_base(KINDS[kind], who, found)
    note_part(f"{kind} {part.name}", found)
    model = guarded_import(who, part.options_target, part.source) if part.options_target else None
    try:
        options = model(**part.options) if model is not None else None
        made = found() if kind == "model" and options is None else found(options, *context)
        reads: Any = getattr(made, "reads", None)
        if isinstance(reads, str):
            raise PluginError(f"{who}: reads={shown(reads)} is a text: want a frozenset of names, {{{shown(reads)}}}")
        return made
    except (MinivllmError, KeyboardInterrupt):
        raise
    except BaseException as exc:  # SystemExit too, as when it is imported
        raise PluginError(f"{who} could not be made: {describe_error(exc)}") from exc


def _import(entry: Entry, target: str) -> Any:
    try:
        return guarded_import(str(entry), target, entry.source)
    except PluginError as exc:
        if hint := discovery.version_hint(entry):
            raise PluginError(f"{exc} ({hint})") from exc.__cause__
        raise
