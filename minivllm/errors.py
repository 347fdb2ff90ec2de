"""The errors that minivllm raises on purpose.  Each message is one line: what is wrong, which values are accepted, and
what to do.

``exit_code`` is the exit status of the command line: 2 configuration or command line, 3 model, 4 plug-in, 5 environment
(memory, port), 7 the engine or a worker died.  An error of one request never ends the engine.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Mapping
from inspect import CO_VARARGS
from typing import Any


class MinivllmError(Exception):
    """Base class of all errors raised on purpose.  Catching it never hides a bug."""

    exit_code = 1


class ConfigError(MinivllmError, ValueError):
    """A configuration file, keyword or command line names something that does not exist, or contradicts itself.

    ``faults`` lists the single errors (``minivllm.validation.FieldFault``), if there can be several.
    """

    exit_code = 2
    faults: tuple = ()


class RequestError(MinivllmError, ValueError):
    """A request that cannot be served.  ``param`` names the wrong field.  Other requests are not affected."""

    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelError(MinivllmError):
    """A model directory is missing, broken or unsafe, or no plug-in serves its architecture."""

    exit_code = 3


class PluginError(MinivllmError):
    """A plug-in is unknown, ambiguous or broken, or no plug-in is suitable."""

    exit_code = 4


class OptionError(PluginError, ConfigError):
    """A setting of a plug-in that the user wrote cannot be used.

    Examples are a wrong option value, a rule that names a missing module, or a plug-in that the user named although its
    device or library is missing.
    """

    exit_code = 2


class ResourceError(MinivllmError):
    """The machine lacks a resource, such as memory, a device or a port."""

    exit_code = 5


class EngineDeadError(MinivllmError):
    """The engine cannot continue, because three steps in a row failed or a worker died.  Every request receives the
    error."""

    exit_code = 7


_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8
_short.maxstring = _short.maxother = _short.maxlong = 120
QUOTED = 240  # largest number of characters of a value in a message
CAUSES = 8  # number of exceptions that are searched in a chain of causes


def shown(value: object) -> str:
    """Return the repr of any value for a message, on one line and shortened."""
    try:
        return brief(" ".join(_short.repr(value).split("\n")), QUOTED)
    except Exception:  # an integer of more than 4,300 digits, or an object whose repr fails
        return f"a {type(value).__name__}"


def brief(text: str, most: int = 120) -> str:
    """Return a text for a message, printable and shortened to ``most`` characters.

    Use it for text that is shown without quotation marks, such as names.
    """
    if len(text) > most:
        text = f"{text[: most * 2 // 3]}...{text[len(text) - most // 3 + 3 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def where_requests_go() -> str:
    """Return a hint for a user who passed a trace in place of requests with prompts, or requests in place of a
    trace.
    """
    traces = "a trace (times and lengths) goes to `minivllm simulate --trace` and `minivllm replay`"
    return f"{traces}, a trace or lines with a prompt to --dataset of bench, compare and ablate"


def want_name(cls: type) -> str:
    """Return the message for a class that was passed where a plug-in's name is expected.  Names can be sent to other
    processes; classes cannot."""
    module = cls.__module__
    return f"expected a name; pass this class as '{module}:{cls.__qualname__}' with allow_targets=[{module!r}]"


def describe_error(exc: BaseException, part: object = None) -> str:
    """Return a message for an exception: its type, the first line of its text, and a place.

    The place is the line of code outside minivllm that raised it.  If there is none, it is the file of ``part``, a
    plug-in object whose method was called.  The exception's ``__str__`` may fail.
    """
    try:
        text = next(iter(str(exc).strip().splitlines()), "")[:400]
    except BaseException:  # ``__str__`` is external code
        text = "its text cannot be read"
    where = raised_at(exc) or from_file(part)
    return f"{type(exc).__name__}: {text}{'' if where in text else where}"


# External plug-ins that this process has constructed: (module, class) -> name for messages.
_external: dict[tuple[str, str], str] = {}


def note_part(label: str, cls: type) -> None:
    """Register the class of a constructed plug-in. Messages then name the code line of errors from its package."""
    if cls.__module__.partition(".")[0] != __package__:
        _external[cls.__module__, cls.__qualname__] = label


def _raised(exc: BaseException | None) -> tuple[str, str]:
    """Return (plug-in, FILE:LINE) of the last external plug-in code that an exception passed through, or "" for both.

    External code is code of the packages of registered plug-ins.  If the package has several plug-ins and none can be
    identified, the first element is "a part of PACKAGE".
    """
    parts: dict[str, dict[str, None]] = {}
    for (module, _), label in _external.items():
        parts.setdefault(module.partition(".")[0], {})[label] = None
    plugin = package = place = ""
    for _ in range(CAUSES):
        trace = exc.__traceback__ if exc is not None else None
        while trace is not None:
            frame = trace.tb_frame
            top = str(frame.f_globals.get("__name__")).partition(".")[0]
            if top in parts:
                cls = type(frame.f_locals.get("self"))
                package = top
                place = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
                plugin = _external.get((cls.__module__, cls.__qualname__), plugin)
            trace = trace.tb_next
        if exc is None or place:
            break
        exc = exc.__cause__
    if not plugin:
        candidates = parts.get(package, {})
        plugin = f"a part of {package}" if len(candidates) > 1 else "".join(candidates)
    return plugin, place


def raised_at(exc: BaseException) -> str:
    """Return `` (at FILE:LINE)``, the last line of external plug-in code that an exception passed through, or ""."""
    _, place = _raised(exc)
    return f" (at {brief(place, 300)})" if place else ""


def external_part(exc: BaseException) -> str:
    """Return the external plug-in that an exception passed through, or "" if there is none."""
    return _raised(exc)[0]


def describe_step_error(exc: BaseException, parts: Mapping[str, Any]) -> str:
    """Return a message for an error of a step that several plug-ins compute together.

    ``parts`` maps each seam to its plug-in.  If the traceback does not pass through external code, the message lists
    the external plug-ins of the step, because their results may be the cause.
    """
    message = describe_error(exc)
    names = _external_names(parts)
    if not names or raised_at(exc):
        return message
    return f"{message}; parts that are not minivllm's own: {names}"


def _external_names(parts: Mapping[str, Any]) -> str:
    """Return the external plug-ins of ``parts`` (seam -> plug-in) with their files, "" if there are none."""
    names = []
    for seam, part in parts.items():
        if part.target.split(".")[0] != __package__:
            names.append(f"{seam} {brief(part.name)}{_file_of(part.target.partition(':')[0])}")
    return ", ".join(names)


def from_signal(exc: BaseException) -> bool:
    """Return whether a handler of a signal raised an exception, such as SystemExit at SIGTERM.

    Python passes the interrupted frame, which is then the caller's, to a handler.  Its own handler of Ctrl-C has no
    frame, so each KeyboardInterrupt counts."""
    trace = exc.__traceback__
    while trace is not None:
        if _takes_caller(trace.tb_frame):
            return True
        trace = trace.tb_next
    return isinstance(exc, KeyboardInterrupt)


def _takes_caller(frame: Any) -> bool:
    """Return whether an argument of a frame's function is the frame of its caller."""
    code = frame.f_code
    count = code.co_argcount
    if code.co_flags & CO_VARARGS:
        count += code.co_kwonlyargcount + 1
    if count == 0 or frame.f_back is None:
        return False
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        if any(one is frame.f_back for one in (value if isinstance(value, tuple) else (value,))):
            return True
    return False


