"""A model as a list of operations, which the native part (``program.cpp``) runs in one call per step.

An operation reads and writes *registers*, float32 [tokens, width].  Weights are read from the memory of their modules.
The program keeps the tensors alive that it receives.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.errors import ResourceError

from .library import ISAS, isa, load

# names of the values of enumerations in program.cpp and kernels.h, in the same order
KINDS = ("embed", "norm", "product", "attend", "add", "pick", "cap", "gate", "delta", "conv", "keep", "shrink", "store")
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, None: 5, "sigmoid": 6}

LOGITS, DRAW = 1, 2  # parts of SAMPLE
Call = Callable[..., None]

_INT, _REAL, _ADDRESS = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


def each(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return (name, type) pairs for fields of a C struct that have the same type; ``names`` are separated by spaces."""
    return [(name, kind) for name in names.split()]


# function of program.cpp without a result -> types of its arguments
_TAKES: Mapping[str, list[Any]] = {
    "register": [_ADDRESS, _ADDRESS, _INT, _INT],
    "op": [_ADDRESS, _ADDRESS, ctypes.c_int32],
    "forward": [_ADDRESS, _ADDRESS, _ADDRESS],
    "states": [_ADDRESS, _ADDRESS],
    "sample": [_ADDRESS, _ADDRESS, _ADDRESS],
    "propose": [_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS],
    "draft": [_ADDRESS, _ADDRESS, _ADDRESS, _REAL, _ADDRESS],
    "forward_drafted": [_ADDRESS, _ADDRESS, _ADDRESS],
    "sample_drafted": [_ADDRESS, _ADDRESS, _ADDRESS],
    "free": [_ADDRESS],
    "product": [ctypes.c_int32, _ADDRESS, _ADDRESS, _INT, _ADDRESS],
    "shared_product": [_ADDRESS, ctypes.c_int32, _ADDRESS, _ADDRESS, *[_INT] * 3, _ADDRESS, _INT, _INT],
    "free_team": [_ADDRESS],
    "delta": [_ADDRESS, ctypes.c_int32, _ADDRESS, _ADDRESS, _ADDRESS],
}
_DECLARING = threading.Lock()


class Op(ctypes.Structure):
    """An operation of a native program: the C struct ``program.cpp:Op``, where its fields are documented."""

    _fields_ = [
        *each(_INT, "kind in_ out format n k group"),
        *each(_ADDRESS, "data scale zero bias"),
        *each(_INT, "adds activation gated"),
        *each(_ADDRESS, "norm_weight norm_bias"),
        ("centered", _INT),
        *each(_REAL, "eps alpha cap"),
        *each(_INT, "heads kv_heads dim_qk dim_v rope_dim kv_group window"),
        *each(_ADDRESS, "cos sin q_norm k_norm sinks"),
        ("softmax_scale", _REAL),
        *each(_ADDRESS, "keys values key_scales value_scales"),
        ("kv_format", _INT),
        ("positions", _ADDRESS),
        *each(_INT, "positions_format first_position"),
        ("low_rank", _ADDRESS),
        ("inner", _INT),
    ]


class LowRankAddresses(ctypes.Structure):
    """``program.cpp:LowRank``."""

    _fields_ = [
        *each(_ADDRESS, "a b ranks starts"),
        *each(_INT, "format parts rank inputs outputs ranks_stride a_place b_place"),
    ]


def low_rank(a: Tensor, b: Tensor, ranks: Tensor, starts: Tensor) -> LowRankAddresses:
    """Return the low-rank products of a layer for a program, which reads the memory of the tensors.

    a [places, parts, rank, in] and b [places, out, rank] have the same dtype, and each place is contiguous.  ``ranks``
    i32 [places] are the ranks of the adapters.  ``starts`` i64 [parts + 1] are the first outputs of the parts, and the
    end of the last one.
    """
    size = a.element_size()
    made = LowRankAddresses()
    made.a = a.data_ptr()
    made.b = b.data_ptr()
    made.ranks = ranks.data_ptr()
    made.starts = starts.data_ptr()
    made.format = FORMATS[a.dtype]
    made.parts = a.shape[1]
    made.rank = a.shape[2]
    made.inputs = a.shape[3]
    made.outputs = b.shape[1]
    made.ranks_stride = ranks.stride(0)
    made.a_place = a.stride(0) * size
    made.b_place = b.stride(0) * size
    return made


