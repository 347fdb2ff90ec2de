"""The memory of recurrent states, for ``minivllm explain``, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.core.interfaces.kvformat import DTYPE_BYTES

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.states import Recurrent


def states_explained(states: Sequence[Recurrent], layers: int, wiring: Wiring) -> str:
    """Return the bytes and the number of the states of a model with ``layers`` layers, over all processes."""
    drafts = wiring.speculation.num_speculative_tokens
    each = sum(_bytes(state, wiring.dtype, drafts) for state in states)
    slots = wiring.max_num_seqs + 1
    checkpoints = wiring.cache.num_state_checkpoints
    text = f"{_counted(states, layers)}: {_words(each)} for each of {slots} states"
    text += f" (max_num_seqs and a spare one, {_words(slots * each)})"
    if checkpoints < 0:
        return f"{text}; as many checkpoints as fit are taken at the start"
    taken = "no checkpoints" if not checkpoints else f"{checkpoints} checkpoints ({_words(checkpoints * each)})"
    return f"{text}, and {taken}"


def second_states_explained(states: Sequence[Recurrent], layers: int, wiring: Wiring) -> str:
    """Return the bytes and the number of the states of a second model (``OwnModel``), in each process."""
    each = sum(_bytes(state, wiring.dtype, 0) for state in states)
    slots = wiring.max_num_seqs + 1
    text = f"{_counted(states, layers)}: {_words(each)} for each of {2 * slots} states"
    return f"{text} (two for each of max_num_seqs slots and a spare one, {_words(2 * slots * each)})"


def _counted(states: Sequence[Recurrent], layers: int) -> str:
    return f"{len(states)} of {layers} layers have a recurrent state"


def _bytes(state: Recurrent, dtype: str, drafts: int) -> int:
    """Return the size in bytes of the state of one sequence in one layer."""
    total = 0
    for tensor in state.tensors:
        places = state.places(drafts) if tensor.ring else 1
        total += places * math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype or dtype]
    return total


def _words(count: int) -> str:
    """Return a number of bytes in words, such as "49.2 MiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
