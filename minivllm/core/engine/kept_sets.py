"""The tokens that a compression keeps in the KV cache, for requests that read them with the tap
``compression.kept``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.core.interfaces.taps import KEPT
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from minivllm.core.interfaces.executor import Capacity, Wiring

    from .compaction import Compaction
    from .request import Request, Seq


def check_kept(request: Request, wiring: Wiring, capacity: Capacity) -> None:
    """Set ``request.reads_kept``: whether the request reads which tokens its compressions keep.  RequestError if they
    cannot be read."""
    taps = [tap for tap in request.taps if tap.point == KEPT]
    if not taps:
        return
    problem = ""
    if any(tap.add is not None for tap in taps):
        problem = "nothing is added to it; use only read=True"
    elif wiring.compressor is None:
        problem = "compressor=none keeps all tokens; choose a compressor, or leave the tap out"
    elif not capacity.kept_heads:
        problem = (
            "the executor does not return kept tokens; use tensor_parallel_size=1 and no simulator"
        )
    elif request.beams is not None:
        problem = "a beam search is not compressed; leave the tap out"
    if problem:
        raise RequestError(f"taps: {KEPT}: {problem}", "taps")
    request.reads_kept = True


class KeptReader:
    """Stores the kept tokens of compressions, which a step returns in ``StepResult.kept``, with their sequences.

    ``heads`` has the number of KV heads of each layer of each KV group, ``layers`` the indices of these layers, and
    ``most`` is the number of bytes that a request may read."""

    def __init__(self, wiring: Wiring, capacity: Capacity) -> None:
        self.heads = capacity.kept_heads
        self.layers = wiring.cache.groups
        self.most = wiring.max_tap_bytes

    def keep(self, compactions: Sequence[Compaction], values: np.ndarray) -> list[Seq]:
        """Store the kept tokens of a step's compactions with their sequences.  Return the sequences whose request has
        read more bytes than it may.

        ``values`` i32 is ``StepResult.kept``, which is empty if the step failed."""
        over = []
        at = 0
        for one in compactions if len(values) else ():
            seq = one.reader
            assert seq is not None
            of_layers = seq.kept.setdefault(one.computed, {})
            for layer, heads in zip(self.layers[one.group], self.heads[one.group], strict=True):
                end = at + heads * one.kept
                of_layers[layer] = values[at:end].reshape(heads, one.kept).copy()
                at = end
                seq.request.tap_bytes += of_layers[layer].nbytes
            if seq.request.tap_bytes > self.most:
                over.append(seq)
        return over
