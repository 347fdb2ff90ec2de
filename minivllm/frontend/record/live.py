"""The source of a class that exists: what was typed into a notebook or a prompt, made by a function, or changed since.

A module's file says what a class is if nobody did anything to it.  Beside the files (``sources``) this takes in

    the text of classes and functions that no file has, from the lines that Python keeps of cells and prompts
    what those use of their surroundings: functions, classes, modules and values
    values of closures and of class attributes, and constants of modules that are not what the file says
    (but for those that its functions change: ``values``)

What cannot be known (a prompt whose lines nobody keeps, ``exec``, an object without a plain value) is said in
``missing``, and a record that says so is never equal to another.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import inspect
import linecache
import logging
import os
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

from minivllm.registration import given

from . import assigned, sources
from .plain_values import UnknownValueError, ValueText
from .sources import PLUGINS, Source, known_without

MOST_TEXT = 1 << 18  # characters of a text that a record keeps
HOLDERS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
SILENT = (logging.Logger, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def source_of(target: str) -> Source:
    """The source behind ``module:Class``; of a class that a program gave, what it was then."""
    if (found := given.find(target)) is not None:
        return found.source
    module, _, name = target.partition(":")
    live = sys.modules.get(module)
    if module != "__main__" and getattr(live, "__file__", None):
        return sources.plugin_source(target)
    for part in name.split("."):
        live = getattr(live, part, None)
    if isinstance(live, type):
        return source_of_class(live)
    found_in_files = sources.plugin_source(target)  # of a module that is not imported yet
    return found_in_files if found_in_files.hash else Source("", missing=f"{module} has no source file")


def source_of_class(cls: type) -> Source:
    """Of a class object as it is now.  ``texts`` has its own lines, wherever they are."""
    walk = _Walk()
    walk.add_class(cls)
    missing = "; ".join(dict.fromkeys(walk.missing))
    found = {name: sha for name, (sha, _) in sorted(walk.found.items())}
    newest = max((when for _, when in walk.found.values()), default=0.0)
    return Source(
        sources.digest(found) if found else "",
        {name: sha[:16] for name, sha in found.items()},
        newest,
        missing[:1000] if found else missing[:1000] or f"{cls.__module__} has no source file",
        walk.texts,
    )


class _Walk:
    """From a class to what it is made of; each thing is looked at once."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, float]] = {}
        self.texts: dict[str, str] = {}
        self.missing: list[str] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # an id is that of another thing once the first has gone

    def _new(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        self._kept.append(thing)
        return True

    def _text(self, name: str, text: str) -> None:
        self.found[name] = (sources.digest(text), 0.0)
        self.texts[name] = text[:MOST_TEXT]

    # ---- classes and functions -----------------------------------------------------------------------------------

    def add_class(self, cls: type) -> None:
        for one in cls.__mro__:
            if one is not object and not known_without(one.__module__) and self._new(one):
                self._add_one(one)

    def _add_one(self, cls: type) -> None:
        name, functions = f"{cls.__module__}:{cls.__qualname__}", list(functions_of(cls))
        file = _file(cls.__module__)
        text = _class_text(cls, functions)
        typed = file is None or not _lies_in(functions, file, text)
        if not typed:
            self._files(cls.__module__, cls.__name__)
            if text is not None and not cls.__module__.startswith(f"{PLUGINS}."):
                self.texts[name] = text[:MOST_TEXT]
        elif text is not None:
            self._text(name, text)
        else:
            self.missing.append(f"nobody keeps the lines of {name}")
        for function in functions:
            own = function.__module__ == cls.__module__ and function.__qualname__.startswith(f"{cls.__qualname__}.")
            if own or _generated(cls, function):
                self._surroundings(function, typed)
            else:  # put there from elsewhere
                self.add_function(function)
        changed = assigned.of_module(cls.__module__).changed if not typed else changed_by(text)
        for key, value in vars(cls).items():
            own = key == "_abc_impl" or (key.startswith("__") and key.endswith("__"))
            if not own and key not in changed and not isinstance(value, (types.FunctionType, *HOLDERS)):
                self.add_value(f"{name}.{key}", value, typed)

    def add_function(self, function: types.FunctionType) -> None:
        if known_without(function.__module__ or "") or not self._new(function):
            return
        module, name = function.__module__ or "?", f"{function.__module__}:{function.__qualname__}"
        file, text = _file(module), lines_of(function)
        typed = file is None or not _same(function.__code__.co_filename, file)
        if not typed:
            self._files(module, function.__name__)
            if function.__name__ == "<lambda>" or "<locals>" in function.__qualname__:  # which of them it is
                self.found[f"{name} at"] = (sources.digest([function.__code__.co_firstlineno, text]), 0.0)
        elif text is not None:
            self._text(name, text)
        else:
            self.missing.append(f"nobody keeps the lines of {name}")
        self._surroundings(function, typed)

    def _files(self, module: str, name: str) -> None:
        found = sources.plugin_source(f"{module}:{name}")
        self.found |= {file: (sha, found.newest) for file, sha in found.files.items()}
        if not found.hash:
            self.missing.append(found.missing or f"{module} has no source file")

    def _surroundings(self, function: types.FunctionType, typed: bool) -> None:
        """What a function takes from outside of its text."""
        name, code = f"{function.__module__}:{function.__qualname__}", function.__code__
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if key == "__class__":
                continue
            try:
                self.add_value(f"{name}, {key}", cell.cell_contents, True)
            except ValueError:  # an empty cell
                continue
        for number, value in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
            self.add_value(f"{name}, default {number}", value, typed)
        said, changed = _said(function, typed)
        for key in dict.fromkeys(names(code)):
            if key not in function.__globals__ or key in changed:  # a counter or a cache: ``values`` looks at it
                continue
            value = function.__globals__[key]
            if typed:
                self.add_value(f"{function.__module__}.{key}", value, True)
            elif key in said and said[key] != value:  # set from outside
                self.add_value(f"{function.__module__}.{key}", value, False)

    # ---- values --------------------------------------------------------------------------------------------------

    def add_value(self, name: str, value: Any, needed: bool) -> None:
        """``needed``: nothing else says what it is, so one that cannot be told is missing."""
        while isinstance(value, functools.partial):
            self.add_value(f"{name}, arguments", [*value.args, sorted(value.keywords.items())], needed)
            value = value.func
        if isinstance(value, types.MethodType):
            self.add_value(f"{name}, self", value.__self__, needed)
            value = value.__func__
        if isinstance(value, types.ModuleType):
            self._module(name, value)
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, types.FunctionType):
            self.add_function(value)
        elif not isinstance(value, SILENT):
            text = ValueText(objects=False)
            try:
                self.found[name] = (text.digest(value), 0.0)
            except UnknownValueError as exc:
                if needed:
                    self.missing.append(f"the value of {name} is {exc}, and what is in it is not known")
                return
            for one in text.code:  # a table of functions
                self.add_value(f"{name}, {one.__name__}", one, needed)

    def _module(self, name: str, module: types.ModuleType) -> None:
        top = module.__name__.partition(".")[0]
        if known_without(module.__name__) or module.__name__ == PLUGINS:
            return
        try:
            self.found[f"version of {top}"] = (sources.digest(importlib.metadata.version(top)), 0.0)
        except importlib.metadata.PackageNotFoundError:
            if getattr(module, "__file__", None):
                self._files(module.__name__, "")
            else:
                self.missing.append(f"{module.__name__} has no source file")