class HeadStates(ctypes.Structure):
    """The C struct ``program.cpp:HeadStates``: addresses of the hidden states that a drafter's head reads and writes,
    and of the columns of its sequences.  ``propose`` does not read these columns."""

    _fields_ = [
        ("memory", _ADDRESS),
        ("format", _INT),
        ("width", _INT),
        ("in_", _ADDRESS),
        ("out", _ADDRESS),
        ("most", _INT),
        *each(_ADDRESS, "stopped read calls"),
    ]


class ColumnAddresses(ctypes.Structure):
    """The C struct ``program.cpp:Columns``: addresses of the columns of ``device/worker/state.py:DeviceState``."""

    _fields_ = [
        ("tokens", _ADDRESS),
        ("longest", _INT),
        ("table", _ADDRESS),
        *each(_INT, "slots blocks block"),
        *each(_ADDRESS, "stopped rope_first known end min_end seed sample n_eos"),
        ("stop_ids", _ADDRESS),
        ("per_row", _INT),
        ("temperature", _ADDRESS),
        ("dropped", _ADDRESS),
        ("ahead", _INT),
    ]


@functools.cache
def _declare(library: ctypes.CDLL) -> None:
    library.minivllm_op_size.restype = _INT
    if library.minivllm_op_size() != ctypes.sizeof(Op):
        raise ResourceError("the native part was compiled for another version of this package: reinstall")
    library.minivllm_program.argtypes = [ctypes.c_int32, ctypes.c_int32, _INT, _ADDRESS]
    library.minivllm_program.restype = _ADDRESS
    library.minivllm_team.argtypes = [ctypes.c_int32]
    library.minivllm_team.restype = _ADDRESS
    for name, takes in _TAKES.items():
        function = getattr(library, f"minivllm_{name}")
        function.argtypes, function.restype = takes, None


def declared() -> ctypes.CDLL:
    """Return the library with the argument types of its functions set.  ResourceError if it cannot be used."""
    library = load()
    if library is None:
        raise ResourceError(
            "the native part cannot be used; minivllm.device.native.library.why_not() returns the reason"
        )
    with _DECLARING:  # otherwise another thread could call a function whose argument types are not declared yet
        _declare(library)
    return library


