"""Find plug-ins by name, choose one for a seam, and explain the choice.

There are three stages.  Each is slower than the one before it, and runs only if it is needed::

    Entry   package metadata          name, distribution, version, target      no code runs
    Spec    a small module            limits, features, needs, options         no torch
    class   the implementation        imported only once it is chosen          heavy

A ``Catalog`` holds one ``Registry`` for each kind of plug-in and never changes.  ``Registry.select`` is a function of
the request and the specs.  It returns a ``Selection`` with a reason for each refused candidate; ``minivllm explain``
prints this object.  A request for anything that a spec does not list is refused, so that a new ability of the engine
cannot run on a plug-in that was written without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm.errors import (
    MinivllmError,
    OptionError,
    PluginError,
    describe_error,
    from_signal,
    note_part,
    shown,
    suggest,
)
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
    """A choice with its reasons.  The specs of ``skipped`` entries were not read, because an earlier candidate was
    suitable."""

    kind: str
    requested: str
    request: PluginQuery
    chosen: Candidate | None
    candidates: tuple[Candidate, ...] = ()
    skipped: tuple[Entry, ...] = ()
    preferred: tuple[str, ...] = ()

    @property
    def supplied(self) -> dict[str, Any]:
        """Return the values that the chosen plug-in supplies for facts that the user left open, such as the KV block
        size."""
        spec = self.chosen.spec if self.chosen is not None else None
        if spec is None:
            return {}
        unset = [fact for fact in KINDS[self.kind].open if fact not in self.request.facts]
        return {fact: spec.prefer[fact] for fact in unset if fact in spec.prefer}

    @property
    def approximate(self) -> bool:
        """Return whether the chosen plug-in declares that its results are approximate."""
        return self.chosen is not None and self.chosen.spec is not None and self.chosen.spec.approximate

    def explain(self) -> str:
        """Return the choice as text: a line for each candidate, with the reasons against it."""
        requested = f"{self.requested}, prefer {', '.join(self.preferred)}" if self.preferred else self.requested
        chosen = self.chosen.entry.label if self.chosen else "nothing suitable"
        lines = [f"{self.kind} -> {chosen}   (asked: {requested})", f"  for {self.request}"]
        entries = [*(c.entry for c in self.candidates), *self.skipped]
        width = max([len(e.label) for e in entries], default=0)
        for c in self.candidates:
            label = f"{c.entry.label:{width}}"
            if c is self.chosen:
                lines.append(f"  > {label}  priority {c.priority}")
                if self.approximate:
                    lines.append("      approximate: queries attend to some of the keys that they may see")
                lines += [f"      supplies {fact}={v}: it was left open" for fact, v in self.supplied.items()]
            elif c.suitable:
                lines.append(f"  - {label}  priority {c.priority}: suitable, not needed")
            else:
                lines.append(f"  x {label}  {'; '.join(map(str, c.reasons))}")
        lines += [f"  . {e.label:{width}}  not looked at: an earlier choice was suitable" for e in self.skipped]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as JSON values: the request, the chosen plug-in, and the reasons against the others."""
        facts = {fact: sorted(v) if isinstance(v, (set, frozenset)) else v for fact, v in self.request.facts.items()}
        return {
            "seam": self.kind,
            "asked": self.requested,
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
        """Return the choice with the reasons against the skipped plug-ins added."""
        seen = {c.entry for c in self.candidates}
        more = [registry._consider(e, self.request) for e in registry.entries if e not in seen]
        return replace(self, candidates=(*self.candidates, *more), skipped=())

    def without(self, error: PluginError) -> Selection:
        """Return the selection without its chosen plug-in, whose implementation is broken."""
        broken = tuple(replace(c, reasons=(Reason(str(error)),)) if c is self.chosen else c for c in self.candidates)
        return replace(self, chosen=None, candidates=broken)

    def require(self) -> Candidate:
        """Return the chosen candidate.

        If nothing is suitable, raise PluginError, or OptionError if the user named the plug-in.  Its attribute
        ``selection`` is this object.
        """
        if self.chosen is not None:
            return self.chosen
        if self.requested != "auto" and len(self.candidates) == 1:
            refused = self.candidates[0]
            entry = refused.entry
            label = f"{self.kind} {shown(entry.label)}" if entry.builtin else str(entry)
            text = f"{label} does not fit: {'; '.join(map(str, refused.reasons))}"
            other_version = any(reason.what == CONTRACT for reason in refused.reasons)
            error = PluginError(text) if other_version else OptionError(text)
        else:
            error = PluginError(self.explain())
        error.selection = self  # type: ignore[attr-defined]
        raise error


class Registry:
    """The plug-ins of one kind.  It never changes.  ``entries`` lists built-in plug-ins first, then others by
    distribution and name."""

    def __init__(
        self, kind: Kind, entries: Iterable[Entry], allow_targets: Sequence[str] = (), strict: bool = False
    ) -> None:
        self.kind, self.allow_targets, self.strict = kind, tuple(allow_targets), strict
        self.entries = tuple(sorted(entries, key=lambda e: (not e.builtin, e.dist, e.name)))

    def find(self, name: str) -> Entry:
        """Return the entry called ``name``, ``dist/name`` or ``module:Class`` (an allowed target).  Import nothing."""
        if ":" in name:
            return self._target(name)
        found = [e for e in self.entries if name in (e.name, e.label)]
        if not found:
            raise PluginError(self._unknown(name))
        builtin = [e for e in found if e.builtin and e.name == name]
        usable = builtin or [e for e in found if not e.blocked]
        if not usable:
            raise PluginError(f"{found[0]} is blocked by {ENV}; change or unset this environment variable.")
        if len(usable) > 1:
            labels = "".join(f"\n    name = {shown(e.label)}" for e in usable)
            raise PluginError(
                f"{self.kind.name} {shown(name)} is offered by {len(usable)} packages. Say which one:{labels}"
            )
        return usable[0]

    def _unknown(self, name: str) -> str:
        """Return the message for a name that no plug-in of this kind has."""
        names = sorted({e.name for e in self.entries} | {e.label for e in self.entries if not e.builtin})
        dist, slash, plugin = name.rpartition("/")
        hint = suggest(f"{discovery.normal(dist)}{slash}{plugin}", names)
        installed = ", ".join(e.name if e.builtin else e.label for e in self.entries) or "none"
        return (
            f"No {self.kind.name} is called {shown(name)}.{hint}\n"
            f"  Installed: {installed}\n"
            f"  A package adds one with the entry-point group {shown(self.kind.group)}; "
            "an experiment can say 'module:Class'."
        )

    def _target(self, target: str) -> Entry:
        """Return the entry of a ``module:Class`` target.  PluginError if it is not allowed."""
        if given.is_given(target):
            passed = given.find(target)
            if passed is None:
                problem = f"{self.kind.name}: {shown(target)} was a class of the program that wrote this"
                raise PluginError(f"{problem}; {given.WANTED}")
            return Entry(self.kind.name, passed.name, target, LOCAL, "-")
        module, _, name = target.partition(":")
        if module.endswith(".py") or "/" in module:
            stem = module.rpartition("/")[2].removesuffix(".py")
            expected = f"expected '{stem}:{name}' and --allow-target {stem}, in the folder of {stem}.py"
            raise PluginError(f"{self.kind.name}: {shown(target)} is a path, and a target names a module: {expected}")
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise PluginError(
                f"{self.kind.name}: {shown(target)} is not the name of a plug-in; "
                "expected a name, 'module:Class', or a table in TOML such as { name = \"...\", options = { } }"
            )
        if not self._allowed(target):
            raise PluginError(
                f"{self.kind.name}: {shown(target)} is a target, and a target runs code. "
                f"Add --allow-target {module} if you trust it (allow_targets=[{shown(module)}] in Python)"
            )
        return Entry(self.kind.name, target, target, LOCAL, "-")

    def _allowed(self, target: str) -> bool:
        """Return whether the user allowed a target, its module or a package above it."""
        module = target.partition(":")[0]
        return any(target == a or module == a or module.startswith(a + ".") for a in self.allow_targets)

    def spec(self, entry: Entry) -> Spec:
        """Import and return the spec of an entry.  PluginError names package, version and target.

        A target may also be a class.  Its spec is the class attribute ``spec``, or a new spec without limits.
        """
        found = _import(entry, entry.target)
        if isinstance(found, Spec):
            return found
        if entry.dist == LOCAL and isinstance(found, type):
            real = f"{found.__module__}:{found.__qualname__}"
            passed = given.is_given(entry.target)
            if passed:
                real = entry.target
            elif not self._allowed(real):
                raise PluginError(
                    f"{self.kind.name}: {shown(entry.target)} is really {shown(real)}, which is not allowed. "
                    f"Add --allow-target {found.__module__} if you trust it (allow_targets=[...] in Python)"
                )
            spec = getattr(found, "spec", None)
            if isinstance(spec, Spec):
                return replace(spec, impl=real) if passed else spec
            summary = (found.__doc__ or "").partition("\n")[0]
            return Spec(real, self.kind.api, summary, limits=ANY)
        raise PluginError(
            f"{entry}: {shown(entry.target)} is a {type(found).__name__}; expected an object of class "
            "minivllm.plugin.Spec"
        )

    def _judge(self, entry: Entry, request: PluginQuery) -> Candidate:
        """Return a candidate with all reasons against an entry.  PluginError if its spec, or the check in it, is
        broken."""
        if entry.blocked:
            return Candidate(entry, None, (Reason(f"blocked by {ENV}"),))
        spec = self.spec(entry)
        try:
            reasons = spec.refuse(request, self.kind)
        except BaseException as exc:  # SystemExit and Rust panics too, as for imports
            if from_signal(exc):
                raise
            raise PluginError(
                f"{entry}: its spec raised an error while it was compared with the request: {describe_error(exc)}"
            ) from exc
        return Candidate(entry, spec, reasons)

    def _consider(self, entry: Entry, request: PluginQuery) -> Candidate:
        """Return a candidate for a plug-in that the user did not name.

        A broken plug-in is then a reason against it, but an error if MINIVLLM_STRICT_PLUGINS=1.
        """
        try:
            found = self._judge(entry, request)
            if found.suitable and found.require_spec().approximate:
                return replace(found, reasons=(Reason(BY_NAME),))
            return found
        except PluginError as exc:
            if self.strict:
                raise PluginError(f"{exc}\n  (It was not chosen; it is an error because of {STRICT}=1.)") from exc
            return Candidate(entry, None, (Reason(str(exc).partition("\n")[0]),))

    def select(
        self, request: PluginQuery, name: str = "auto", prefer: Sequence[str] = (), everything: bool = False
    ) -> Selection:
        """Choose a plug-in for a request.

        A name never falls back to another plug-in.  ``auto`` chooses the suitable built-in plug-in of the highest
        priority, and considers third-party plug-ins only if no built-in one is suitable.  With ``prefer``, it chooses
        the first suitable plug-in of that list; plug-ins that are not installed or not suitable are skipped, and a
        broken one is an error.  ``everything`` also collects the reasons for all other plug-ins, for ``explain``.  It
        never changes the choice.
        """
        auto = name == "auto"
        candidates = self._auto(request, prefer) if auto else [self._judge(self.find(name), request)]
        suitable = [c for c in candidates if c.suitable]
        if not prefer:
            suitable.sort(key=lambda c: c.rank)
        chosen = suitable[0] if suitable else None
        considered = {c.entry for c in candidates}
        skipped = [e for e in self.entries if auto and chosen and e not in considered]
        selection = Selection(self.kind.name, name, request, chosen, tuple(candidates), tuple(skipped), tuple(prefer))
        return selection.widen(self) if everything else selection

    def _auto(self, request: PluginQuery, prefer: Sequence[str]) -> list[Candidate]:
        """Return the candidates for the name ``auto``, up to the first group with a suitable one."""
        candidates: list[Candidate] = []
        for name in prefer:
            candidates.append(self._preferred(name, request))
            if candidates[-1].suitable:
                break
        if prefer:
            return candidates
        for builtin in (True, False):
            candidates += [self._consider(e, request) for e in self.entries if e.builtin is builtin]
            if any(c.suitable for c in candidates):
                break
        return candidates

    def installed(self, name: str) -> bool:
        """Return whether ``name`` or ``dist/name`` is installed, blocked or not.  A ``module:Class`` target counts as
        installed."""
        return ":" in name or any(name in (e.name, e.label) for e in self.entries)

    def _preferred(self, name: str, request: PluginQuery) -> Candidate:
        """Return a candidate for a name in ``prefer``.

        A plug-in that is not installed or is blocked is a candidate with a reason against it.  PluginError if the name
        is probably a misspelling of an installed plug-in.
        """
        if self.installed(name):
            found = [e for e in self.entries if name in (e.name, e.label)]
            all_blocked = bool(found) and all(e.blocked for e in found)
            return self._judge(found[0] if all_blocked else self.find(name), request)
        dist, slash, _ = name.rpartition("/")
        if slash:
            misspelled = discovery.normal(dist) in {e.dist for e in self.entries}
        else:
            misspelled = bool(suggest(name, {e.name for e in self.entries}, 0.75))
        if misspelled:
            hint = "In a list of preferred names, write 'dist/name' for a plug-in that is not installed."
            raise PluginError(f"{self._unknown(name)}\n  {hint}")
        return Candidate(Entry(self.kind.name, name, "", "", "-"), None, NOT_INSTALLED)

    def load(self, candidate: Candidate) -> type:
        """Import the implementation and check its class.  PluginError names package, version and entry point."""
        assert candidate.spec is not None
        import_target(self.kind.base)  # imports torch before the deadline of the plug-in's import starts
        found = _import(candidate.entry, candidate.spec.impl)
        check_base(self.kind, candidate.entry, found)
        return found

    def options_model(self, entry: Entry, spec: Spec) -> Any:
        """Import and return the pydantic model of a plug-in's options.  PluginError if that fails or it is not a
        model."""
        from pydantic import BaseModel

        model = _import(entry, spec.options)
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise PluginError(
                f"{entry}: Spec.options names {shown(spec.options)}, which is not a class of pydantic.BaseModel"
            )
        return model

    def options(
        self, candidate: Candidate, values: Mapping[str, Any], at: str = "", origins: Mapping[str, str] | None = None
    ) -> Any:
        """Return the validated options as a pydantic model, or None for a plug-in without options.

        ``at`` is the path of the values in the configuration.  ``origins`` maps paths to sources (file and line,
        variable or flag).  OptionError for a wrong value.
        """
        assert candidate.spec is not None
        label, at, origins = candidate.entry.label, at or f"{self.kind.name}.options", origins or {}
        if not candidate.spec.options:
            if not values:
                return None
            place = begins(source_of(origins, at))
            message = f"{place}{label} takes no options: {at} has {', '.join(map(repr, values))}"
            if candidate.entry.dist == LOCAL:
                message += "; declare the options of your class in a spec (docs/plugins.md)"
            raise OptionError(message)
        from pydantic import ValidationError

        model = self.options_model(candidate.entry, candidate.spec)
        try:
            return model(**values)
        except ValidationError as exc:
            lines = "".join(f"\n  {line}" for line in sourced(faults(exc, model, values, at), origins))
            raise OptionError(f"Wrong options for {label}:{lines}") from exc
        except Exception as exc:
            problem = f"{candidate.entry}: {shown(candidate.spec.options)} cannot take options"
            raise PluginError(f"{problem}: {type(exc).__name__}: {exc}") from exc


NOT_INSTALLED = (Reason("not installed"),)


class Catalog(Mapping[str, Registry]):
    """One registry for each kind of plug-in.  It is created once from package metadata and never changes."""

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
        """Return the catalog of built-in and installed plug-ins.  No code of the packages runs.

        ``entry_points`` is a result of ``importlib.metadata.entry_points()``.  None reads the metadata, once per
        process.
        """
        entries, faults, strict = discovery.find(environ, entry_points)
        return cls(entries, allow_targets, faults, strict)

    def allow(self, targets: Sequence[str]) -> Catalog:
        """Return a copy in which ``module:Class`` targets of these modules may be chosen."""
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
    """Raise PluginError unless ``found`` is a subclass of the kind's base class that implements all abstract
    methods."""
    base = import_target(kind.base)
    if not (isinstance(found, type) and issubclass(found, base)):
        label = found.__qualname__ if isinstance(found, type) else f"a {type(found).__name__}"
        raise PluginError(f"{entry}: {label} is not a subclass of {kind.base.replace(':', '.')}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise PluginError(f"{entry}: {found.__qualname__} does not implement {', '.join(missing)}")


def build_part(kind: str, part: Part, *context: Any) -> Any:
    """Construct a chosen plug-in: ``Class(options, *context)``, or ``Class()`` for a model without options.

    It works in any process that has the packages installed.  PluginError names the plug-in if the import fails, the
    class does not implement the seam, or the constructor fails.
    """
    label, cls, model = _class_of(kind, part)
    try:
        options = model(**part.options) if model is not None else None
        plugin = cls() if kind == "model" and options is None else cls(options, *context)
        reads: Any = getattr(plugin, "reads", None)
        if isinstance(reads, str):
            raise PluginError(
                f"{label}: reads={shown(reads)} is a text: expected a frozenset of names, {{{shown(reads)}}}"
            )
        return plugin
    except MinivllmError:
        raise
    except BaseException as exc:  # SystemExit too, as for imports
        if from_signal(exc):
            raise
        raise PluginError(f"{label} could not be constructed: {describe_error(exc)}") from exc


def _class_of(kind: str, part: Part) -> tuple[str, Any, Any]:
    """Return the name of a chosen plug-in for messages, its class, and the class of its options or None."""
    label = f"{kind} {shown(part.name)} ({part.source})" if part.source else f"{kind} {shown(part.name)}"
    cls = guarded_import(label, part.target, part.source)
    check_base(KINDS[kind], label, cls)
    note_part(f"{kind} {part.name}", cls)
    model = guarded_import(label, part.options_target, part.source) if part.options_target else None
    return label, cls, model


def head_of(part: Part, files: Any, target: Any, cfg: Any) -> Any:
    """Return the ``Head`` of a drafter that claims ``target_head``; see ``Drafter.head``.

    PluginError if the drafter raises anything but errors of this package."""
    label, cls, model = _class_of("drafter", part)
    try:
        options = model(**part.options) if model is not None else None
        return cls.head(options, files, target, cfg)
    except MinivllmError:
        raise
    except BaseException as exc:
        if from_signal(exc):
            raise
        raise PluginError(f"{label}: head() failed: {describe_error(exc)}") from exc


def _import(entry: Entry, target: str) -> Any:
    """Import a target of an entry.  PluginError names the entry, and a version mismatch that may be the cause."""
    try:
        return guarded_import(str(entry), target, entry.source)
    except PluginError as exc:
        hint = discovery.version_hint(entry)
        if hint:
            raise PluginError(f"{exc} ({hint})") from exc.__cause__
        raise
