"""Collective operations of the processes (ranks) that share a model by tensor parallelism.

    all_reduce   x of each rank ──► the sum of all, on each       a row-split linear layer, the embedding
    gather       columns of each rank ──► rank 0, side by side    logits of a head that is split by vocabulary
    broadcast    x of rank 0 ──► each                             tokens, at the beginning of the next step
    all_gather   numbers of each rank ──► each                    KV blocks that fit on every rank, checksums

Every rank makes the same calls in the same order.  Each rank counts its calls (``calls``), so that an error can name
the call at which two ranks diverged.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm.core.interfaces.quantizer import Shard
from minivllm.errors import describe_error

if TYPE_CHECKING:
    from .norm import RMSNorm
    from .peer_memory import PeerMemory

OPERATIONS = ("", "all_reduce", "gather", "broadcast", "all_gather")


class Communicator(Protocol):
    """The interface of one rank to the collective operations, for layers and executors."""

    rank: int
    size: int
    peers: PeerMemory | None  # GPU memory that all ranks can access; None if there is none

    def all_reduce(self, x: Tensor) -> None:
        """Replace ``x`` in place by the sum of ``x`` over all ranks, with the same bits on each rank."""
        ...

    def add_norm(self, x: Tensor, bias: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Sum x [T, dim] over all ranks, add the sum and ``bias`` [dim] to ``residual`` [T, dim] in place, and return
        the norm of the new ``residual``, [T, dim].  Requires ``peers.takes(x)``."""
        ...

    def gather(self, x: Tensor, width: int) -> Tensor | None:
        """Concatenate the columns of x [N, n] of all ranks and return the first ``width`` on rank 0, [N, width].

        Return None on the other ranks."""
        ...


class LostRank(RuntimeError):
    """The error that another rank has ended, or has not joined a collective call before the timeout."""


