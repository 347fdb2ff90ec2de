"""A text for a value that is the same for equal values in all processes, on all machines and in all folders."""

from __future__ import annotations

import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import logging
import operator
import os
import random
import re
import struct
import threading
import types
import typing
import weakref
from collections.abc import Sequence
from typing import Any

from . import sources

DEEPEST = 12  # largest number of nested containers
LARGEST = 1 << 26  # largest number of bytes of arrays and texts in a value
MOST = 300_000  # largest number of members of containers
SHOWN = 40  # largest number of characters of a value that are shown to readers
PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray, type(...)))
NAMED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
         types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType)  # fmt: skip
BY_TEXT = (enum.Enum, range, slice, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time,
           datetime.timedelta, datetime.tzinfo, types.GenericAlias, types.UnionType, typing.TypeVar,
           operator.attrgetter, operator.itemgetter, operator.methodcaller)  # fmt: skip
# objects without an effect on results, or whose content belongs to other objects
IDLE = (logging.Logger, type(threading.Lock()), type(threading.RLock()), threading.local, threading.Event,
        threading.Condition, contextvars.ContextVar, weakref.ref, weakref.WeakKeyDictionary,
        weakref.WeakValueDictionary, weakref.WeakSet)  # fmt: skip
# Modules whose objects hold addresses, open files or positions in them, so that their attributes do not describe them.
HIDING = ("ctypes", "io", "mmap", "socket", "ssl", "select")


class UnknownValueError(ValueError):
    """The error for a value without a plain text.  The message describes the value."""


