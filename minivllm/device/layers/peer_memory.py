"""Memory of one host's GPUs that all of them reach, and the calls of a step that go through it
(``device.kernels.peer_sums``, ``device.kernels.peer_moves``).

Each rank has a region, which torch's symmetric memory maps into all processes.  Its parts, in bytes from the begin::

    flags of sums        i32 [BLOCKS, size]
    flags, acks of moves i32 [MOVERS, size] twice;  acks of drawn tokens i32 [MOVERS, size]
    words of sums        i64 [2, WORD_ROWS, size, WORDS]
    rows of sums         i32 [2, BLOCKS, size, CHUNK];  sums of shares i32 [2, BLOCKS, CHUNK]
    places of moves      [2, MOVERS, size, PLACE] bytes
    places of tokens     i64 [2, MOVERS, 2, DRAWN]

Beside it each rank counts its meetings, by program and kind.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.device.kernels.launch import pdl
from minivllm.device.kernels.peer_moves import drawn, gather
from minivllm.device.kernels.peer_sums import BFLOAT16, FLOAT16, FLOAT32, sum_by_flags, sum_by_words

if TYPE_CHECKING:
    from .norm import RMSNorm

BLOCKS = 264  # programs of a sum, two for each multiprocessor of an H100 or H200
CHUNK = 8192  # words of 32 bits that a program brings to a meeting
WORD_ROWS, WORDS = 128, 8192  # of sums by words: rows, and words of 32 bits of a row
MOVERS, PLACE = 132, 32768  # programs of a gather, bytes that each has room for at a time
# elements that a program of a gather moves at a time, by the rows from which on; ascending.  Each is a kernel, which
# all ranks must have compiled before rank 0 captures a draw: the first by ``RankGraphs.warm``, which gathers one row,
# and that of the most rows by the step that measures memory (``worker.build``)
TILES = ((1, 4096), (32, 16384))
DRAWN = 128  # rows of drawn tokens for each program
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
# rows of 8 KiB up to which a sum goes by words, and bytes of all rows from which it is split, by ranks
BY_WORDS = {2: 32, 3: 16, 4: 16, 5: 8, 6: 8, 7: 8, 8: 8}
SPLIT_FROM = {4: 4 << 20, 8: 256 << 10}


@dataclass(frozen=True)
class RegionLayout:
    """Bytes from a region's begin, by ``size`` ranks."""

    size: int

    def __post_init__(self) -> None:
        at, size = 0, self.size
        for name, count in (
            ("sum_flags", 4 * BLOCKS * size),
            ("move_flags", 4 * MOVERS * size),
            ("move_acks", 4 * MOVERS * size),
            ("drawn_acks", 4 * MOVERS * size),
            ("words", 8 * 2 * WORD_ROWS * size * WORDS),
            ("rows", 4 * 2 * BLOCKS * size * CHUNK),
            ("sums", 4 * 2 * BLOCKS * CHUNK),
            ("places", 2 * MOVERS * size * PLACE),
            ("drawn", 8 * 2 * MOVERS * 2 * DRAWN),
        ):
            object.__setattr__(self, name, at)
            at += -(-count // 4096) * 4096
        object.__setattr__(self, "bytes", at)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


def reachable(size: int) -> str:
    """Why the first ``size`` GPUs of this host cannot use each other's memory; "" if they can."""
    if torch.cuda.device_count() < size:
        return f"a rank sees {torch.cuda.device_count()} GPU(s) of {size}"
    for a in range(size):
        for b in range(size):
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"cuda:{a} does not reach the memory of cuda:{b}"
            if a != b and not _atomics_between(a, b):  # flags are exchanged by them
                return f"atomic operations of cuda:{a} on the memory of cuda:{b} are not its own, as over PCIe"
    return ""


def _atomics_between(a: int, b: int) -> bool:
    """What the driver says of these two GPUs; True where it cannot be asked."""
    native, found = 3, ctypes.c_int(1)  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(found), native, a, b)
    except (OSError, AttributeError):
        return True
    return bool(failed) or found.value != 0


