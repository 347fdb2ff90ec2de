"""The source of a class object that was typed into a notebook or prompt, made by a function, or changed later.

For a class that nothing has changed, the file of its module is the source.  Besides the files (``sources``) this module
includes

    the text of classes and functions that no file has, from the lines that Python keeps of cells and prompts
    the functions, classes, modules and values that these use from their surroundings
    values of closures and of class attributes, and constants of modules that differ from the file
    (but not names that functions of the module change; ``values`` handles these)

``missing`` names the sources and values that cannot be found: a prompt whose lines are not kept, ``exec``, an object
without a plain value.  A record with missing sources or values is never equal to another record.
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
from dataclasses import replace
from typing import Any

from minivllm.registration import given

from . import assigned, sources
from .plain_values import UnknownValueError, ValueText
from .replaced import closure_values
from .sources import PLUGINS, Source, known_without

MOST_TEXT = 1 << 18  # largest number of characters of a text that a record keeps
HOLDERS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
SILENT = (logging.Logger, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def source_of(target: str) -> Source:
    """Return the source of ``module:Class``.  For a class that a program passed, it is the source at that time."""
    if (passed := given.find(target)) is not None:
        return passed.source
    module, _, path = target.partition(":")
    thing: Any = sys.modules.get(module)
    if module != "__main__" and getattr(thing, "__file__", None):
        return sources.plugin_source(target)
    for name in path.split("."):
        thing = getattr(thing, name, None)
    if isinstance(thing, type):
        return source_of_class(thing)
    source = sources.plugin_source(target)  # the module is not imported yet
    return source if source.hash else Source("", missing=f"{module} has no source file")


def source_of_class(cls: type) -> Source:
    """Return the source of a class object as it is now.  ``texts`` has its lines."""
    walk = _Walk()
    walk.add_class(cls)
    missing = "; ".join(dict.fromkeys(walk.missing))[:1000]
    if not walk.found:
        return Source("", missing=missing or f"{cls.__module__} has no source file", texts=walk.texts)
    return replace(sources.source_of_hashes(walk.found), missing=missing, texts=walk.texts)


class _Walk:
    """A walk from a class over all code and values that it consists of.

    ``found`` has (SHA-256, modification time) by name."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, float]] = {}
        self.texts: dict[str, str] = {}
        self.missing: list[str] = []
        self._seen: dict[int, Any] = {}  # id() of an object -> the object, which is kept so that the id stays unique

    def _new(self, thing: Any) -> bool:
        """Return whether an object is seen for the first time."""
        fresh = id(thing) not in self._seen
        self._seen[id(thing)] = thing
        return fresh

    def _text(self, name: str, text: str) -> None:
        """Add the text of code that no file has."""
        self.found[name] = (sources.digest(text), 0.0)
        self.texts[name] = text[:MOST_TEXT]

    # ---- classes and functions -----------------------------------------------------------------------------------

    def add_class(self, cls: type) -> None:
        """Add the source of a class and of its bases."""
        for base in cls.__mro__:
            if base is not object and not known_without(base.__module__) and self._new(base):
                self._add_one_class(base)

    def _add_one_class(self, cls: type) -> None:
        """Add the text, the functions and the class attributes of a class without its bases."""
        name = f"{cls.__module__}:{cls.__qualname__}"
        functions = list(functions_of(cls))
        file = _file(cls.__module__)
        text = _class_text(cls, functions)
        typed = file is None or not _lies_in(functions, file, text)
        if typed:
            self._typed(name, text)
        else:
            self._files(cls.__module__, cls.__name__)
            if text is not None and not cls.__module__.startswith(f"{PLUGINS}."):
                self.texts[name] = text[:MOST_TEXT]
        for function in functions:
            own = function.__module__ == cls.__module__ and function.__qualname__.startswith(f"{cls.__qualname__}.")
            if own or _generated(cls, function):
                self._surroundings(function, typed)
            else:  # the method was defined outside of the class and assigned to it
                self.add_function(function)
        changed = changed_by(text) if typed else assigned.of_module(cls.__module__).changed
        for key, value in vars(cls).items():
            special = key == "_abc_impl" or (key.startswith("__") and key.endswith("__"))
            if not special and key not in changed and not isinstance(value, (types.FunctionType, *HOLDERS)):
                self.add_value(f"{name}.{key}", value, typed)

    def add_function(self, function: types.FunctionType) -> None:
        """Add the text of a function and the values that it uses.  A function of a library is left out."""
        module = function.__module__ or "?"
        if known_without(function.__module__ or "") or not self._new(function):
            return
        name = f"{function.__module__}:{function.__qualname__}"
        text = lines_of(function)
        file = _file(module)
        typed = file is None or not _same(function.__code__.co_filename, file)
        if typed:
            self._typed(name, text)
        else:
            self._files(module, function.__name__)
            if function.__name__ == "<lambda>" or "<locals>" in function.__qualname__:  # several may have this name
                self.found[f"{name} at"] = (sources.digest([function.__code__.co_firstlineno, text]), 0.0)
        self._surroundings(function, typed)

    def _typed(self, name: str, text: str | None) -> None:
        """Add the text of code that no file has, or note that it is missing."""
        if text is not None:
            self._text(name, text)
        else:
            self.missing.append(f"Python has not kept the source lines of {name}")

    def _files(self, module: str, name: str) -> None:
        """Add the files of a module, or note that it has none."""
        source = sources.plugin_source(f"{module}:{name}")
        self.found |= {file: (sha, source.newest) for file, sha in source.files.items()}
        if not source.hash:
            self.missing.append(source.missing or f"{module} has no source file")

    def _surroundings(self, function: types.FunctionType, typed: bool) -> None:
        """Add closure values, defaults and globals that a function uses.

        ``typed`` means that no file has the function.  For others only globals are added that differ from the file.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        for key, value in closure_values(function):
            if key != "__class__":
                self.add_value(f"{name}, {key}", value, True)
        for number, value in enumerate(defaults(function)):
            self.add_value(f"{name}, default {number}", value, typed)
        literals, changed = _literals(function, typed)
        for key in dict.fromkeys(names(function.__code__)):
            if key not in function.__globals__ or key in changed:  # ``values`` handles counters and caches
                continue
            value = function.__globals__[key]
            if typed or (key in literals and literals[key] != value):
                self.add_value(f"{function.__module__}.{key}", value, typed)

    # ---- values --------------------------------------------------------------------------------------------------

    def add_value(self, name: str, value: Any, needed: bool) -> None:
        """Add a value that the code of a class uses, under ``name``.  A function, class or module is followed; any
        other value is stored as a digest.

        ``needed`` means that no file contains the value, so that it counts as missing if it cannot be written as
        text."""
        while isinstance(value, functools.partial):
            self.add_value(f"{name}, arguments", [*value.args, sorted(value.keywords.items())], needed)
            value = value.func
        if isinstance(value, types.MethodType):
            self.add_value(f"{name}, self", value.__self__, needed)
            value = value.__func__
        if isinstance(value, types.ModuleType):
            self._module(value)
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
                    self.missing.append(f"the value of {name} is {exc}, and its content is not known")
                return
            for thing in text.code:  # functions that the value contains, for example a table of functions
                self.add_value(f"{name}, {thing.__name__}", thing, needed)

    def _module(self, module: types.ModuleType) -> None:
        """Add the version of a module's package, or the files of a module without a package."""
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
    """Yield the functions of a class, with the functions of its properties and the functions that decorators wrap."""
    for value in vars(cls).values():
        held: tuple[Any, ...] = (value,)
        if isinstance(value, property):
            held = (value.fget, value.fset, value.fdel)
        elif isinstance(value, (staticmethod, classmethod)):
            held = (value.__func__,)
        elif isinstance(value, HOLDERS):
            held = (getattr(value, "func", value),)
        for function in held:
            while isinstance(function, types.FunctionType):
                yield function
                function = getattr(function, "__wrapped__", None)


