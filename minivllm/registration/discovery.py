"""Find installed plug-ins: the table of built-in ones, and the entry points in package metadata.  No plug-in code runs.

A package cannot hide or break other plug-ins.  An entry point that cannot be used (misspelled group, invalid name,
unreadable metadata) becomes a ``BrokenEntry``, which ``minivllm plugins`` shows.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minivllm.errors import PluginError, shown, suggest
from minivllm.registration.spec import KINDS, RESERVED

BUILTIN = "minivllm"  # distribution name of built-in plug-ins
LOCAL = "local"  # distribution name of targets that a user named directly
ENV = "MINIVLLM_PLUGINS"
STRICT = "MINIVLLM_STRICT_PLUGINS"
GROUP = "minivllm"
UNKNOWN = "unknown"  # distribution name of a package whose metadata has no name
_NAME = re.compile(r"\w[\w.-]*")
_TARGET = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True)
class Entry:
    """A plug-in as described by package metadata."""

    kind: str
    name: str
    target: str
    dist: str
    version: str
    blocked: bool = False

    @property
    def label(self) -> str:
        """Return ``dist/name``."""
        return f"{self.dist}/{self.name}" if self.dist else self.name

    @property
    def builtin(self) -> bool:
        """Return whether the plug-in is part of minivllm."""
        return self.dist == BUILTIN

    @property
    def source(self) -> str:
        """Return the package, version and entry point, for error messages."""
        if self.dist == LOCAL:
            return f"target {self.target!r}"
        return f"{self.dist} {self.version}" + ("" if self.builtin else f", entry point {self.target!r}")

    def __str__(self) -> str:
        return f"{self.kind} {self.label!r} ({self.source})"


@dataclass(frozen=True)
class BrokenEntry:
    """An entry point or package that cannot be used, and the reason."""

    dist: str
    version: str
    text: str

    def __str__(self) -> str:
        return f"{self.dist} {self.version}: {self.text}"


def find(
    environ: Mapping[str, str] | None = None, entry_points: Any = None
) -> tuple[list[Entry], list[BrokenEntry], bool]:
    """Return (entries, broken entries, whether strict mode is on).

    ``entry_points`` is a result of ``importlib.metadata.entry_points()``; None reads the metadata.  PluginError if
    MINIVLLM_PLUGINS names a package that is not installed.  In strict mode (MINIVLLM_STRICT_PLUGINS=1), a broken entry
    is also a PluginError.
    """
    from minivllm import __version__
    from minivllm.plugins.specs import BUILTINS

    environ = os.environ if environ is None else environ
    offered, unreadable_packages = (_offered(entry_points), []) if entry_points is not None else _installed()
    entries = {
        (kind, BUILTIN, name): Entry(kind, name, target, BUILTIN, __version__) for kind, name, target in BUILTINS
    }
    faults = list(unreadable_packages)
    for entry in offered:
        key = (entry.kind, entry.dist, entry.name)
        text = _unusable(entry, entries.get(key))
        if text:
            faults.append(BrokenEntry(entry.dist, entry.version, text))
        else:
            entries.setdefault(key, entry)
    strict = _flag(environ)
    blocked = _blocked({e.dist for e in offered} | {f.dist for f in faults}, environ)
    faults = [fault for fault in faults if fault.dist not in blocked]
    if faults and strict:
        raise PluginError(f"{STRICT}=1 and there are faults:" + "".join(f"\n  {fault}" for fault in faults))
    found = [replace(e, blocked=not e.builtin and e.dist in blocked) for e in entries.values()]
    return found, faults, strict


def _unusable(entry: Entry, same: Entry | None) -> str:
    """Return why an entry point cannot be used, or "".  ``same`` is an earlier entry of the same kind, package and
    name, or None."""
    if entry.kind not in (*KINDS, *RESERVED):
        group = entry.kind if entry.kind.startswith(GROUP) else f"{GROUP}.{entry.kind}"
        near = suggest(group, [f"{GROUP}.{kind}" for kind in (*KINDS, *RESERVED)], 0.8)
        return f"{shown(entry.name)} is in the entry-point group {shown(group)}, and there is no such seam.{near}"
    where = f"{GROUP}.{entry.kind}: {shown(entry.name)}"
    if entry.builtin:
        return f"{where} is in a package called minivllm, whose plug-ins are not declared by entry points"
    if entry.dist == LOCAL:
        return f"{where} is in a package called {LOCAL!r}, a name that is reserved for targets of the user"
    if not _NAME.fullmatch(entry.name) or entry.name == "auto":
        return f"{where} is not a name for a plug-in: expected letters, digits, '_', '-' and '.', and not 'auto'"
    if entry.dist == UNKNOWN:
        return f"{where} is of a package whose metadata has no name"
    if not _TARGET.fullmatch(entry.target):
        return f"{where} is {shown(entry.target)}: expected 'package.module:SPEC'"
    if same is not None and same.target != entry.target:
        return f"{where} is offered twice, as {shown(same.target)} and as {shown(entry.target)}: the first is used"
    return ""


# ---- metadata --------------------------------------------------------------------------------------------------------

_cached: tuple[Any, tuple[list[Entry], list[BrokenEntry]]] | None = None


def _installed() -> tuple[list[Entry], list[BrokenEntry]]:
    """Return (entry points, unreadable packages) from the metadata of installed packages.

    Reading takes 10 ms.  The result is cached until the import path or a folder on it changes, such as after ``pip
    install`` in a notebook.
    """
    global _cached
    state = (tuple(sys.path), tuple(map(_changed, sys.path)))
    if _cached is None or _cached[0] != state:
        faults: list[BrokenEntry] = []
        try:
            found = _offered(importlib.metadata.entry_points())
        except Exception:  # any installed package may have broken metadata
            found, faults = _one_by_one()
        _cached = (state, (found, faults))
    return _cached[1]


def _changed(path: str) -> int:
    """Return the modification time of a folder, or 0 if there is none."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


