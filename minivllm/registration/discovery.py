"""What is installed: the built-in table and the entry points of packages, from their metadata.  Runs no plug-in code.

A package can hide nothing and break nothing here: what it offers and cannot be used (a misspelt group, a name that no
config could say, metadata that nobody can read) becomes a ``BrokenEntry``, which ``minivllm plugins`` shows.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minivllm.errors import PluginError, shown, suggest
from minivllm.registration.spec import KINDS, RESERVED

BUILTIN = "minivllm"  # the distribution that the plug-ins of this package belong to
LOCAL = "local"  # and the one of targets that a user named directly
ENV = "MINIVLLM_PLUGINS"
STRICT = "MINIVLLM_STRICT_PLUGINS"
GROUP = "minivllm"
UNKNOWN = "unknown"  # a package that does not say how it is called
_NAME = re.compile(r"\w[\w.-]*")
_TARGET = re.compile(r"[\w.]+:[\w.]+")


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

    @property
    def source(self) -> str:
        """Whom to blame: package, version and entry point."""
        if self.dist == LOCAL:
            return f"target {self.target!r}"
        return f"{self.dist} {self.version}" + ("" if self.builtin else f", entry point {self.target!r}")

    def __str__(self) -> str:
        return f"{self.kind} {self.label!r} ({self.source})"


@dataclass(frozen=True)
class BrokenEntry:
    """Something of a package that is not used, and why."""

    dist: str
    version: str
    text: str

    def __str__(self) -> str:
        return f"{self.dist} {self.version}: {self.text}"


def find(
    environ: Mapping[str, str] | None = None, entry_points: Any = None
) -> tuple[list[Entry], list[BrokenEntry], bool]:
    """(entries, faults, strict).  ``entry_points``: what ``importlib.metadata.entry_points()`` returns; None: ask it.

    PluginError if MINIVLLM_PLUGINS names what is not there; with MINIVLLM_STRICT_PLUGINS=1 also if there is a fault.
    """
    from minivllm import __version__
    from minivllm.plugins.specs import BUILTINS

    environ = os.environ if environ is None else environ
    offered, faults = (_offered(entry_points), []) if entry_points is not None else _installed()
    entries = {
        (kind, BUILTIN, name): Entry(kind, name, target, BUILTIN, __version__) for kind, name, target in BUILTINS
    }
    faults = list(faults)
    for entry in offered:
        text = _unusable(entry, entries.get((entry.kind, entry.dist, entry.name)))
        if text:
            faults.append(BrokenEntry(entry.dist, entry.version, text))
        else:
            entries.setdefault((entry.kind, entry.dist, entry.name), entry)
    strict = _flag(environ)
    shut = _shut({e.dist for e in offered} | {f.dist for f in faults}, environ)
    faults = [fault for fault in faults if fault.dist not in shut]
    if faults and strict:
        raise PluginError(f"{STRICT}=1 and not all is well:" + "".join(f"\n  {fault}" for fault in faults))
    return [replace(e, blocked=not e.builtin and e.dist in shut) for e in entries.values()], faults, strict


def _unusable(entry: Entry, same: Entry | None) -> str:
    """Why an entry point cannot be used; "" if it can.  ``same`` has its names."""
    if entry.kind not in (*KINDS, *RESERVED):
        group = entry.kind if entry.kind.startswith(GROUP) else f"{GROUP}.{entry.kind}"
        near = suggest(group, [f"{GROUP}.{kind}" for kind in (*KINDS, *RESERVED)], 0.8)
        return f"{shown(entry.name)} is in the entry-point group {shown(group)}, and there is no such seam.{near}"
    where = f"{GROUP}.{entry.kind}: {shown(entry.name)}"
    if entry.builtin:
        return f"{where} claims to be of the package minivllm, which has none by entry point"
    if entry.dist == LOCAL:
        return f"{where} is of a package that is called {LOCAL!r}, which here means what a user named directly"
    if not _NAME.fullmatch(entry.name) or entry.name == "auto":
        return f"{where} is no name for a plug-in: want letters, digits, '_', '-' and '.', and not 'auto'"
    if entry.dist == UNKNOWN:
        return f"{where} is of a package whose metadata has no name"
    if not _TARGET.fullmatch(entry.target):
        return f"{where} is {shown(entry.target)}: want 'package.module:SPEC'"
    if same is not None and same.target != entry.target:
        return f"{where} is offered twice, as {shown(same.target)} and as {shown(entry.target)}: the first is used"
    return ""


# ---- metadata --------------------------------------------------------------------------------------------------------

_asked: tuple[Any, tuple[list[Entry], list[BrokenEntry]]] | None = None


def _installed() -> tuple[list[Entry], list[BrokenEntry]]:
    """Asks the metadata once a process (it takes 10 ms), and again only if the import path or a folder on it has
    changed, as after a ``pip install`` in a notebook."""
    global _asked
    state = (tuple(sys.path), tuple(map(_changed, sys.path)))
    if _asked is None or _asked[0] != state:
        faults: list[BrokenEntry] = []
        try:
            found = _offered(importlib.metadata.entry_points())
        except Exception:  # one package with broken metadata, which need not have to do with minivllm
            found, faults = _one_by_one()
        _asked = (state, (found, faults))
    return _asked[1]


def _changed(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


def _offered(points: Any) -> list[Entry]:
    """The entry points in our groups, usable or not; ``kind`` is what the group says."""
    found: list[Entry] = []
    heads: dict[int, tuple[str, str]] = {}
    for group in sorted({g for g in points.groups if re.match(rf"{GROUP}(?![^\W_])", g)}):  # minivllm_x is a slip too
        for point in points.select(group=group):
            dist = point.dist
            if id(dist) not in heads:
                heads[id(dist)] = _head(dist)
            target = point.value.partition("[")[0].strip()  # extras are no business of ours
            found.append(Entry(group.removeprefix(f"{GROUP}."), point.name, target, *heads[id(dist)]))
    return found


def _head(dist: Any) -> tuple[str, str]:
    """Name (PEP 503) and version of a distribution.  Only the first lines are read: ``dist.name`` parses all of the
    metadata, readme included, each time."""
    try:
        text = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "") if dist is not None else ""
    except (OSError, ValueError):  # ValueError: not UTF-8
        text = ""
    fields = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", text.partition("\n\n")[0], re.M))
    return normal(fields.get("Name", UNKNOWN)), fields.get("Version", "-")


def _one_by_one() -> tuple[list[Entry], list[BrokenEntry]]:
    """As ``entry_points()``, without the packages whose entry points cannot be read."""
    found: list[Entry] = []
    faults: list[BrokenEntry] = []
    seen = set()
    for dist in importlib.metadata.distributions():
        name, version = _head(dist)
        if name in seen and name != UNKNOWN:  # the first on the path is the one that is imported
            continue
        seen.add(name)
        try:
            found += _offered(dist.entry_points)
        except Exception as exc:
            text = f"its entry points cannot be read: {type(exc).__name__}: {exc}"
            faults.append(BrokenEntry(name, version, text))
    return found, faults


def unreadable() -> list[BrokenEntry]:
    """The packages whose entry points cannot be read, by anybody."""
    return _one_by_one()[1]


def normal(dist: str) -> str:
    return re.sub(r"[-_.]+", "-", dist).lower()  # PEP 503


def version_hint(entry: Entry) -> str:
    """Whether a package that failed was written for another minivllm, as far as its requirements tell; or ""."""
    from packaging.requirements import InvalidRequirement, Requirement

    from minivllm import __version__

    try:
        lines = importlib.metadata.requires(entry.dist) or ()
    except Exception:  # a target has no package, and metadata may be anything
        return ""
    for line in lines:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if normal(wanted.name) == BUILTIN and wanted.specifier and not wanted.specifier.contains(__version__, True):
            return f"{entry.dist} {entry.version} requires minivllm{wanted.specifier}, and this is {__version__}"
    return ""


# ---- environment -----------------------------------------------------------------------------------------------------


def _flag(environ: Mapping[str, str]) -> bool:
    value = environ.get(STRICT, "")
    if value not in ("", "0", "1"):
        raise PluginError(f"{STRICT}={shown(value)}: want 0 or 1")
    return value == "1"


def _shut(dists: set[str], environ: Mapping[str, str]) -> set[str]:
    """The distributions that MINIVLLM_PLUGINS shuts out: unset = none, empty = all, ``a,b`` = all but these, ``-a`` =
    this one.  Built-ins are never shut out."""
    text, dists = environ.get(ENV), dists - {BUILTIN}
    if text is None:
        return set()
    words = [w for w in re.split(r"[,\s]+", text) if w]
    only = {normal(w) for w in words if not w.startswith("-")}
    without = {normal(w[1:]) for w in words if w.startswith("-")}
    if BUILTIN in without or "" in without:
        raise PluginError(f"{ENV}={shown(text)}: want packages, or '-package', and minivllm itself cannot be shut out")
    if unknown := sorted((only | without) - dists - {BUILTIN}):
        raise PluginError(
            f"{ENV} names {', '.join(unknown)}, but no such package offers a minivllm plugin. "
            f"Installed: {', '.join(sorted(dists)) or 'none'}."
        )
    return without if without and not only else (dists - only) | without
