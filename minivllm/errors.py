"""Every error that minivllm raises on purpose: one line that says what is wrong, what was wanted and what to do.

``exit_code`` is what the command line ends with: 2 configuration or command line, 3 model, 4 plug-in,
5 environment (memory, port), 7 engine or worker died.  A request's own error never ends the engine.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable
from typing import Any


class MinivllmError(Exception):
    """Base of all errors raised on purpose; catching it never hides a bug."""

    exit_code = 1


class ConfigError(MinivllmError, ValueError):
    """A configuration file, keyword or command line asks for something that does not exist or contradicts itself.

    ``faults`` are the single faults (``minivllm.validation.FieldFault``), where there can be several.
    """

    exit_code = 2
    faults: tuple = ()


class RequestError(MinivllmError, ValueError):
    """One request asks for something that cannot be served; ``param`` names the field.  Nobody else is touched."""

    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelError(MinivllmError):
    """A model directory is missing, broken, unsafe or of an architecture that no plug-in serves."""

    exit_code = 3


class PluginError(MinivllmError):
    """A plug-in is unknown, ambiguous or broken, or none suits."""

    exit_code = 4


class OptionError(PluginError, ConfigError):
    """What a user wrote of a plug-in cannot be had: an option's value, a module that a rule names, or, of one that was
    named, the device or the library that it needs."""

    exit_code = 2


class ResourceError(MinivllmError):
    """The machine lacks something: memory, a device, a port."""

    exit_code = 5


class EngineDeadError(MinivllmError):
    """The engine cannot go on (three failed steps in a row, or a dead worker); every request was told."""

    exit_code = 7


_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8
_short.maxstring = _short.maxother = _short.maxlong = 120
QUOTED = 240  # characters of a value in a message


def shown(value: object) -> str:
    """A value in a message: its repr in one line, shortened, whatever it is."""
    try:
        return brief(" ".join(_short.repr(value).split("\n")), QUOTED)
    except Exception:  # a number of 5,000 digits; an object whose repr fails
        return f"a {type(value).__name__}"


def brief(text: str, most: int = 120) -> str:
    """A text in a message that stands there as it is, such as a name: printable, of at most ``most`` characters."""
    if len(text) > most:
        text = f"{text[: most * 2 // 3]}...{text[len(text) - most // 3 + 3 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def want_name(cls: type) -> str:
    """What to say instead of a class where a plug-in's name is wanted, since it travels to other processes as text."""
    module = cls.__module__
    return f"want a name; of this one '{module}:{cls.__qualname__}', with allow_targets=[{module!r}]"


def told(exc: BaseException) -> str:
    """An exception in a message: its type and the first line of its text, whatever its ``__str__`` does."""
    try:
        text = next(iter(str(exc).strip().splitlines()), "")[:400]
    except BaseException:  # somebody else's code
        text = "its text cannot be made"
    return f"{type(exc).__name__}: {text}"


def from_file(part: object) -> str:
    """`` (of FILE)``: where the class of a part is from, in a message; nothing of those in this package, and of those
    that no file has by their name."""
    kind, module = type(part), sys.modules.get(type(part).__module__)
    file = getattr(module, "__file__", None)
    own = kind.__module__.startswith(f"{__package__}.") or not hasattr(module, kind.__qualname__.partition(".")[0])
    return "" if file is None or own else f" (of {brief(str(file))})"


def error_from(name: str, message: str, param: str | None = None) -> Exception:
    """The error that another process told of: minivllm's own by its class name, or that of a verb which is not known;
    another one came of a bug and is a plain MinivllmError."""
    kind = NotImplementedError if name == "NotImplementedError" else globals().get(name)
    if kind is RequestError:
        return RequestError(message, param)
    if isinstance(kind, type) and issubclass(kind, (MinivllmError, NotImplementedError)):
        return kind(message)
    return MinivllmError(message if message.startswith(f"{name}: ") else f"{name}: {message}")


def suggest(word: str, known: Iterable[Any], cutoff: float = 0.6) -> str:
    """`` Did you mean 'x'?`` for the nearest known word, or nothing.  Used wherever a name is refused."""
    import difflib

    near = difflib.get_close_matches(brief(str(word), 80), [str(k) for k in known], n=1, cutoff=cutoff)
    return f" Did you mean {shown(near[0])}?" if near else ""
