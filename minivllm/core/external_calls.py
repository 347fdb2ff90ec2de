"""Calls between the engine and external code: plug-ins, functions of a request, and receivers of tokens.

Calls of external code.  Whatever external code raises must end only the affected request or step, never the calling
thread.  ``except Exception`` does not catch SystemExit, CancelledError, GeneratorExit, ``pytest.fail`` or
KeyboardInterrupt, so ``call_foreign`` converts them into an ``Exception``.  A KeyboardInterrupt, or SystemExit from the
handler of a signal, is also stored, and raised when the engine's current method ends (``alone``), or after the captures
of a start.

Calls by external code.  External code must not call the engine during a step.  ``alone`` refuses such calls.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from minivllm.errors import MinivllmError, RequestError, describe_error, from_signal

# In ``interrupt``, each thread stores an exception of a signal's handler that it must raise later.
_pending = threading.local()


class Contained(Exception):
    """An ``Exception`` that replaces another exception, such as SystemExit.  Each subclass has the name of the replaced
    class."""


def contained(exc: BaseException) -> Exception:
    """Return an ``Exception`` with the class name and text of ``exc``.  Store an exception of a signal's handler, to be
    raised later."""
    if from_signal(exc):
        _pending.interrupt = exc
    cls: type[Contained] = type(type(exc).__name__, (Contained,), {})
    return cls(describe_error(exc).partition(": ")[2])


def as_exception(exc: BaseException) -> Exception:
    """Return ``exc`` if it is an ``Exception``, else an ``Exception`` that replaces it."""
    return exc if isinstance(exc, Exception) else contained(exc)


def call_foreign(function: Callable[..., Any], *args: Any) -> Any:
    """Call external code as ``function(*args)``, and convert whatever it raises to an ``Exception``."""
    try:
        return function(*args)
    except Exception:
        raise
    except BaseException as e:
        raise contained(e) from e


def refusal(exc: BaseException) -> MinivllmError:
    """Return the error for a client whose request was not accepted because of ``exc``."""
    if not isinstance(exc, Exception) and isinstance(exc.__context__, MinivllmError):
        # the KeyboardInterrupt came after the request had been refused for this reason
        exc = exc.__context__
    return exc if isinstance(exc, MinivllmError) else RequestError(describe_error(exc))


def alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the engine that must not run inside another such method, or at the same time.

    RequestError if it does, because the other method has updated only some of the engine's state.
    """
    name = method.__name__

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the method, and then raise a stored exception of a signal's handler."""
        refuse_within(self.within, name)
        self.within = name
        try:
            return method(self, *args, **kwargs)
        finally:
            self.within = ""
            raise_stored()

    return run


def raise_stored() -> None:
    """Raise the exception of a signal's handler that ``contained`` has stored in this thread, if any."""
    interrupt = getattr(_pending, "interrupt", None)
    if interrupt is not None:
        _pending.interrupt = None
        raise interrupt


def refuse_within(within: str, method: str) -> None:
    """Raise RequestError for a call of ``method`` during ``within``, the method that the engine runs ("" for none)."""
    if within:
        raise RequestError(
            f"{method} was called while the engine is in {within}: a function that the engine calls, or another "
            "thread, must not call it then; call it between two steps instead"
        )
