"""Values that the code of a plug-in reads and that its text does not contain.

``SCALE = float(open(path).read())`` is one text that can give many values.  So a record has the values of the globals,
class attributes and defaults that the functions of a plug-in read, as they were when the engine had been built.  For
each it has a digest, a few characters, and how the file gives it its value (``assigned``): by a literal or an empty
container (``said``), by the time of day (``clock``), or in another way (``computed``).

A counter or a cache changes during a run, and a later engine of the process finds the content that an earlier one left.
So a value is ``moving`` if functions of its module change it, or if it has another digest at the end of the run.
``verdict`` describes how a difference in such a value is judged.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minivllm.registration import given

from . import Entries, JsonObject, assigned, environment_reads, live, replaced, sources
from .assigned import CLOCK
from .machine import SECRET
from .plain_values import NAMED, PLAIN, UnknownValueError, ValueText
from .sources import PLUGINS, Source, known_without

MOST = 2000  # largest number of recorded values of a plug-in
NOT_THERE = "what its file says"  # text for a value that is missing in one of two records
SAME, OTHER, UNKNOWN, IGNORED = "same", "other", "unknown", "ignored"


def of_part(target: str, files: Iterable[str], builtin: bool) -> tuple[list[str], dict[str, Entries]]:
    """Return the modules that were read, and the known facts about each value of a plug-in by name.

    ``files`` contains the names of the plug-in's modules.  Nothing is returned for a plug-in that is not loaded and
    cannot be imported.  A ``digest`` of "" stands for a value that cannot be compared; ``shown`` is then the reason.
    """
    cls = _class(target, builtin)
    if cls is None:
        return [], {}
    own = {base.__module__ for base in cls.__mro__ if not known_without(base.__module__)}
    loaded = {name for name in files if name in sys.modules}
    reads = _Reads(loaded | own)
    reads.add_class(cls)
    reads.mark(own)
    return sorted(reads.scope), dict(sorted(reads.found.items()))


def beside(modules: Iterable[str], source: Source, builtin: bool) -> dict[str, Entries]:
    """Return more values of a plug-in: its functions that were replaced at run time, and environment variables.

    Variables are returned only for plug-ins of other packages.
    """
    found = {}
    for name, text in replaced.of_modules(modules).items():
        found[name] = {"digest": text, "shown": text, "begins": "computed", "own": True}
    if builtin:
        return found
    texts = {}
    for name in source.files:
        found_source = sources.located(name) if all(part.isidentifier() for part in name.split(".")) else None
        if found_source is not None:
            texts[name] = found_source[0].decode("utf-8", "replace")
    return found | environment_reads.values({**texts, **source.texts})


def look_again(parts: Iterable[JsonObject]) -> None:
    """Mark as ``moving`` the values read by the plug-ins ``parts`` of a bill of materials that have changed since the
    bill was made."""
    for part in parts:
        before = part.get("values")
        if not before:
            continue
        _, now = of_part(part["target"], part["source"]["files"], part["distribution"] == "minivllm")
        for name, entry in before.items():
            from_beside = name.endswith(("()", "]")) and name not in now
            if not from_beside and now.get(name, {}).get("digest") != entry["digest"]:
                entry["moving"] = True


def verdict(a: JsonObject | None, b: JsonObject | None, first: bool) -> str:
    """Return "same", "other", "unknown" or "ignored" for a value in two records of the same source.  None stands for
    the value that the file gives.

    ``first`` means that both records are of the first engine of their process before any request.  Then only the start
    of the engine can have changed the value.
    """
    present = [value for value in (a, b) if value is not None]
    digests = {value["digest"] for value in present}
    if "" in digests:
        return UNKNOWN
    if len(present) == 2 and len(digests) == 1:
        return SAME
    if not any(value.get("moving") for value in present):
        return OTHER
    if first:  # a container may be a cache that the start filled
        return OTHER if all(value.get("scalar") for value in present) else UNKNOWN
    return IGNORED if all(value["begins"] == assigned.LITERAL for value in present) else UNKNOWN


def settled(part: JsonObject) -> dict[str, str]:
    """Return value name -> digest for the constant values of a plug-in, which a fingerprint covers.

    Only replaced functions of built-in plug-ins are included: their loaded modules depend on earlier work of the
    process, and their text is part of minivllm's hash.
    """
    recorded = part.get("values") or {}
    if part["distribution"] == "minivllm":
        recorded = {name: value for name, value in recorded.items() if name.endswith("()")}
    constant = {}
    for name, value in recorded.items():
        if value.get("own") and not value.get("moving") and value["begins"] != CLOCK:
            constant[name] = value["digest"]
    return constant


def _class(target: str, builtin: bool) -> type | None:
    """Return the class of a plug-in, None if it is not loaded and cannot be imported."""
    if (found := given.find(target)) is not None:
        return found.cls
    module, _, path = target.partition(":")
    if module not in sys.modules and not builtin:  # the plug-in may run in another process only
        try:
            importlib.import_module(module)
        except Exception:  # the engine reports this error when it loads the plug-in
            return None
    cls: Any = sys.modules.get(module)
    for name in path.split("."):
        cls = getattr(cls, name, None)
    return cls if isinstance(cls, type) else None


class _Reads:
    """A walk from a class over all values that its functions read.  ``scope`` has the modules of the plug-in."""

    def __init__(self, scope: set[str]) -> None:
        self.scope = scope
        self.found: dict[str, Entries] = {}
        self._seen: dict[int, Any] = {}  # id() of an object -> the object, which is kept so that the id stays unique
        self._changed: set[str] = set()
        self._where: dict[str, tuple[str, str]] = {}  # name of a value -> (module, name in the module)
        self._folders = sorted({folder for name in scope if (folder := _folder(name))}, key=len, reverse=True)

    def _new(self, thing: Any) -> bool:
        """Return whether a class or function belongs to the plug-in and is seen for the first time."""
        fresh = id(thing) not in self._seen and getattr(thing, "__module__", None) in self.scope
        self._seen[id(thing)] = thing
        return fresh

    def add_class(self, cls: type) -> None:
        """Add the values that the functions of a class and of its bases read, and its class attributes."""
        for base in cls.__mro__:
            if not self._new(base):
                continue
            for function in list(live.functions_of(base)):
                self.add_function(function)
            for key, value in vars(base).items():
                if not key.startswith("__") and key != "_abc_impl" and not hasattr(type(value), "__get__"):
                    self._add(base.__module__, f"{base.__qualname__}.{key}", value, ())

    def add_function(self, function: types.FunctionType) -> None:
        """Add the globals, closure values and defaults that a function reads."""
        module = function.__globals__.get("__name__", "")  # the module of the decorator, if the function is a wrapper
        if not self._new(function) or module not in self.scope:
            return
        if not getattr(sys.modules.get(module), "__file__", None):
            self._changed |= live.changed_by(live.lines_of(function))
        read = dict.fromkeys(live.names(function.__code__))
        for key in read:
            if key in function.__globals__:
                self._add(module, key, function.__globals__[key], read)
        for key, value in replaced.closure_values(function):
            self._add(module, f"{function.__qualname__}, {key}", value, read)
        if module.startswith(PLUGINS):  # the defaults are in the text, which minivllm's hash covers
            return
        for number, value in enumerate(live.defaults(function)):
            self._add(module, f"{function.__qualname__}, default {number}", value, ())

    def _add(self, module: str, key: str, value: Any, read: Iterable[str]) -> None:
        """Add a value.  ``read`` are the names that the function with the value reads, for modules among the values."""
        if isinstance(value, types.ModuleType):
            self._add_module(value, set(read), {id(value)})
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, types.FunctionType):
            self.add_function(value)
        else:
            self._value(module, key, value)

    def _add_module(self, module: types.ModuleType, read: set[str], seen: set[int]) -> None:
        """Add the values that are read through a module, such as ``helper.SCALE`` or ``package.helper.SCALE``."""
        if module.__name__ not in self.scope:
            return
        for name in read & set(vars(module)):
            value = vars(module)[name]
            if not isinstance(value, types.ModuleType):
                self._add(module.__name__, name, value, ())
            elif id(value) not in seen:
                self._add_module(value, read, seen | {id(value)})

    def _value(self, module: str, key: str, value: Any) -> None:
        """Record a plain value under ``module.key``, and add the functions and classes in it."""
        name = f"{module}.{key}"
        if name in self.found or len(self.found) >= MOST:
            return
        text = ValueText(self._folders)
        entry: Entries = {"digest": ""}
        try:
            digest = entry["digest"] = text.digest(value)
            secret = isinstance(value, (str, bytes)) and SECRET.search(key)
            entry["shown"] = f"hidden ({digest[:8]})" if secret else text.shown(value, digest)
        except UnknownValueError as exc:
            entry["shown"] = str(exc)
        if type(value) in PLAIN:
            entry["scalar"] = True
        in_closure = ", " in key
        begins, literals = self._text_of(module, (_named(module, value) if in_closure else "") or key)
        entry["begins"] = begins
        is_code = isinstance(value, (*NAMED, functools.partial)) or hasattr(value, "__wrapped__")
        unchanged = key in literals and type(literals[key]) is type(value) and literals[key] == value
        if not is_code and not (unchanged and module.startswith(PLUGINS)):
            self.found[name] = entry
            self._where[name] = module, key
        for thing in text.code:
            self._add(getattr(thing, "__module__", "") or "", thing.__qualname__, thing, ())

    def _text_of(self, module: str, key: str) -> tuple[str, JsonObject]:
        """Return how a name gets its first value (LITERAL, CLOCK or COMPUTED of ``assigned``), and the values of all
        literals in the module of the plug-in that assigns it."""
        for name in (module, *sorted(self.scope)):
            analysis = assigned.of_module(name)
            if key in analysis.begins:
                return analysis.begins[key], analysis.literals
        return assigned.COMPUTED, {}

    def mark(self, own: set[str]) -> None:
        """Mark values that functions of the plug-in change as ``moving``, and values of the modules ``own`` as ``own``.

        Modules in ``own`` define the class, so they are loaded in every process that has the plug-in.
        """
        changed = self._changed.union(*(assigned.of_module(name).changed for name in self.scope))
        for name, (module, key) in self._where.items():
            if module in own:
                self.found[name]["own"] = True
            if key.rpartition(".")[2] in changed:
                self.found[name]["moving"] = True


def _named(module: str, value: Any) -> str:
    """Return the name that a module has for an object of a default or a closure, "" if it has none."""
    if module not in sys.modules or type(value) in PLAIN:
        return ""
    return next((name for name, other in vars(sys.modules[module]).items() if other is value), "")


def _folder(module: str) -> str:
    """Return the folder of a module's top package or file, "" for a module without a file."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    folder = str(Path(os.path.abspath(file)).parent) if file else ""
    return folder if len(folder) > 3 else ""
