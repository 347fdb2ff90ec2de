"""Keep the objects of a start out of garbage collections in a program that uses ``LLM`` or ``AsyncLLM``.

The imports and the start of an engine make some 200,000 objects that stay.  Each full collection would scan them, which
takes 0.1 to 0.3 s in the middle of a step.  Python can only exclude all objects of the process, so these include the
program's own.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

_lock = threading.RLock()  # the thread that holds it may delete an owner in a collection
_excluded: set[object] = set()  # one key for each engine since whose start no engine has been closed


def exclude_present(owner: object) -> Callable[[], object]:
    """Collect the garbage of the process, and exclude all remaining objects from further collections.

    Return a function that ends the exclusion for all engines.  It is also called when ``owner`` is deleted.  Garbage
    that was excluded can then be collected.  Nothing is done if the program has switched the automatic collection off,
    and nothing is excluded if the program has excluded objects itself, because their exclusion could not be kept."""
    if not gc.isenabled():
        return lambda: None
    gc.collect()
    with _lock:
        if not _excluded and gc.get_freeze_count():
            return lambda: None
        gc.freeze()
        key = object()
        _excluded.add(key)
    end = weakref.finalize(owner, _include_all, key)
    end.atexit = False
    return end


def _include_all(key: object) -> None:
    """End the exclusion of all objects, unless that has happened since the start of the engine of ``key``.

    Objects of other engines are scanned too, because garbage of the closed engine is among the excluded objects."""
    with _lock:
        if key in _excluded:
            _excluded.clear()
            gc.unfreeze()
