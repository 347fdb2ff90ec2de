"""Values that a part's code reads and that its text does not say.

``SCALE = float(open(path).read())`` is one text and many values, so a record holds what the globals, class attributes
and defaults that the functions of a part read were when its engine had been built.  Of each: a digest, a few characters
of it, and what its file says about how it begins (``assigned``): by a literal or an empty container (``said``), by the
time of day (``clock``), or by anything else (``computed``).

A counter or a cache changes during a run, and a later engine of the process finds what an earlier one has left.  So a
value is ``moving`` where functions of its module change it, or where it is another one at the end of the run;
``verdict`` says what a difference in such a value means.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minivllm.registration import given

from . import assigned, environment_reads, live, replaced, sources
from .assigned import CLOCK
from .machine import SECRET
from .plain_values import NAMED, PLAIN, UnknownValueError, ValueText
from .sources import PLUGINS, Source, known_without

MOST = 2000  # values of a part
NOT_THERE = "what its file says"
SAME, OTHER, UNKNOWN, IGNORED = "same", "other", "unknown", "ignored"


def of_part(target: str, files: Iterable[str], builtin: bool) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """(the modules that were read, name of a value -> what is known of it); of a part that is not loaded and cannot be
    nothing.  ``files``: names of
    the part's modules, among others.  A ``digest`` of "" is a value that cannot be told; ``shown`` says what it is."""
    cls = _class(target, builtin)
    if cls is None:
        return [], {}
    own = {one.__module__ for one in cls.__mro__ if not known_without(one.__module__)}
    read = _Read({name for name in files if name in sys.modules} | own)
    read.add_class(cls)
    read.mark(own)
    return sorted(read.scope), dict(sorted(read.found.items()))


def beside(modules: Iterable[str], source: Source, builtin: bool) -> dict[str, dict[str, Any]]:
    """Return what the text of a part does not say beside its globals: functions that were replaced at run time, and, of
    parts of other packages, environment variables that its text reads."""
    found = {}
    for name, text in replaced.of_modules(modules).items():
        found[name] = {"digest": text, "shown": text, "begins": "computed", "own": True}
    if not builtin:
        names = [name for name in source.files if all(part.isidentifier() for part in name.split("."))]
        texts = {name: found_[0].decode("utf-8", "replace") for name in names if (found_ := sources.located(name))}
        found |= environment_reads.values({**texts, **source.texts})
    return found


def look_again(parts: Iterable[Mapping[str, Any]]) -> None:
    """At the end of a run: what is another value than in the bill's ``parts`` is ``moving``."""
    for part in parts:
        if before := part.get("values"):
            _, now = of_part(part["target"], part["source"]["files"], part["distribution"] == "minivllm")
            for name, known in before.items():
                beside_globals = name.endswith(("()", "]")) and name not in now  # see ``beside``
                if not beside_globals and now.get(name, {}).get("digest") != known["digest"]:
                    known["moving"] = True


def verdict(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, first: bool) -> str:
    """What a value in two records of the same source comes to; None: the file's own.  ``first``: both are of the first
    engine of their process, before any request, so that nothing but the wiring can have changed them."""
    known = [one for one in (a, b) if one is not None]
    if any(not one["digest"] for one in known):
        return UNKNOWN
    if len({one["digest"] for one in known}) == 1 and len(known) == 2:
        return SAME
    if not any(one.get("moving") for one in known):
        return OTHER
    if first:
        return OTHER if all(one.get("scalar") for one in known) else UNKNOWN  # a cache that the wiring fills
    return IGNORED if all(one["begins"] == assigned.SAID for one in known) else UNKNOWN


def settled(part: Mapping[str, Any]) -> dict[str, str]:
    """Name -> digest of the values of a part that stay as they are, in every run alike: what a fingerprint covers.  Of
    built-in parts none: whether they are loaded depends on what ran before, and their text is minivllm's."""
    known = part.get("values") or {}
    if part["distribution"] == "minivllm":
        known = {name: value for name, value in known.items() if name.endswith("()")}
    return {n: v["digest"] for n, v in known.items() if v.get("own") and not v.get("moving") and v["begins"] != CLOCK}


def _class(target: str, builtin: bool) -> type | None:
    if (found := given.find(target)) is not None:
        return found.cls
    module, _, path = target.partition(":")
    if module not in sys.modules and not builtin:  # it may run in another process alone
        try:
            importlib.import_module(module)
        except Exception:  # whatever it raises: the engine says it better when it loads the part
            return None
    cls: Any = sys.modules.get(module)
    for name in path.split("."):
        cls = getattr(cls, name, None)
    return cls if isinstance(cls, type) else None