def start_fault(exc: BaseException, parts: Mapping[str, Any]) -> PluginError | None:
    """Return a PluginError for an unexpected exception at the start of an engine with ``parts`` (seam -> plug-in).

    It names the external plug-in that raised the exception.  If there is none, it lists the external plug-ins, because
    a wrong value of theirs may be the cause.  None for an engine without them, for an error of minivllm, and for an
    exception of a signal's handler.
    """
    if isinstance(exc, (MinivllmError, NotImplementedError)) or not _external_names(parts):
        return part_fault(exc)
    if from_signal(exc):
        return None
    return part_fault(exc) or PluginError(f"the engine did not start: {describe_step_error(exc, parts)}")


def part_fault(exc: BaseException) -> PluginError | None:
    """Return a PluginError for an unexpected exception that passed through an external plug-in, or None for other
    exceptions."""
    plugin = external_part(exc)
    if not plugin or isinstance(exc, (MinivllmError, NotImplementedError)) or from_signal(exc):
        return None
    return PluginError(f"{plugin} failed: {describe_error(exc)}")


def from_file(part: object) -> str:
    """Return `` (of FILE)``, the file that defines the class of a plug-in object.

    Return "" for classes of minivllm, and for classes that their module does not contain.
    """
    cls = type(part)
    outer = cls.__qualname__.partition(".")[0]
    if cls.__module__.startswith(f"{__package__}.") or not hasattr(sys.modules.get(cls.__module__), outer):
        return ""
    return _file_of(cls.__module__)


def _file_of(module: str) -> str:
    """Return `` (of FILE)`` for an imported module, or "" if it has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return "" if file is None else f" (of {brief(str(file))})"


def error_from(name: str, message: str, param: str | None = None) -> Exception:
    """Return the error that another process reported, from its class name and message.

    Errors of minivllm keep their class, and so does NotImplementedError (an unknown verb).  Any other class is a bug in
    the other process and becomes a plain MinivllmError.
    """
    cls = NotImplementedError if name == "NotImplementedError" else globals().get(name)
    if cls is RequestError:
        return RequestError(message, param)
    if isinstance(cls, type) and issubclass(cls, (MinivllmError, NotImplementedError)):
        return cls(message)
    return MinivllmError(message if message.startswith(f"{name}: ") else f"{name}: {message}")


def suggest(word: str, candidates: Iterable[Any], cutoff: float = 0.6) -> str:
    """Return `` Did you mean 'x'?`` with the known word that is nearest to ``word``, or "" if none is near."""
    import difflib

    near = difflib.get_close_matches(brief(str(word), 80), [str(k) for k in candidates], n=1, cutoff=cutoff)
    return f" Did you mean {shown(near[0])}?" if near else ""