class Program:
    """A program of a model, which ``threads`` run for steps of up to ``most_tokens`` tokens.

    ``columns`` maps a field of ``ColumnAddresses`` to a tensor, whose address is stored, to a number or to None.  These
    tensors and the tensors of operations must keep their addresses.  ResourceError if the native part cannot be used.
    """

    def __init__(self, threads: int, most_tokens: int, columns: Mapping[str, Any]) -> None:
        self._library = declared()
        self.most_tokens = most_tokens
        self._keep: list[Any] = list(columns.values())
        self._registers = 0
        addresses = {name: _field(value) for name, value in columns.items()}
        made = ColumnAddresses(**addresses)
        self._process = os.getpid()
        instructions = ISAS.index(isa())
        at = ctypes.addressof(made)
        self._made = self._library.minivllm_program(instructions, threads, most_tokens, at)
        if not self._made:
            raise ResourceError("no memory for a program of the native part")
        library = self._library
        self._forward: Call = library.minivllm_forward
        self._states: Call = library.minivllm_states
        self._sample: Call = library.minivllm_sample
        self._propose: Call = library.minivllm_propose
        self._draft: Call = library.minivllm_draft
        self._forward_drafted: Call = library.minivllm_forward_drafted
        self._sample_drafted: Call = library.minivllm_sample_drafted

    def register(self, memory: Tensor) -> int:
        """Add a register of the program and return its index.  Its ``memory`` f32 [tokens, width] may be columns of the
        memory of another register."""
        self._keep.append(memory)
        self._registers += 1
        width = memory.shape[1]
        stride = memory.stride(0) if len(memory) > 1 else width
        data = memory.data_ptr()
        self._library.minivllm_register(self._made, data, width, stride)
        return self._registers - 1

    def add(self, kind: str, sampling: bool = False, **fields: Any) -> None:
        """Append an operation to the layers, or with ``sampling`` to the head.

        Fields that are tensors become addresses.
        """
        self._keep += [value for value in fields.values() if isinstance(value, Tensor)]
        defaults = {"alpha": 1.0, "activation": ACTIVATIONS[None], "group": 1}
        fields = defaults | fields
        made = {name: _field(value) for name, value in fields.items()}
        op = Op(kind=KINDS.index(kind), **made)
        at = ctypes.addressof(op)
        self._library.minivllm_op(self._made, at, int(sampling))

    def hold(self, *objects: Any) -> None:
        """Keep references to objects whose memory the operations read."""
        self._keep += objects

    def states(self, rows: ctypes.Structure) -> None:
        """Set the recurrent states of the rows of the next step, a ``recurrent.py:StateRows``."""
        at = ctypes.addressof(rows)
        self._states(self._made, at)

    def forward(self, box: int, places: int | None = None) -> None:
        """Run the layers of a step (FORWARD).

        ``box`` is the address of an array of i64 arguments (see ``program.cpp:minivllm_forward``).  ``places`` is the
        address of i32 [T], the index of each token's adapter in the adapter memory; None if no token has an adapter."""
        self._forward(self._made, box, places)

    def sample(self, box: int, out: int) -> None:
        """Compute the logits of a step, draw its tokens, or both (SAMPLE).

        ``box`` is as in ``forward``.  ``out`` is the address of the result i32 [3, rows] (see
        ``program.cpp:minivllm_sample``).
        """
        self._sample(self._made, box, out)

    def propose(self, box: int, states: HeadStates, out: int) -> None:
        """Draw the drafts of a head with all its passes.  ``box`` is the address of an array of i64 arguments, and
        ``out`` that of the drafts i32 [K, rows] (see ``program.cpp:minivllm_propose``)."""
        at = ctypes.addressof(states)
        self._propose(self._made, box, at, out)

    def draft(self, box: int, states: int, least: float, out: int) -> None:
        """Draw drafts of the sequences of a step that have rows for them, and write them to the columns of tokens.

        ``box`` is the address of an array of i64 arguments (see ``program.cpp:drafted_rows``), and ``states`` that of a
        ``HeadStates``.  The drafts of a sequence end where the probability that all are right, as the head estimates
        it, falls below ``least``.  ``out`` is the address of their numbers i32 [n], one for each sequence with rows for
        drafts.  They are -1, and nothing else changes, if the first pass has more pairs than a call computes."""
        self._draft(self._made, box, states, least, out)

    def forward_drafted(self, box: int, drafted: int) -> None:
        """Run the layers of the rows of a step with drafts.  ``box`` is as in ``draft``, and ``drafted`` is the address
        of the numbers that ``draft`` returned; rows of further drafts are left out."""
        self._forward_drafted(self._made, box, drafted)

    def sample_drafted(self, box: int, out: int) -> None:
        """Draw the tokens of the rows that ``forward_drafted`` has computed.  ``out`` is the address of the result i32
        [3, rows] of all rows of the step, as in ``sample``; it is 0 for rows that were left out."""
        self._sample_drafted(self._made, box, out)

    def close(self) -> None:
        """End the threads of the program.  No call of it may be running."""
        made, self._made = self._made, None
        # the threads belong to the process that made them; a forked child has none to end
        if made and self._process == os.getpid():
            self._library.minivllm_free(made)

    def __del__(self) -> None:
        if getattr(self, "_made", None):
            self.close()


def _field(value: Any) -> Any:
    """Convert a value to a field of a C struct: the address for a tensor, or the number itself."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value


class MatrixAddresses(ctypes.Structure):
    """The C struct ``kernels.h:Matrix``: addresses and sizes of a weight."""

    _fields_ = [
        *each(_ADDRESS, "data scale zero bias"),
        *each(_INT, "format n k group"),
    ]


def product(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, zero: Tensor | None = None, group: int = 1
) -> Tensor:
    """Multiply x f32 [T, in] by a weight [out, in], and return f32 [T, out].  The weight has one of the formats of
    ``kernels.h:Matrix``, and one thread computes the product."""
    library = declared()
    x = x.contiguous()
    rows, inputs = x.shape
    out = torch.empty(rows, len(weight))
    addresses = [_field(tensor) for tensor in (weight, scale, zero, None)]
    kind = FORMATS[weight.dtype]
    made = MatrixAddresses(*addresses, kind, len(weight), inputs, group)
    instructions = ISAS.index(isa())
    at = ctypes.addressof(made)
    library.minivllm_product(instructions, at, x.data_ptr(), rows, out.data_ptr())
    return out


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