def defaults(function: types.FunctionType) -> list[Any]:
    """Return the defaults of a function's parameters, positional ones first."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _generated(cls: type, function: types.FunctionType) -> bool:
    """Return whether ``dataclass`` generated a function."""
    return "__dataclass_fields__" in vars(cls) and function.__code__.co_filename == "<string>"


def names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code and its nested functions use."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names(inner)


def _file(module: str) -> str | None:
    """Return the file of a loaded module, None if there is none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return path if path and os.path.exists(path) else None


def _same(a: str, b: str) -> bool:
    """Return whether two paths name the same file."""
    return a == b or os.path.realpath(a) == os.path.realpath(b)


def _lies_in(functions: list[types.FunctionType], file: str, text: str | None) -> bool:
    """Return whether a class was defined in its module's file, and not at a prompt (after ``python -i``)."""
    paths = [function.__code__.co_filename for function in functions]
    paths = [path for path in paths if path != "<string>"]
    return any(_same(path, file) for path in paths) if paths else text is not None


def lines_of(function: types.FunctionType) -> str | None:
    """Return the source text of a function, None if it is not known."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError, IndentationError, SyntaxError):
        return None


def _class_text(cls: type, functions: list[types.FunctionType]) -> str | None:
    """Return the text of a class, from the file or notebook cell of its functions, or else from its module.  None if
    the class is not found there."""
    for function in functions:
        code = function.__code__
        text = _around(code.co_filename, cls.__qualname__, code.co_firstlineno)
        if text is not None:
            return text
    file = _file(cls.__module__)
    if functions or file is None:
        return None
    return _around(file, cls.__qualname__, getattr(cls, "__firstlineno__", None))  # since Python 3.13


def _around(file: str, qualname: str, line: int | None) -> str | None:
    """Return the text of the class ``qualname`` that contains a line of a file or cell.  None means any line."""
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


def _literals(function: types.FunctionType, typed: bool) -> tuple[Mapping[str, Any], Set[str]]:
    """Return the literals of names in the file of a function, and the names that functions of the file change."""
    if typed:
        return {}, changed_by(lines_of(function))
    analysis = assigned.of_module(function.__module__ or "")
    return analysis.literals, analysis.changed


def changed_by(text: str | None) -> Set[str]:
    """Return the names and attributes that the functions of a text change."""
    try:
        return assigned.touched(ast.parse(textwrap.dedent(text or "")))
    except (SyntaxError, ValueError):
        return frozenset()
