"""Keys of compiled kernels that do not depend on the kernels that were compiled before.

Triton's key of a kernel has the constants that the kernel and the functions it calls read.  Triton adds those of a
called function only if it has computed that function's key before.  So the same kernel had several keys, and a later
start or another process compiled it again.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import DependenciesFinder


def order_keys() -> None:
    """Make Triton compute the key of a called function before it adds this function's constants to a key."""
    update = getattr(DependenciesFinder, "_update_hash", None)
    if update is None or getattr(update, "ordered", False):
        return

    def ordered(finder: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 (computes the key, and the constants with it)
        update(finder, function)

    ordered.ordered = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = ordered
