"""Build the stores of a worker, to which pages of the KV cache are moved (``core.mover``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.kvstore import StoreContext
from minivllm.core.mover import Mover
from minivllm.registry import build_part

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.mover import PageMemory


def make_mover(
    wiring: Wiring,
    pages: PageMemory,
    identity: str,
    empty: Callable[[int], np.ndarray] | None = None,
    threaded: bool = True,
) -> Mover:
    """Build the stores of a configuration, and the mover that copies pages of the KV cache between them and the device.

    ``identity`` is the digest (hex) of all that determines a page besides its tokens.  ``empty`` returns memory from
    which the device can copy asynchronously; None means ordinary memory.  Without ``threaded`` the mover has
    no threads, and the caller runs its work.
    """
    place = wiring.parallel
    label = f"{wiring.model_dir}, {wiring.dtype} on {wiring.device}"
    ctx = StoreContext(identity, place.rank, place.tensor_parallel_size, label)
    if empty is not None:
        ctx = replace(ctx, empty=empty)
    stores = [build_part("kvstore", part, ctx) for part in wiring.cache.stores]
    return Mover(stores, pages, identity, threaded)