def _offered(points: Any) -> list[Entry]:
    """Return the entry points in the groups "minivllm.KIND", usable or not.  ``Entry.kind`` is KIND."""
    found: list[Entry] = []
    heads: dict[int, tuple[str, str]] = {}
    # The pattern also matches misspellings such as minivllm_attention, so that they are reported.
    for group in sorted({g for g in points.groups if re.match(rf"{GROUP}(?![^\W_])", g)}):
        for point in points.select(group=group):
            dist = point.dist
            if id(dist) not in heads:
                heads[id(dist)] = _head(dist)
            target = point.value.partition("[")[0].strip()  # the target without extras
            found.append(Entry(group.removeprefix(f"{GROUP}."), point.name, target, *heads[id(dist)]))
    return found


def _head(dist: Any) -> tuple[str, str]:
    """Return the normalized name (PEP 503) and the version of a distribution.

    It reads only the first lines of the metadata.  ``dist.name`` would parse all of it each time, including the readme.
    """
    text = ""
    if dist is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError means not UTF-8
            text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    fields = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", text.partition("\n\n")[0], re.M))
    return normal(fields.get("Name", UNKNOWN)), fields.get("Version", "-")


def _one_by_one() -> tuple[list[Entry], list[BrokenEntry]]:
    """Return (entry points, unreadable packages), reading the metadata of each package separately.  Of packages with
    the same name, only the first on the import path is read."""
    found: list[Entry] = []
    faults: list[BrokenEntry] = []
    seen = set()
    for dist in importlib.metadata.distributions():
        name, version = _head(dist)
        # Python imports the package of this name that comes first on the import path, so others are skipped
        if name in seen and name != UNKNOWN:
            continue
        seen.add(name)
        try:
            found += _offered(dist.entry_points)
        except Exception as exc:
            text = f"its entry points cannot be read: {type(exc).__name__}: {exc}"
            faults.append(BrokenEntry(name, version, text))
    return found, faults


def unreadable() -> list[BrokenEntry]:
    """Return the packages whose entry points cannot be read."""
    return _one_by_one()[1]


def normal(dist: str) -> str:
    """Return the normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", dist).lower()


def version_hint(entry: Entry) -> str:
    """Return a sentence if the requirements of a broken plug-in's package exclude this version of minivllm, or ""."""
    from packaging.requirements import InvalidRequirement, Requirement

    from minivllm import __version__

    try:
        lines = importlib.metadata.requires(entry.dist) or ()
    except Exception:  # a target has no package, and metadata may be malformed
        return ""
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        versions = requirement.specifier
        if normal(requirement.name) == BUILTIN and versions and not versions.contains(__version__, True):
            return f"{entry.dist} {entry.version} requires minivllm{versions}, and this is {__version__}"
    return ""


# ---- environment -----------------------------------------------------------------------------------------------------


def _flag(environ: Mapping[str, str]) -> bool:
    """Return whether MINIVLLM_STRICT_PLUGINS is 1.  PluginError if it is neither 0 nor 1."""
    value = environ.get(STRICT, "")
    if value not in ("", "0", "1"):
        raise PluginError(f"{STRICT}={shown(value)}: expected 0 or 1")
    return value == "1"


def _blocked(dists: set[str], environ: Mapping[str, str]) -> set[str]:
    """Return the distributions that MINIVLLM_PLUGINS blocks.

    An unset variable blocks none, an empty one all, ``a,b`` all except a and b, and ``-a`` only a.  Built-in plug-ins
    are never blocked.  PluginError for a malformed value, and for a package that offers no plug-in.
    """
    text = environ.get(ENV)
    if text is None:
        return set()
    external = dists - {BUILTIN}
    words = [w for w in re.split(r"[,\s]+", text) if w]
    only = {normal(w) for w in words if not w.startswith("-")}
    without = {normal(w[1:]) for w in words if w.startswith("-")}
    if BUILTIN in without or "" in without:
        raise PluginError(
            f"{ENV}={shown(text)}: expected names of packages, each with or without a leading '-'; minivllm "
            "itself cannot be blocked"
        )
    unknown = sorted((only | without) - external - {BUILTIN})
    if unknown:
        raise PluginError(
            f"{ENV} names {', '.join(unknown)}, but no such package offers a minivllm plugin. Remove them. "
            f"Installed: {', '.join(sorted(external)) or 'none'}."
        )
    if without and not only:
        return without
    return (external - only) | without