def region_of(size: int, device: torch.device) -> Tensor:
    """Memory of this rank's that the others can come to reach; zeros."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(RegionLayout(size).bytes, dtype=torch.uint8, device=device).zero_()


def tile_of(rows: int) -> int:
    """Elements that a program of a gather of so many rows moves at a time."""
    return [tile for start, tile in TILES if start <= max(rows, 1)][-1]


class PeerMemory:
    """One rank's end.  ``peers`` i64 [size]: the addresses of all regions in this process, which are zero at first;
    ``keep``: what holds them."""

    def __init__(self, rank: int, peers: Tensor, keep: Any = None) -> None:
        self.rank, self.size, self.peers, self.keep = rank, len(peers), peers, keep
        self.layout = RegionLayout(self.size)
        self.alone = False  # the others do not take part, as when a draw is tried before it is captured
        device = peers.device
        self.words_met, self.flags_met, self.moves_met, self.tokens_met = (
            torch.zeros(n, dtype=torch.int32, device=device) for n in (WORD_ROWS, BLOCKS, MOVERS, MOVERS)
        )

        # host memory: of sums by words, by flags, logits and drawn tokens the number that began last, that ended last
        self.progress = torch.zeros(8, dtype=torch.int32, pin_memory=device.type == "cuda")

    @classmethod
    def meet(cls, rank: int, region: Tensor) -> PeerMemory:
        """With the ranks of torch's default process group, all of which come here with a region.  RuntimeError where
        they do not reach each other's."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        handle = symmetric.rendezvous(region, dist.group.WORLD)
        peers = torch.tensor([int(p) for p in handle.buffer_ptrs], dtype=torch.int64, device=region.device)
        torch.cuda.synchronize(region.device)
        dist.barrier()
        return cls(rank, peers, (region, handle))

    def reached(self) -> tuple[int, int]:
        """(meetings with others that the device has begun, those that it has ended), of all kinds together.  Read from
        host memory: it says so, too, while a kernel waits for another rank."""
        begun, ended = zip(*self.progress.view(-1, 2).tolist(), strict=True)
        return sum(n % 2**32 for n in begun), sum(n % 2**32 for n in ended)

    # ---- sums ----------------------------------------------------------------------------------------------------

    def takes(self, x: Tensor) -> bool:
        """Whether rows of x [T, dim] can be summed here."""
        kind = KINDS.get(x.dtype)
        if kind is None or x.dim() != 2 or x.stride(1) != 1:
            return False
        pair = 1 if kind == FLOAT32 else 2
        fits = x.shape[1] <= pair * min(WORDS, CHUNK)
        return fits and x.shape[1] % pair == 0 and x.stride(0) % pair == 0 and x.data_ptr() % 4 == 0

    def add(self, x: Tensor) -> None:
        """x [T, dim], contiguous, becomes the sum of all ranks', in place."""
        self._sum(x, x)

    def add_norm(self, x: Tensor, bias: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
        """The sum of all ranks' x [T, dim], with ``bias`` [dim], is added to ``residual`` [T, dim] in place.  What is
        given back is the norm of that."""
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
        """``way``: "words", "flags" or "split"; "" as measured."""
        tokens, dim = x.shape
        if not tokens:
            return
        kind = KINDS[x.dtype]
        n = dim // (1 if kind == FLOAT32 else 2)  # words of a row
        sizes = dict(
            DIM=dim,
            N=n,
            P=1 << (max(n, self.size) - 1).bit_length(),
            KIND=kind,
            WIDE=norm is not None and norm.weight.dtype == torch.float32,
            BIAS=bias is not None,
            ADD=residual is not None,
            NORM=norm is not None,
            SIZE=self.size,
            num_warps=4 if n <= 1024 else 8,
            **pdl(x),
        )
        # what is not there is not read
        given = (x, residual, None if norm is None else norm.weight, bias, y)
        tensors = [(x if one is None else one).view(torch.int32) for one in given]
        rest = (tensors[0].stride(0), self.rank, 0.0 if norm is None else norm.eps)
        way = way or self.way(tokens, 4 * n)
        if way == "words":
            at = (*tensors, self.peers, self.words_met, self.progress[:2], *rest)
            sum_by_words[(tokens,)](*at, WORDS=self.layout.words, ROWS=WORD_ROWS, MOST=WORDS, **sizes)
        else:
            at = (*tensors, self.peers, self.flags_met, self.progress[2:4], *rest, tokens)
            self._sum_by_flags(at, tokens, n, way == "split", sizes)

    def _sum_by_flags(self, at: tuple[Any, ...], tokens: int, n: int, split: bool, sizes: dict[str, Any]) -> None:
        programs, each = min(tokens, BLOCKS), 1
        while 2 * each * n <= CHUNK and each < 4 and each * programs < tokens:
            each *= 2
        sum_by_flags[(programs,)](
            *at,
            FLAGS=self.layout.sum_flags,
            ROWS=self.layout.rows,
            SUMS=self.layout.sums,
            EACH=each,
            BLOCKS=BLOCKS,
            CHUNK=CHUNK,
            SPLIT=split,
            **sizes,
        )

    @staticmethod
    def capturing() -> bool:
        """Whether what is launched now is recorded, and does not run."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def way(self, tokens: int, row_bytes: int) -> str:
        """How ``tokens`` rows of so many bytes are summed: the same on all ranks."""
        if tokens <= WORD_ROWS and tokens * row_bytes <= 8192 * BY_WORDS.get(self.size, 0):
            return "words"
        split = row_bytes >= 16 * self.size and tokens * row_bytes >= SPLIT_FROM.get(self.size, 1 << 62)
        return "split" if split else "flags"

    # ---- moves ---------------------------------------------------------------------------------------------------

    def gather(self, x: Tensor, vocab: int, tile: int = 0) -> Tensor | None:
        """x [N, columns] of all ranks side by side, cut at ``vocab``: [N, vocab] on rank 0, None on others.  ``tile``:
        elements that a program moves at a time, a power of two, the same on all ranks; 0: as measured (``TILES``)."""
        rows, columns = x.shape
        tile = min(tile or tile_of(rows), PLACE // x.element_size())
        out = torch.empty(rows, vocab, dtype=x.dtype, device=x.device) if self.rank == 0 else None
        if out is not None and self.alone and not self.capturing():
            out.zero_()
        elif rows:
            programs = min(MOVERS, rows * -(-columns // tile))
            gather[(programs,)](
                x.contiguous(),
                x if out is None else out,
                self.peers,
                self.moves_met,
                self.progress[4:6],
                rows,
                self.rank,
                vocab,
                COLUMNS=columns,
                SIZE=self.size,
                FLAGS=self.layout.move_flags,
                ACKS=self.layout.move_acks,
                PLACES=self.layout.places,
                BLOCKS=MOVERS,
                TILE=tile,
                PLACE=PLACE,
                num_warps=8,
                **pdl(x),
            )
        return out

    def share_drawn(self, slots: Tensor, position: Tensor, state: Any) -> None:
        """Rank 0's columns (``state``) of the rows that drew, to all: of ``slots`` i64 [N] the token at ``position``
        i64 [N], the length, and whether it has ended."""
        rows = len(slots)
        if rows:
            drawn[(-(-rows // DRAWN),)](
                slots,
                position,
                state.tokens,
                state.known,
                state.stopped.view(torch.uint8),
                self.peers,
                self.tokens_met,
                self.progress[6:],
                rows,
                state.tokens.stride(0),
                self.rank,
                SIZE=self.size,
                ACKS=self.layout.drawn_acks,
                PLACES=self.layout.drawn,
                BLOCKS=MOVERS,
                TILE=DRAWN,
                num_warps=4,
                **pdl(slots),
            )