class ValueText:
    """Converts one value to text.

    ``code`` collects the functions and classes in the value; the text has their names, and the caller records their
    sources.  ``folders`` are written as ".", because a plug-in is the same in any folder.  With ``objects`` an instance
    of any class is described by its attributes; otherwise it is unknown.
    """

    def __init__(self, folders: Sequence[str] = (), objects: bool = True) -> None:
        self.folders = folders
        self.objects = objects
        self.code: list[Any] = []
        self._bytes_left = LARGEST
        self._members_left = MOST
        self._open: set[int] = set()  # ids of the containers around the present value

    def digest(self, value: Any) -> str:
        """Return the digest of the text of a value.  UnknownValueError if it has no text."""
        try:
            return sources.digest(self.of(value, 0))
        except UnknownValueError:
            raise
        except Exception as exc:  # the methods of a value may raise any exception
            raise UnknownValueError(f"{_kind(value)} ({type(exc).__name__})") from None

    def shown(self, value: Any, digest: str) -> str:
        """Return a short text for readers, with the start of the digest if the text is not the whole value."""
        kind = type(value)
        text = ""
        if kind in PLAIN or isinstance(value, BY_TEXT):
            text = self.here(repr(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) <= SHOWN // 3:
            text = self.here(repr(value))
            if " at 0x" in text:
                text = ""
        if text and len(text) <= SHOWN:
            return text
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            text = f"{str(value.dtype).removeprefix('torch.')} array {list(value.shape)}"
        elif hasattr(value, "__len__") and kind not in PLAIN:
            text = f"{kind.__name__} of {len(value)}"
        else:
            text = f"{text[: SHOWN - 12]}..." if text else f"a {kind.__name__}"
        return f"{text} ({digest[:8]})"

    def here(self, text: str) -> str:
        """Return a text with "." for the folders of the plug-in."""
        for folder in self.folders:
            text = text.replace(folder, ".")
        return text

    def of(self, value: Any, depth: int) -> Any:
        """Return the JSON form of a value inside ``depth`` containers.  UnknownValueError if it has none."""
        kind = type(value)
        if kind in PLAIN:
            return [kind.__name__, self._text(repr(value))]
        if depth > DEEPEST:
            raise UnknownValueError(f"nested more than {DEEPEST} deep")
        if isinstance(value, (types.FunctionType, type)):
            self.code.append(value)
            return ["code", f"{value.__module__}:{value.__qualname__}"]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, BY_TEXT) or kind.__module__ == "typing" or _names_a_type(kind):
            return [kind.__name__, self._text(repr(value))]
        if isinstance(value, os.PathLike):
            return ["path", self.here(os.fspath(value))]
        if isinstance(value, re.Pattern):
            return ["pattern", repr(value.pattern), value.flags]
        if (array := _array(value)) is not None:
            dtype, shape, data = array
            self._take(len(data))
            return ["array", dtype, shape, sources.sha(data)]
        if isinstance(value, NAMED):
            owner = getattr(value, "__objclass__", None) or getattr(value, "__module__", None)
            return ["builtin", str(owner), value.__name__]
        if isinstance(value, logging.Logger) or (self.objects and isinstance(value, IDLE)):
            return ["idle", kind.__name__]
        if self.objects and kind.__module__ == "itertools":
            return ["idle", kind.__name__]
        if id(value) in self._open:
            return ["around"]
        self._open.add(id(value))
        try:
            return self._composed(value, kind, depth + 1)
        finally:
            self._open.discard(id(value))

    def _composed(self, value: Any, kind: type, depth: int) -> Any:
        """Return the JSON form of a container or an object.  UnknownValueError if its type is not supported."""
        name = kind.__name__
        if isinstance(value, (list, tuple, collections.deque)):
            self._count(len(value))
            if set(map(type, value)) <= PLAIN:
                return [name, self._text(repr([*value]))]
            return [name, [self.of(member, depth) for member in value]]
        if isinstance(value, (set, frozenset)):
            self._count(len(value))
            return [name, sorted(repr(self.of(member, depth)) for member in value)]
        if isinstance(value, (dict, types.MappingProxyType)):
            self._count(len(value))
            if set(map(type, value.values())) | set(map(type, value)) <= PLAIN:
                return [name, self._text(repr(dict(value)))]
            return [name, [[self.of(key, depth), self.of(member, depth)] for key, member in value.items()]]
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__func__, depth), self.of(value.__self__, depth)]
        if isinstance(value, functools.partial):
            return ["partial", self.of([value.func, [*value.args], value.keywords], depth)]
        if self.objects:
            return self._object(value, kind, depth)
        raise UnknownValueError(_kind(value))

    def _object(self, value: Any, kind: type, depth: int) -> Any:
        """Return the JSON form of an instance of any class.  UnknownValueError if its state cannot be read."""
        name = f"{kind.__module__}:{kind.__qualname__}"
        inner = getattr(value, "__wrapped__", None)
        if inner is None and kind.__module__.startswith("triton"):
            inner = getattr(value, "fn", None)
        if inner is not None:  # the wrapped function of a cache or kernel
            return [name, self.of(inner, depth)]
        if kind.__module__.partition(".")[0].lstrip("_") in HIDING:
            raise UnknownValueError(_kind(value))
        if (state := _state_of_random(value)) is not None:
            return [name, self.of(state, depth)]
        held, slots = dict(getattr(value, "__dict__", None) or {}), False
        for cls in kind.__mro__:
            names = vars(cls).get("__slots__", ())
            for slot in (names,) if isinstance(names, str) else names:
                slots = True
                if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                    held[slot] = getattr(value, slot)
        if not held and callable(value) and sources.known_without(kind.__module__):
            return [name, str(getattr(value, "__name__", ""))]  # an operation of a library has no Python state
        if (not slots and not kind.__dictoffset__) or kind.__module__ == "builtins":
            return [name, *self._of_c(value, depth)]
        self._count(len(held))
        self.code.append(kind)
        base = [plain.__repr__(value) for plain in (int, float, complex, str, bytes) if isinstance(value, plain)]
        return [name, self._text("".join(base)), [[key, self.of(member, depth)] for key, member in held.items()]]

    def _of_c(self, value: Any, depth: int) -> list[Any]:
        """Return the state of an object of C code as pickling gives it, an empty list for a plain ``object()``.
        UnknownValueError if the object cannot be pickled."""
        if type(value) is object:
            return []
        if isinstance(value, struct.Struct):
            return [value.format]
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:  # an object that cannot be pickled, such as a generator
            raise UnknownValueError(_kind(value)) from None
        return [reduced] if isinstance(reduced, str) else [self.of(list(reduced[1:3]), depth)]

    def _count(self, members: int) -> None:
        """Add ``members`` to the number of members of all containers.  UnknownValueError beyond ``MOST``."""
        self._members_left -= members
        if self._members_left < 0:
            raise UnknownValueError(f"more than {MOST:,} values in containers")

    def _take(self, size: int) -> None:
        """Add ``size`` to the number of bytes of all values.  UnknownValueError beyond ``LARGEST``."""
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise UnknownValueError(f"more than {LARGEST >> 20} MiB")

    def _text(self, text: str) -> str:
        """Count a text and return it without the folders of the plug-in."""
        self._take(len(text))
        return self.here(text)


def _kind(value: Any) -> str:
    """Return the type of a value with its article: "an Event"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def _names_a_type(kind: type) -> bool:
    """Return whether a type is ``np.dtype``, ``torch.dtype``, ``torch.device`` or the like, whose text is complete."""
    if kind.__module__ == "numpy.dtypes":
        return True
    names = ("dtype", "device", "layout", "memory_format", "Size")
    return kind.__module__ in ("torch", "numpy") and kind.__name__ in names


def _array(value: Any) -> tuple[str, list[int], bytes] | None:
    """Return dtype, shape and bytes of an array or of a tensor on any device, None for other values.  UnknownValueError
    if a numpy array has Python objects."""
    kind = type(value)
    if hasattr(value, "detach") and kind.__module__.startswith("torch"):
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), list(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if kind.__module__.startswith("numpy") and hasattr(value, "dtype") and hasattr(value, "tobytes"):
        if value.dtype.hasobject:
            raise UnknownValueError("an array of objects")
        return str(value.dtype), list(value.shape), value.tobytes()
    return None


def _state_of_random(value: Any) -> Any:
    """Return the state of a random number generator, None for other values."""
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    return value.get_state() if type(value).__module__.startswith("torch") and hasattr(value, "get_state") else None