# ---- code and its lines ----------------------------------------------------------------------------------------------


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    for value in vars(cls).values():
        if isinstance(value, property):
            held: tuple[Any, ...] = (value.fget, value.fset, value.fdel)
        elif isinstance(value, (staticmethod, classmethod)):
            held = (value.__func__,)
        else:
            held = (getattr(value, "func", value) if isinstance(value, HOLDERS) else value,)
        for one in held:
            while isinstance(one, types.FunctionType):
                yield one
                one = getattr(one, "__wrapped__", None)


def _generated(cls: type, function: types.FunctionType) -> bool:
    """Whether ``dataclass`` wrote it, by the text of the class."""
    return "__dataclass_fields__" in vars(cls) and function.__code__.co_filename == "<string>"


def names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names(inner)


def _file(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    return path if path and os.path.exists(path) else None


def _same(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def _lies_in(functions: list[types.FunctionType], file: str, text: str | None) -> bool:
    """Whether a class is of a file, and was not made elsewhere under its name (a prompt behind ``python -i``)."""
    places = [f.__code__.co_filename for f in functions if f.__code__.co_filename != "<string>"]
    return any(_same(place, file) for place in places) if places else text is not None


def lines_of(function: types.FunctionType) -> str | None:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError, IndentationError, SyntaxError):
        return None


def _class_text(cls: type, functions: list[types.FunctionType]) -> str | None:
    """The lines of a class, by the file or cell that its functions are of; of one without functions, its module's."""
    for function in functions:
        if (
            found := _around(function.__code__.co_filename, cls.__qualname__, function.__code__.co_firstlineno)
        ) is not None:
            return found
    if functions:
        return None
    file = _file(cls.__module__)
    first = getattr(cls, "__firstlineno__", None)  # Python 3.13
    return None if file is None else _around(file, cls.__qualname__, first)


def _around(file: str, qualname: str, line: int | None) -> str | None:
    """The text of the class ``qualname`` of a file or cell that has the line."""
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None
    name = qualname.rpartition(".")[2]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if line is None or begin <= line <= (node.end_lineno or begin):
                return "".join(lines[begin - 1 : node.end_lineno])
    return None


def _said(function: types.FunctionType, typed: bool) -> tuple[Mapping[str, Any], Set[str]]:
    """The literals that the function's file gives to names, and what is changed there while functions run."""
    if typed:
        return {}, changed_by(lines_of(function))
    known = assigned.of_module(function.__module__ or "")
    return known.literals, known.changed


def changed_by(text: str | None) -> Set[str]:
    """Names and attributes that the functions of a text change."""
    try:
        return assigned.touched(ast.parse(textwrap.dedent(text or "")))
    except (SyntaxError, ValueError):
        return frozenset()