class _Read:
    """From a class to what its functions read; each thing is looked at once.  ``scope``: modules of the part."""

    def __init__(self, scope: set[str]) -> None:
        self.scope = scope
        self.found: dict[str, dict[str, Any]] = {}
        self._seen: dict[int, Any] = {}  # the things too: an id is that of another thing once the first has gone
        self._changed: set[str] = set()
        self._where: dict[str, tuple[str, str]] = {}  # name of a value -> module, and its name there
        self._folders = sorted({folder for name in scope if (folder := _folder(name))}, key=len, reverse=True)

    def _new(self, thing: Any) -> bool:
        fresh = id(thing) not in self._seen and getattr(thing, "__module__", None) in self.scope
        self._seen[id(thing)] = thing
        return fresh

    def add_class(self, cls: type) -> None:
        for one in cls.__mro__:
            if self._new(one):
                functions = list(live.functions_of(one))
                for function in functions:
                    self.add_function(function)
                for key, value in vars(one).items():
                    if not key.startswith("__") and key != "_abc_impl" and not hasattr(type(value), "__get__"):
                        self._add(one.__module__, f"{one.__qualname__}.{key}", value, ())

    def add_function(self, function: types.FunctionType) -> None:
        module, code = function.__globals__.get("__name__", ""), function.__code__  # a decorator's own, if it wraps
        if not self._new(function) or module not in self.scope:
            return
        if not getattr(sys.modules.get(module), "__file__", None):
            self._changed |= live.changed_by(live.lines_of(function))
        read = dict.fromkeys(live.names(code))
        for key in read:
            if key in function.__globals__:
                self._add(module, key, function.__globals__[key], read)
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._add(module, f"{function.__qualname__}, {key}", cell.cell_contents, read)
            except ValueError:  # an empty cell
                continue
        if module.startswith(PLUGINS):  # what stands in the text, minivllm's hash has
            return
        for number, value in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
            self._add(module, f"{function.__qualname__}, default {number}", value, ())

    def _add(self, module: str, key: str, value: Any, read: Iterable[str]) -> None:
        """``read``: names that the function which has the value reads, of modules too."""
        if isinstance(value, types.ModuleType):
            self._add_module(value, set(read), {id(value)})
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, types.FunctionType):
            self.add_function(value)
        else:
            self._value(module, key, value)

    def _add_module(self, module: types.ModuleType, read: set[str], seen: set[int]) -> None:
        """``helper.SCALE``, ``package.helper.SCALE``."""
        if module.__name__ not in self.scope:
            return
        for name in read & set(vars(module)):
            value = vars(module)[name]
            if not isinstance(value, types.ModuleType):
                self._add(module.__name__, name, value, ())
            elif id(value) not in seen:
                self._add_module(value, read, seen | {id(value)})

    def _value(self, module: str, key: str, value: Any) -> None:
        name = f"{module}.{key}"
        if name in self.found or len(self.found) >= MOST:
            return
        text = ValueText(self._folders)
        known: dict[str, Any] = {"digest": ""}
        try:
            known["digest"] = text.digest(value)
            hidden = isinstance(value, (str, bytes)) and SECRET.search(key)
            known["shown"] = f"hidden ({known['digest'][:8]})" if hidden else text.shown(value, known["digest"])
        except UnknownValueError as exc:
            known["shown"] = str(exc)
        if type(value) in PLAIN:
            known["scalar"] = True
        begins, literals = self._text_of(module, key if ", " not in key else _named(module, value) or key)
        known["begins"] = begins
        if isinstance(value, (*NAMED, functools.partial)) or hasattr(value, "__wrapped__"):
            known = {}  # code, which is known by its source
        said = key in literals and type(literals[key]) is type(value) and literals[key] == value
        if known and not (said and module.startswith(PLUGINS)):
            self.found[name], self._where[name] = known, (module, key)
        for one in text.code:
            self._add(getattr(one, "__module__", "") or "", one.__qualname__, one, ())

    def _text_of(self, module: str, key: str) -> tuple[str, Mapping[str, Any]]:
        """How a name begins; one that is imported from another module of the part, as there."""
        for name in (module, *sorted(self.scope)):
            known = assigned.of_module(name)
            if key in known.begins:
                return known.begins[key], known.literals
        return assigned.COMPUTED, {}

    def mark(self, own: set[str]) -> None:
        """What functions of the part's modules change, and what is of the class's own modules (``own``), which are
        loaded wherever it is."""
        changed = self._changed.union(*(assigned.of_module(name).changed for name in self.scope))
        for name, (module, key) in self._where.items():
            if module in own:
                self.found[name]["own"] = True
            if key.rpartition(".")[2] in changed:
                self.found[name]["moving"] = True


def _named(module: str, value: Any) -> str:
    """The name that a module has for the very object of a default or a closure; "" if none."""
    held = vars(sys.modules[module]) if module in sys.modules and type(value) not in PLAIN else {}
    return next((name for name, other in held.items() if other is value), "")


def _folder(module: str) -> str:
    """Where the package of a module lies, or the module itself; "" of one without a file."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    folder = str(Path(os.path.abspath(file)).parent) if file else ""
    return folder if len(folder) > 3 else ""
