"""GPU memory that all ranks of one host can access, and the collective calls of a step that use it.

The kernels are in ``device.kernels.peer_sums`` and ``device.kernels.peer_moves``.  Each rank has a region, which
torch's symmetric memory maps into all processes.  Its parts are, in this order::

    flags of sums        i32 [BLOCKS, size]
    flags, acks of moves i32 [MOVERS, size] twice;  acks of drawn tokens i32 [MOVERS, size]
    words of sums        i64 [2, WORD_ROWS, size, WORDS]
    rows of sums         i32 [2, BLOCKS, size, CHUNK];  sums of shares i32 [2, BLOCKS, CHUNK]
    places of moves      [2, MOVERS, size, PLACE] bytes
    places of tokens     i64 [2, MOVERS, 2, DRAWN]

A meeting is one exchange of a program with the same program of the other ranks.  Each rank counts its meetings by
program and kind.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.device.kernels.launch import pdl
from minivllm.device.kernels.peer_moves import drawn, gather
from minivllm.device.kernels.peer_sums import BFLOAT16, FLOAT16, FLOAT32, sum_by_flags, sum_by_words

if TYPE_CHECKING:
    from .norm import RMSNorm

BLOCKS = 264  # programs of the kernel that sums, two for each multiprocessor of an H100 or H200
CHUNK = 8192  # largest number of 32-bit words that a program exchanges with other ranks at a time
WORD_ROWS = 128  # most rows that the method "words" sums, in which each word carries its own flag
WORDS = 8192  # most 32-bit words of a row that the method "words" sums
MOVERS = 132  # largest number of programs of the gather kernel
PLACE = 32768  # bytes that each program of a gather moves at a time
# (fewest rows, elements that a program of a gather moves at a time), ascending.  Each entry is a kernel that all ranks
# must compile before rank 0 captures a draw.  ``RankGraphs.warm``, which gathers one row, compiles the first; the step
# that measures memory (``worker.build``) compiles the last.
TILES = ((1, 4096), (32, 16384))
DRAWN = 128  # rows whose sampled tokens a program copies
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
# number of ranks -> largest sum that the method "words" computes, in rows of 8 KiB; and smallest one, in bytes, of the
# method "split"
BY_WORDS = {2: 32, 3: 16, 4: 16, 5: 8, 6: 8, 7: 8, 8: 8}
SPLIT_FROM = {4: 4 << 20, 8: 256 << 10}


@dataclass(frozen=True)
class RegionLayout:
    """The offset in bytes of each part of a rank's shared memory region, and the region's ``bytes``, for ``size``
    ranks."""

    size: int

    def __post_init__(self) -> None:
        at = 0
        size = self.size
        meetings = 4 * MOVERS * size
        counts = {"sum_flags": 4 * BLOCKS * size}
        counts["move_flags"] = meetings
        counts["move_acks"] = meetings
        counts["drawn_acks"] = meetings
        counts["words"] = 8 * 2 * WORD_ROWS * size * WORDS
        counts["rows"] = 4 * 2 * BLOCKS * size * CHUNK
        counts["sums"] = 4 * 2 * BLOCKS * CHUNK
        counts["places"] = 2 * MOVERS * size * PLACE
        counts["drawn"] = 8 * 2 * MOVERS * 2 * DRAWN
        for name, count in counts.items():
            object.__setattr__(self, name, at)
            pages = -(-count // 4096)
            at += pages * 4096
        object.__setattr__(self, "bytes", at)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


def reachable(size: int) -> str:
    """Return the reason why the first ``size`` GPUs cannot access each other's memory; "" if they can."""
    found = torch.cuda.device_count()
    if found < size:
        return f"a rank sees {found} GPU(s) of {size}"
    for a, b in itertools.permutations(range(size), 2):
        if not torch.cuda.can_device_access_peer(a, b):
            return f"cuda:{a} does not reach the memory of cuda:{b}"
        if not _atomics_between(a, b):  # the kernels set flags of other ranks by atomic operations
            return f"atomic operations of cuda:{a} on the memory of cuda:{b} are not its own, as over PCIe"
    return ""


def _atomics_between(a: int, b: int) -> bool:
    """Return whether the driver reports native atomics of GPU a on GPU b's memory; True if it cannot be queried."""
    native = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    found = ctypes.c_int(1)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), native, a, b)
    except (OSError, AttributeError):
        return True
    return bool(failed) or found.value != 0


