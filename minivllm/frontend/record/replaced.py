"""Functions that a program has replaced at run time, so that they differ from the files of their modules.

A module's compiled file has the code of each function that it defines.  The loaded function of that name must have the
same code, wrap a function with that code (a decorator), or refer to one.  Otherwise it was replaced.  A function of a
class that the file of the class does not define, and that comes from another file, was added.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

ENGINE = ("core", "device", "frontend", "plugins", "runtime")
TORCH = ("torch", "torch.nn.functional", "torch.linalg", "torch.special")
FUNCTION = 0x1  # CO_OPTIMIZED, the flag of the code of functions; code of a class body lacks it
WRAPPED = ("__wrapped__", "__func__", "fget", "func", "fn", "function", "_function", "python_impl")
DEEPEST = 5  # largest number of decorators around a function that are looked through


def of_modules(names: Iterable[str]) -> dict[str, str]:
    """Return the replaced functions of loaded modules: ``{"own.helper()": "script.mine (digest)"}``."""
    found: dict[str, str] = {}
    for name in names:
        module = sys.modules.get(name)
        code = _file_code(name) if module is not None else None
        if module is not None and code is not None:
            found |= {f"{name}.{path}()": text for path, text in _of_module(module, code)}
    return found


def engine_modules() -> list[str]:
    """Return the loaded modules of minivllm that take part in computing tokens."""
    packages = tuple(f"minivllm.{folder}." for folder in ENGINE)
    return sorted(name for name in list(sys.modules) if name.startswith(packages))


def of_torch() -> dict[str, str]:
    """Return the functions of torch that other code has replaced by functions of files outside of torch: name -> name
    and digest of the replacement."""
    torch = sys.modules.get("torch")
    folder = str(getattr(torch, "__path__", [""])[0])
    if not folder:
        return {}
    found = {}
    for name in TORCH:
        module = sys.modules.get(name) or types.SimpleNamespace()
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and _outside(value, folder):
                found[f"{name}.{key}()"] = described(value)
    return found


def _outside(function: types.FunctionType, folder: str) -> bool:
    """Return whether a function comes from a file that is neither of torch nor of Python's own library."""
    file = function.__code__.co_filename
    top = (function.__module__ or "").partition(".")[0]
    return not file.startswith((folder, "<frozen")) and top not in sys.stdlib_module_names and top != "torch"


def described(thing: Any) -> str:
    """Return the name of a replacement and a digest of its code."""
    code = next(_codes(thing), None)
    kind = type(thing)
    module = getattr(thing, "__module__", None) or kind.__module__
    name = f"{module}.{getattr(thing, '__qualname__', kind.__qualname__)}"
    return f"{name} ({_digest(code)})" if code is not None else f"{name}, whose code is not known"


def _digest(code: types.CodeType) -> str:
    """Return a digest of code, without frozensets, whose order changes from process to process."""
    constants = [_digest(value) if isinstance(value, types.CodeType) else repr(value) for value in code.co_consts]
    constants = [text for text in constants if not text.startswith("frozenset")]
    text = repr((code.co_code, constants, code.co_names))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _file_code(name: str) -> dict[str, list[types.CodeType]] | None:
    """Return the code of each function that a module's file defines, by its qualified name; None if that is unknown."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    try:
        code = spec.loader.get_code(name)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):
        return None
    found: dict[str, list[types.CodeType]] = {}

    def add(outer: types.CodeType, prefix: str) -> None:
        for inner in outer.co_consts:
            if isinstance(inner, types.CodeType):
                path = f"{prefix}{inner.co_name}"
                if inner.co_flags & FUNCTION:
                    found.setdefault(path, []).append(inner)
                else:
                    add(inner, f"{path}.")

    if code is None:
        return None
    add(code, "")
    return found


def _of_module(module: types.ModuleType, code: dict[str, list[types.CodeType]]) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, replacement) of the replaced and added functions of a module with the file's ``code``."""
    for path, own in code.items():
        *classes, name = path.split(".")
        owner: Any = module
        for part in classes:
            owner = vars(owner).get(part) if isinstance(owner, (type, types.ModuleType)) else None
        if not isinstance(owner, (type, types.ModuleType)) or name not in vars(owner) or name.startswith("<"):
            continue  # the name was deleted, or belongs to a class inside a function
        loaded = vars(owner)[name]
        if not any(found in own for found in _codes(loaded)):
            yield path, described(loaded)
    for name, cls in list(vars(module).items()):
        plain = type(cls) in (type, abc.ABCMeta)  # other metaclasses, such as pydantic's, add functions to a class
        if plain and cls.__module__ == module.__name__ and cls.__name__ == name:
            yield from _added(module, cls, code)


def _added(module: types.ModuleType, cls: type, code: dict[str, list[types.CodeType]]) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, function) of the functions of a class that another package has added."""
    for name, thing in list(vars(cls).items()):
        if not isinstance(thing, types.FunctionType) or f"{cls.__qualname__}.{name}" in code:
            continue
        origin = thing.__module__
        # generated code has no file, such as the methods of dataclasses
        generated = thing.__code__.co_filename.startswith("<")
        if generated or origin == module.__name__ or origin in sys.stdlib_module_names:
            continue
        if origin.partition(".")[0] != module.__name__.partition(".")[0]:
            yield f"{cls.__qualname__}.{name}", described(thing)


def closure_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the closure of a function, without empty cells."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        yield name, value


def _codes(thing: Any, depth: int = 0) -> Iterator[types.CodeType]:
    """Yield the code of a function and of all functions that it wraps."""
    if isinstance(thing, types.FunctionType):
        yield thing.__code__
        if depth >= DEEPEST:
            return
        closure = [value for _, value in closure_values(thing)]
        for inner in (*closure, getattr(thing, "__wrapped__", None)):
            if callable(inner) or isinstance(inner, (staticmethod, classmethod, property)):
                yield from _codes(inner, depth + 1)
    elif depth < DEEPEST and thing is not None and not isinstance(thing, (type, types.ModuleType)):
        for name in WRAPPED:
            inner = getattr(thing, name, None) if not isinstance(thing, types.BuiltinFunctionType) else None
            if inner is not None and inner is not thing:
                yield from _codes(inner, depth + 1)