class ProcessGroup:
    """``Communicator`` over the default process group of torch: gloo on a CPU, NCCL on GPUs.

    The calls within a step use GPU memory that all ranks can access, if any (``device.layers.peer_memory``)."""

    def __init__(self, rank: int, size: int, device: str, note: Callable[[int, int], None] | None = None) -> None:
        """Create the communicator of a rank, which joins the other ranks later (``join``).

        ``note(call, operation)`` is called when a collective call begins, with its number and its index in
        ``OPERATIONS``, and again with operation 0 when the call has returned on the host."""
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.calls = 0
        self.lost: LostRank | None = None
        self.peers: PeerMemory | None = None
        self.why_not = ""  # reason why the ranks cannot access each other's memory, for which ``peers`` is None
        self._note = note or (lambda call, operation: None)

    def join(self, store: str | dist.Store, seconds: float) -> None:
        """Join the other ranks through ``store``, the path of a file or a torch store.

        A wait for the others longer than ``seconds``, here or in a later call, raises LostRank."""
        limit = timedelta(seconds=seconds)
        device = None
        if self.device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        meeting = dist.FileStore(store, self.size) if isinstance(store, str) else store
        meeting.set_timeout(limit)
        backend = "gloo" if device is None else "nccl"
        try:
            dist.init_process_group(
                backend, store=meeting, rank=self.rank, world_size=self.size, timeout=limit, device_id=device
            )
        except RuntimeError as e:
            first = str(e).splitlines()[0]
            raise LostRank(f"the {self.size} ranks have not met by {backend} (within {seconds:.0f} s): {first}") from e

    def share_memory(self) -> None:
        """Set up GPU memory that all ranks can access, and use it for later calls.

        If a rank cannot, ``peers`` stays None on all of them, ``why_not`` has the reason, and calls use NCCL."""
        from .peer_memory import PeerMemory, reachable, region_of

        region = None
        self.why_not = reachable(self.size)
        if not self.why_not:
            try:
                region = region_of(self.size, torch.device("cuda", torch.cuda.current_device()))
            # this interface of torch is private and may change
            except (RuntimeError, ImportError, AttributeError) as e:
                self.why_not = describe_error(e)
        if not self.least([region is not None])[0] or region is None:
            self.why_not = self.why_not or "another rank has none"
            return
        try:
            self.peers = PeerMemory.meet(self.rank, region)
        except (RuntimeError, ImportError, AttributeError) as e:
            self.why_not = describe_error(e)
        if not self.least([self.peers is not None])[0]:
            self.peers = None
            self.why_not = self.why_not or "another rank does not reach it"

    def leave(self) -> None:
        self.peers = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _call(self, operation: str, call: Callable[..., Any], *args: Any) -> Any:
        if self.peers is not None and self.peers.capturing():
            return call(*args)  # a capture only records the call, and ranks may make different numbers of captures
        number = OPERATIONS.index(operation)
        self.calls += 1
        self._note(self.calls, number)
        try:
            return call(*args)
        except torch.OutOfMemoryError:  # this rank failed before it sent data, so no rank is lost
            raise
        except RuntimeError as e:
            first = str(e).splitlines()[0]
            self.lost = LostRank(f"{operation} number {self.calls} of rank {self.rank} failed: {first}")
            raise self.lost from e
        finally:
            self._note(self.calls, 0)

    def all_reduce(self, x: Tensor) -> None:
        self._call("all_reduce", self._reduce, x)

    def _reduce(self, x: Tensor) -> None:
        if self.peers is not None and x.is_contiguous() and self.peers.takes(x):
            self.peers.add(x)
            return
        if x.device.type != "cpu":
            dist.all_reduce(x)
            return
        # Rank 0 sums in the order of the ranks.  gloo's ring sums an element in an order that depends on its place in
        # the tensor, so the bits of a row would depend on the other rows; it is also slower on few cores.
        parts = self._gathered(x)
        if parts is not None:
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            x.copy_(total)
        dist.broadcast(x, 0)

    def add_norm(self, x: Tensor, bias: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
        assert self.peers is not None
        return self._call("all_reduce", self.peers.add_norm, x, bias, residual, norm)

    def gather(self, x: Tensor, width: int) -> Tensor | None:
        if self.peers is None:
            parts = self._call("gather", self._gathered, x.contiguous())
            if parts is None:
                return None
            columns = torch.cat(parts, dim=1)
            return columns[:, :width].contiguous()
        if self.peers.alone:  # a trial of this rank before a capture, in which the other ranks do not take part
            return self.peers.gather(x, width)
        return self._call("gather", self.peers.gather, x, width)

    def share_drawn(self, slots: Tensor, position: Tensor, state: Any) -> None:
        """Copy the result of sampling from rank 0's ``state`` to the ``state`` of all ranks.

        For each of the N rows ``slots`` i64 [N] it copies the token at ``position`` i64 [N], the number of known
        tokens, and whether the row has stopped."""
        if self.peers is not None:
            self._call("broadcast", self.peers.share_drawn, slots, position, state)
            return
        tokens = state.tokens[slots, position].long()
        known = state.known[slots]
        stopped = state.stopped[slots].long()
        columns = torch.stack([tokens, known, stopped])
        self.broadcast(columns)
        if self.rank:
            state.tokens[slots, position] = columns[0].int()
            state.known[slots] = columns[1]
            state.stopped[slots] = columns[2].bool()

    def _gathered(self, x: Tensor) -> list[Tensor] | None:
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts, 0)
        return parts

    def replayed(self, operation: str) -> None:
        """Count a collective call that a replayed graph of this rank makes.

        The other ranks count the call when they make it, so the counts of all ranks stay equal."""
        self._call(operation, lambda: None)

    def broadcast(self, x: Tensor) -> None:
        """Replace ``x`` in place by the ``x`` of rank 0."""
        self._call("broadcast", dist.broadcast, x, 0)

    def all_gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the 64-bit integers of every rank, in the order of the ranks.

        All ranks must pass the same count of numbers.  Waits for the device."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._call("all_gather", dist.all_gather, found, mine)
        return torch.stack(found).tolist()

    def least(self, numbers: list[int]) -> list[int]:
        """Return for each of ``numbers`` the minimum over all ranks."""
        of_ranks = self.all_gather(numbers)
        return [min(column) for column in zip(*of_ranks, strict=True)]


def share_of(communicator: Any) -> Shard:
    """Return the rank and size of a communicator as a Shard; None means a single process that has the whole model."""
    return Shard() if communicator is None else Shard(communicator.rank, communicator.size)