def region_of(size: int, device: torch.device) -> Tensor:
    """Allocate this rank's memory region: u8 zeros [bytes] that the other ranks can map."""
    import torch.distributed._symmetric_memory as symmetric

    size_in_bytes = RegionLayout(size).bytes
    region = symmetric.empty(size_in_bytes, dtype=torch.uint8, device=device)
    return region.zero_()


def tile_of(rows: int) -> int:
    """Return the elements that a program moves at a time in a gather of ``rows`` rows (``TILES``)."""
    fitting = [tile for start, tile in TILES if start <= max(rows, 1)]
    return fitting[-1]


class PeerMemory:
    """One rank's access to the memory regions of all ranks, and the sums and copies between them.

    ``peers`` i64 [size] are the addresses of the regions in this process; the regions start as zeros.  ``keep`` is an
    object that keeps the mappings alive."""

    def __init__(self, rank: int, peers: Tensor, keep: Any = None) -> None:
        self.rank = rank
        self.size = len(peers)
        self.peers = peers
        self.keep = keep
        self.layout = RegionLayout(self.size)
        self.alone = False  # whether this rank runs a trial without the other ranks, so that it must not wait for them
        device = peers.device

        def counters(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        self.words_met = counters(WORD_ROWS)
        self.flags_met = counters(BLOCKS)
        self.moves_met = counters(MOVERS)
        self.tokens_met = counters(MOVERS)

        # host memory: counts of begun and of ended exchanges, for sums by words, sums by flags, gathers and drawn
        # tokens
        self.progress = torch.zeros(8, dtype=torch.int32, pin_memory=device.type == "cuda")

    @classmethod
    def meet(cls, rank: int, region: Tensor) -> PeerMemory:
        """Map the memory regions of all ranks of torch's default process group; every rank must make this call.

        RuntimeError if the ranks cannot access each other's regions."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        world = dist.group.WORLD
        assert world is not None  # the ranks have joined the process group before
        handle = symmetric.rendezvous(region, world)
        addresses = [int(p) for p in handle.buffer_ptrs]
        peers = torch.tensor(addresses, dtype=torch.int64, device=region.device)
        torch.cuda.synchronize(region.device)
        dist.barrier()
        return cls(rank, peers, (region, handle))

    def reached(self) -> tuple[int, int]:
        """Return the numbers of exchanges with other ranks that the device has begun and has ended, over all kinds.

        They are read from host memory, so the call does not block while a kernel waits for another rank."""
        counts = self.progress.numpy().view(np.uint32).reshape(-1, 2)
        begun, ended = counts.sum(0, dtype=np.int64).tolist()
        return begun, ended

    # ---- sums ----------------------------------------------------------------------------------------------------

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernels can sum x [T, dim]: its dtype, row length, strides and alignment fit."""
        kind = KINDS.get(x.dtype)
        if kind is None or x.dim() != 2 or x.stride(1) != 1:
            return False
        pair = 1 if kind == FLOAT32 else 2
        dim = x.shape[1]
        if dim > pair * min(WORDS, CHUNK):
            return False
        if dim % pair or x.stride(0) % pair:
            return False
        return x.data_ptr() % 4 == 0

    def add(self, x: Tensor) -> None:
        """Replace contiguous x [T, dim] in place by its sum over all ranks."""
        self._sum(x, x)

    def add_norm(self, x: Tensor, bias: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Sum x [T, dim] over all ranks, add the sum and ``bias`` [dim] to ``residual`` [T, dim] in place, and return
        the norm of the new ``residual``, [T, dim]."""
        assert residual.is_contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._sum(x, y, bias, residual, norm)
        return y

    def _sum(
        self,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
        way: str = "",
    ) -> None:
        """Write the sum of x [T, dim] over all ranks to y [T, dim].

        With ``residual`` the sum and ``bias`` are added to it in place, and y is the norm of the result.  None leaves
        that step out.  ``way`` is "words", "flags" or "split"; "" selects the fastest by measurement."""
        tokens, dim = x.shape
        if not tokens:
            return
        kind = KINDS[x.dtype]
        n = dim if kind == FLOAT32 else dim // 2  # number of 32-bit words of a row
        # absent tensors are replaced by ``x``, because a kernel needs an address even if it does not read it
        weight = None
        eps = 0.0
        if norm is not None:
            weight = norm.weight
            eps = norm.eps
        most = max(n, self.size)
        sizes = dict(DIM=dim, N=n, KIND=kind, SIZE=self.size, **pdl(x))
        sizes["P"] = 1 << (most - 1).bit_length()
        sizes["WIDE"] = weight is not None and weight.dtype == torch.float32
        sizes["BIAS"] = bias is not None
        sizes["ADD"] = residual is not None
        sizes["NORM"] = norm is not None
        sizes["num_warps"] = 4 if n <= 1024 else 8
        given = (x, residual, weight, bias, y)
        tensors = [(x if one is None else one).view(torch.int32) for one in given]
        rest = (tensors[0].stride(0), self.rank, eps)
        way = way or self.way(tokens, 4 * n)
        if way == "words":
            at = (*tensors, self.peers, self.words_met, self.progress[:2], *rest)
            sum_by_words[(tokens,)](*at, WORDS=self.layout.words, ROWS=WORD_ROWS, MOST=WORDS, **sizes)
        else:
            sizes["SPLIT"] = way == "split"
            at = (*tensors, self.peers, self.flags_met, self.progress[2:4], *rest, tokens)
            self._sum_by_flags(at, tokens, n, sizes)

    def _sum_by_flags(self, at: tuple[Any, ...], tokens: int, n: int, sizes: dict[str, Any]) -> None:
        programs = min(tokens, BLOCKS)
        each = 1
        while each < 4 and 2 * each * n <= CHUNK and each * programs < tokens:
            each *= 2
        layout = self.layout
        sizes["FLAGS"] = layout.sum_flags
        sizes["ROWS"] = layout.rows
        sizes["SUMS"] = layout.sums
        sizes["EACH"] = each
        sum_by_flags[(programs,)](*at, BLOCKS=BLOCKS, CHUNK=CHUNK, **sizes)

    @staticmethod
    def capturing() -> bool:
        """Return whether the current stream is being captured: launches are recorded and do not run."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def way(self, tokens: int, row_bytes: int) -> str:
        """Return the method for a sum of ``tokens`` rows of ``row_bytes`` bytes: "words", "flags" or "split".

        The result is the same on all ranks, as the kernels require."""
        size = self.size
        total = tokens * row_bytes
        if tokens <= WORD_ROWS and total <= 8192 * BY_WORDS.get(size, 0):
            return "words"
        split_from = SPLIT_FROM.get(size)
        if split_from is None or total < split_from:
            return "flags"
        return "split" if row_bytes >= 16 * size else "flags"

    # ---- moves ---------------------------------------------------------------------------------------------------

    def gather(self, x: Tensor, vocab: int, tile: int = 0) -> Tensor | None:
        """Concatenate the columns of x [N, columns] of all ranks, and return the first ``vocab`` columns on rank 0,
        None on others.

        ``tile`` is the number of elements that a program moves at a time, a power of two that is equal on all ranks; 0
        selects the measured one (``TILES``).  Without the other ranks (``alone``) the result is zeros, unless it is
        captured.
        """
        rows, columns = x.shape
        most = PLACE // x.element_size()
        tile = min(tile or tile_of(rows), most)
        out = None
        if self.rank == 0:
            out = torch.empty(rows, vocab, dtype=x.dtype, device=x.device)
        if out is not None and self.alone and not self.capturing():
            out.zero_()
        elif rows:
            layout = self.layout
            sizes = dict(COLUMNS=columns, SIZE=self.size, TILE=tile, PLACE=PLACE, **pdl(x))
            sizes["FLAGS"] = layout.move_flags
            sizes["ACKS"] = layout.move_acks
            sizes["PLACES"] = layout.places
            tiles = -(-columns // tile)
            programs = min(MOVERS, rows * tiles)
            tensors = (x.contiguous(), x if out is None else out)
            at = (*tensors, self.peers, self.moves_met, self.progress[4:6], rows, self.rank, vocab)
            gather[(programs,)](*at, BLOCKS=MOVERS, num_warps=8, **sizes)
        return out

    def share_drawn(self, slots: Tensor, position: Tensor, state: Any) -> None:
        """Copy the result of sampling from rank 0's ``state`` to the ``state`` of all ranks.

        For each of the N rows ``slots`` i64 [N] it copies the token at ``position`` i64 [N], the number of known
        tokens, and whether the row has stopped."""
        rows = len(slots)
        if not rows:
            return
        layout = self.layout
        stopped = state.stopped.view(torch.uint8)
        columns = (slots, position, state.tokens, state.known, stopped)
        meeting = (self.peers, self.tokens_met, self.progress[6:])
        sizes = dict(SIZE=self.size, BLOCKS=MOVERS, TILE=DRAWN, **pdl(slots))
        sizes["ACKS"] = layout.drawn_acks
        sizes["PLACES"] = layout.drawn
        programs = -(-rows // DRAWN)
        at = (*columns, *meeting, rows, state.tokens.stride(0), self.rank)
        drawn[(programs,)](*at, num_warps=4, **sizes)
