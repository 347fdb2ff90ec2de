"""Every error that minivllm raises on purpose: one line that says what is wrong, what was wanted and what to do.

``exit_code`` is what the command line ends with: 2 configuration or command line, 3 model, 4 plug-in,
5 environment (memory, port), 7 engine or worker died.  A request's own error never ends the engine.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Mapping
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
CAUSES = 8  # exceptions of a chain that are looked at


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


def where_requests_go() -> str:
    """Return the hint for a trace given in the place of requests with prompts, or the reverse."""
    traces = "a trace (times and lengths) goes to `minivllm simulate --trace` and `minivllm replay`"
    return f"{traces}, a trace or lines with a prompt to --dataset of bench, compare and ablate"


def want_name(cls: type) -> str:
    """What to say instead of a class where a plug-in's name is wanted, since it travels to other processes as text."""
    module = cls.__module__
    return f"want a name; of this one '{module}:{cls.__qualname__}', with allow_targets=[{module!r}]"


def describe_error(exc: BaseException, part: object = None) -> str:
    """An exception in a message: its type and the first line of its text, whatever its ``__str__`` does; and where it
    was raised, if that was in a part that is not of this package, or else the file of the ``part`` that was asked."""
    try:
        text = next(iter(str(exc).strip().splitlines()), "")[:400]
    except BaseException:  # somebody else's code
        text = "its text cannot be made"
    where = raised_at(exc) or from_file(part)
    return f"{type(exc).__name__}: {text}{'' if where in text else where}"


# (module, class) -> the part made of it in this process, of those that are not of this package
_others: dict[tuple[str, str], str] = {}


def note_part(who: str, kind: type) -> None:
    """A part is made of a class: what is raised in its package is told with its place from now on."""
    if kind.__module__.partition(".")[0] != __package__:
        _others[kind.__module__, kind.__qualname__] = who


def _raised(exc: BaseException | None) -> tuple[str, str]:
    """(the part, FILE:LINE of its package's code) that an exception came through last, of those that are not of this
    package; "" of none."""
    parts: dict[str, dict[str, None]] = {}
    for (module, _), part in _others.items():
        parts.setdefault(module.partition(".")[0], {})[part] = None
    who = top = place = ""
    for _ in range(CAUSES):
        trace = exc.__traceback__ if exc is not None else None
        while trace is not None:
            frame, line, trace = trace.tb_frame, trace.tb_lineno, trace.tb_next
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if package in parts:
                kind = type(frame.f_locals.get("self"))
                top, place = package, f"{frame.f_code.co_filename}:{line}"
                who = _others.get((kind.__module__, kind.__qualname__), who)
        if exc is None or place:
            break
        exc = exc.__cause__
    return who or (f"a part of {top}" if len(parts.get(top, ())) > 1 else "".join(parts.get(top, ()))), place


def raised_at(exc: BaseException) -> str:
    """`` (at FILE:LINE)``: where an exception left a part that is not of this package, in a message; else nothing."""
    _, place = _raised(exc)
    return f" (at {brief(place, 300)})" if place else ""


def external_part(exc: BaseException) -> str:
    """The part that is not of this package that an exception came through, "" if it came through none."""
    return _raised(exc)[0]


def describe_step_error(exc: BaseException, parts: Mapping[str, Any]) -> str:
    """Describe an error of a step that several plug-ins compute together.

    ``parts`` maps each seam to its plug-in.  If the traceback passes through no external plug-in, the message lists
    the external plug-ins of the step: their results may be the cause."""
    said = describe_error(exc)
    others = {seam: part for seam, part in parts.items() if part.target.split(".")[0] != __package__}
    if not others or raised_at(exc):
        return said
    names = (f"{seam} {brief(part.name)}{_file_of(part.target.partition(':')[0])}" for seam, part in others.items())
    return f"{said}; parts that are not minivllm's own: {', '.join(names)}"


def part_fault(exc: BaseException) -> PluginError | None:
    """What to raise from an exception that nobody raised on purpose, if it came through a part that is not of this
    package."""
    if not external_part(exc) or isinstance(exc, (MinivllmError, NotImplementedError)):
        return None
    return PluginError(f"{external_part(exc)} failed: {describe_error(exc)}")


def from_file(part: object) -> str:
    """`` (of FILE)``: where the class of a part is from, in a message; nothing of those in this package, and of those
    that no file has by their name."""
    kind, module = type(part), sys.modules.get(type(part).__module__)
    own = kind.__module__.startswith(f"{__package__}.") or not hasattr(module, kind.__qualname__.partition(".")[0])
    return "" if own else _file_of(kind.__module__)


def _file_of(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    return "" if file is None else f" (of {brief(str(file))})"


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
