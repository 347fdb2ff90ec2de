"""The border between the engine and code that is not its own: plug-ins, a request's functions, what receives tokens.

Outwards: whatever such code raises ends what it was called for, and never the thread that called it.  An ``Exception``
does that already.  SystemExit, CancelledError, GeneratorExit, ``pytest.fail`` and KeyboardInterrupt are none, so no
``except Exception`` between the call and the thread would hold them: ``call_foreign`` turns them into one.  A
KeyboardInterrupt is noted besides, and raised by the engine's method once that has done its work (``alone``).

Inwards: such code must not call the engine, which is in the middle of a step.  ``alone`` refuses it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from minivllm.errors import MinivllmError, RequestError, describe_error

# ``interrupt``: the KeyboardInterrupt that this thread is still to raise
_noted = threading.local()


class Contained(Exception):
    """Stands for an exception that is no ``Exception``.  Its subclasses are named as what they stand for."""


def contained(exc: BaseException) -> Exception:
    """``exc`` as an ``Exception`` with its name and its text."""
    if isinstance(exc, KeyboardInterrupt):
        _noted.interrupt = exc
    made: type[Contained] = type(type(exc).__name__, (Contained,), {})
    return made(describe_error(exc).partition(": ")[2])


def as_exception(exc: BaseException) -> Exception:
    """``exc`` itself if it is an ``Exception``, else what stands for it."""
    return exc if isinstance(exc, Exception) else contained(exc)


def call_foreign(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, code that is not the engine's.  What it raises is an ``Exception``."""
    try:
        return function(*args)
    except Exception:
        raise
    except BaseException as e:
        raise contained(e) from e


def refusal(exc: BaseException) -> MinivllmError:
    """What a client is told whose request could not be taken because of ``exc``."""
    if not isinstance(exc, Exception) and isinstance(exc.__context__, MinivllmError):
        exc = exc.__context__  # an interrupt, raised once the request had been refused
    return exc if isinstance(exc, MinivllmError) else RequestError(describe_error(exc))


def alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the engine that does not run within another one, nor beside it.  RequestError if it is tried: the
    other one has changed some of the books and not yet the rest."""
    name = method.__name__

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_within(self.within, name)
        self.within = name
        try:
            return method(self, *args, **kwargs)
        finally:
            self.within = ""
            if (interrupt := getattr(_noted, "interrupt", None)) is not None:
                _noted.interrupt = None
                raise interrupt

    return run


def refuse_within(within: str, what: str) -> None:
    """RequestError if the engine is in one of its methods (its name, else "")."""
    if within:
        raise RequestError(
            f"{what} was called while the engine is in {within}: a function that the engine calls, or another thread, "
            "must not call it then; note what is to be done, and do it between two steps"
        )
