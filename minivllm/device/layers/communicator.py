"""What the processes that share a model tell each other: sums of partial results, parts of logits, drawn tokens.

    all_reduce   x of each rank ──► the sum of all, on each       a product whose inputs are cut, the embedding
    gather       columns of each rank ──► rank 0, side by side    logits of a head that is cut by vocabulary
    broadcast    of rank 0 ──► each                               tokens, at the head of the next step
    all_gather   numbers of each rank ──► each                    blocks that all have room for, checksums

Every rank makes the same calls in the same order.  Each call is counted (``calls``), so that of two ranks that part
it can be said where.
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
    """One rank's end, as layers and executors use it."""

    rank: int
    size: int
    peers: PeerMemory | None  # memory of GPUs that all reach, if there is some

    def all_reduce(self, x: Tensor) -> None:
        """``x`` becomes the sum of all ranks', in place, with the same bits on each."""
        ...

    def add_norm(self, x: Tensor, bias: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
        """The sum of all ranks' x [T, dim], with ``bias`` [dim], is added to ``residual`` [T, dim] in place, and the
        norm of that is given back.  ``peers`` must take x."""
        ...

    def gather(self, x: Tensor, width: int) -> Tensor | None:
        """The columns of all ranks' x [N, n] side by side, cut at ``width``, on rank 0; None on others."""
        ...


class LostRank(RuntimeError):
    """Another rank has ended, or has not come to a call in time."""


class ProcessGroup:
    """``Communicator`` over torch's default process group of this process: gloo on a CPU; on GPUs NCCL, and memory that
    all of them reach for the calls of a step, if there is some (``device.layers.peer_memory``)."""

    def __init__(self, rank: int, size: int, device: str, note: Callable[[int, int], None] | None = None) -> None:
        """``note(call, operation)`` hears when a call begins, and with operation 0 when the host goes on."""
        self.rank, self.size, self.device, self.calls = rank, size, torch.device(device), 0
        self.lost: LostRank | None = None
        self.peers: PeerMemory | None = None
        self.why_not = ""  # there is no such memory
        self._note = note or (lambda call, operation: None)

    def join(self, store: str | dist.Store, seconds: float) -> None:
        """Meet the other ranks by ``store``, a file or one of torch's.  Each wait, here and in calls, ends after so
        many seconds: LostRank."""
        limit, device = timedelta(seconds=seconds), None
        if self.device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        meeting = dist.FileStore(store, self.size) if isinstance(store, str) else store
        meeting.set_timeout(limit)
        backend = "gloo" if device is None else "nccl"
        at = dict(store=meeting, rank=self.rank, world_size=self.size, timeout=limit, device_id=device)
        try:
            dist.init_process_group(backend, **at)
        except RuntimeError as e:
            first = str(e).splitlines()[0]
            raise LostRank(f"the {self.size} ranks have not met by {backend} (within {seconds:.0f} s): {first}") from e

    def share_memory(self) -> None:
        """Use memory of the GPUs that all ranks reach from now on.  Where there is none ``why_not`` says why, and calls
        go by NCCL as before."""
        from .peer_memory import PeerMemory, reachable, region_of

        region = None
        self.why_not = reachable(self.size)
        if not self.why_not:
            try:
                region = region_of(self.size, torch.device("cuda", torch.cuda.current_device()))
            except (RuntimeError, ImportError, AttributeError) as e:  # torch's interface to it is not a public one
                self.why_not = describe_error(e)
        if not self.least([region is not None])[0]:
            self.why_not = self.why_not or "another rank has none"
            return
        try:
            self.peers = PeerMemory.meet(self.rank, region)
        except (RuntimeError, ImportError, AttributeError) as e:
            self.why_not = describe_error(e)
        if not self.least([self.peers is not None])[0]:
            self.peers, self.why_not = None, self.why_not or "another rank does not reach it"

    def leave(self) -> None:
        self.peers = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _call(self, operation: str, call: Callable[..., Any], *args: Any) -> Any:
        if self.peers is not None and self.peers.capturing():
            return call(*args)  # is recorded: how often that is tried, the others need not know
        number = OPERATIONS.index(operation)
        self.calls += 1
        self._note(self.calls, number)
        try:
            return call(*args)
        except torch.OutOfMemoryError:  # of this rank alone, before anything was sent
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
        # Summed in the order of the ranks in one place: gloo's ring adds an element in the order that its place
        # in the tensor says, so that a row's sum would go by the rows beside it, and takes longer on few cores.
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
            return None if parts is None else torch.cat(parts, dim=1)[:, :width].contiguous()
        if self.peers.alone:  # no call to the others: they come to it when a capture is replayed
            return self.peers.gather(x, width)
        return self._call("gather", self.peers.gather, x, width)

    def share_drawn(self, slots: Tensor, position: Tensor, state: Any) -> None:
        """Rank 0's columns (``state``) of the rows that drew, to all: of ``slots`` i64 [N] the token at ``position``
        i64 [N], the length, and whether it has ended."""
        if self.peers is not None:
            self._call("broadcast", self.peers.share_drawn, slots, position, state)
            return
        columns = torch.stack([state.tokens[slots, position].long(), state.known[slots], state.stopped[slots].long()])
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
        """Count a call that a captured step of this rank makes, and the others make by themselves."""
        self._call(operation, lambda: None)

    def broadcast(self, x: Tensor) -> None:
        """``x`` becomes rank 0's, in place."""
        self._call("broadcast", dist.broadcast, x, 0)

    def all_gather(self, numbers: list[int]) -> list[list[int]]:
        """Numbers of 64 bits of each rank, as many of each; waits for the device."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._call("all_gather", dist.all_gather, found, mine)
        return torch.stack(found).tolist()

    def least(self, numbers: list[int]) -> list[int]:
        """The least of all ranks', one by one."""
        return [min(column) for column in zip(*self.all_gather(numbers), strict=True)]


def share_of(communicator: Any) -> Shard:
    """The place of a process among those that share its model; None: it is alone."""
    return Shard() if communicator is None else Shard(communicator.rank, communicator.size)
