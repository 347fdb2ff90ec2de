"""Changes of a running model's weights, and the memory that a sleeping model frees.

verb "weights":  check ──► write ──► commit           sleep ──► wake
                             └─ error ──► restore       └──► check, write, commit (level 2)

No step runs meanwhile.  Weights keep their storages; captured steps of a CPU, which hold copies, are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception
from minivllm.device.hardware import discard_pages, trim_heap
from minivllm.device.loading.weight_update import SpareMemory, WeightUpdate, check_writable, initial_tensors
from minivllm.errors import MinivllmError, ModelError, describe_error

from .capture import release_unused, synchronize

if TYPE_CHECKING:
    from minivllm.device.layers.parts import ModelParts

LEFT_FREE = 1 << 30  # bytes of a GPU that copies of old weights leave free


class RunningWeights:
    """Updates of a runner's weights, and its sleep.  ``level`` is the level of the sleep, 0 while the runner is
    awake."""

    def __init__(self, runner: Any) -> None:  # ``runner`` is the Runner that creates this object
        self.runner = runner
        self.level = 0
        self.dropped = False  # whether the weights of the model were dropped and have not been written again
        self.update: WeightUpdate | None = None
        self.spare = SpareMemory()  # memory of the old weights while an update is written
        # on a GPU: freed storages of weights and of caches, each with its bytes, and storages with their copies on the
        # host
        self._weights: list[tuple[torch.UntypedStorage, int]] = []
        self._memory: list[tuple[torch.UntypedStorage, int]] = []
        self._moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._measured: Any = None  # measured times of the captures that ``_sleep`` dropped

    @property
    def parts(self) -> ModelParts:
        """Return the ``ModelParts`` of the served model, which made and recorded its modules."""
        return self.runner.worker.parts

    def answer(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Run the operation ``args["do"]`` with the other arguments.

        Return a dict: "error" is the message of its error or None, "dropped" whether the weights are dropped, and
        "overwrites" whether a write without ``keep`` overwrites the keys and values."""
        operations: dict[str, Callable[..., None]] = {
            "check": self._check,
            "write": self._write,
            "restore": self._restore,
            "commit": self._commit,
            "check_sleep": self._check_sleep,
            "sleep": self._sleep,
            "wake": self._wake,
        }
        options = {name: value for name, value in args.items() if name != "do"}
        error = None
        try:
            with torch.inference_mode():
                operations[args["do"]](**options)
        except BaseException as e:  # an exception must not end the loop of a worker
            error = str(e) if isinstance(e, MinivllmError) else describe_error(as_exception(e))
        return {"error": error, "dropped": self.dropped, "overwrites": bool(self._replaceable())}

    # ---- updates -------------------------------------------------------------------------------------------------

    def _check(
        self, partial: bool, finite: bool, path: str | None = None, tensors: Iterable[tuple[str, Tensor]] | None = None
    ) -> None:
        """Check the tensors of a folder, or ``tensors`` from this process, and keep them for the write.

        ``partial`` allows that tensors are missing, and ``finite`` refuses NaN and infinity.  If the model's weights
        were dropped, no old weights could be restored after the write, so all numbers are checked now.
        """
        self.update = None
        once = self.level != 2
        if tensors is not None:
            self.update = WeightUpdate(self.parts, tensors, partial, finite, once)
            return
        assert path is not None
        pickled = self.runner.wiring.load_format == "pt"
        self.update = WeightUpdate.of_folder(self.parts, path, pickled, partial, finite, once)

    def _write(self, keep: bool) -> None:
        """Write the checked tensors.  If the model's weights were dropped, their memory is allocated first.

        ``keep`` preserves keys and values.  Otherwise the memory of a GPU's KV cache stores the old weights during the
        update.  Old weights that do not fit are stored in free memory of the GPU, because a copy to host memory takes
        much longer.
        """
        assert self.update is not None
        if self.level == 2:
            allocate(self._weights)
            self.update.write()
            return
        self.spare = SpareMemory([] if keep else self._replaceable(), self._free_bytes())
        self.update.write(self.spare)

    def _free_bytes(self) -> int:
        """Return the free bytes of the GPU less ``LEFT_FREE``; 0 on a CPU."""
        if self.runner.device.type == "cpu":
            return 0
        return max(0, int(torch.cuda.mem_get_info(self.runner.device)[0]) - LEFT_FREE)

    def _forget_old(self) -> None:
        """Free the copies of the old weights."""
        spare = self.spare
        self.spare = SpareMemory()
        spare.clear()
        if spare.added:
            del spare
            release_unused()

    def _replaceable(self) -> list[Tensor]:
        """Return the tensors of a GPU's KV cache, which may store the old weights during an update.

        The result is empty on a CPU, which has no separate memory and keeps cached prefixes.
        """
        if self.runner.device.type == "cpu":
            return []
        return [tensor for group in self.runner.worker.caches for layer in group for tensor in layer.values()]

    def _restore(self) -> None:
        """Restore the weights from before the update."""
        update = self.update
        self.update = None
        if update is None:
            return
        if self.level == 2:  # dropped weights have no defined values until another update or a wake
            return
        update.restore()
        self._forget_old()
        self._renew_native()

    def _commit(self) -> None:
        """End the update.  The engine uses the new weights from here on, so this must not fail."""
        self.update = None
        self.dropped = False
        self._forget_old()
        if not self.level:
            self._renew_native()

    def _renew_native(self) -> None:
        """Build the native steps of a CPU again, because they hold copies of weights.

        If that fails, steps run as separate operations, and the next change of the weights tries again.
        """
        self._close_native()
        try:
            self.runner.native = self.runner.native_steps()
        # an error here must not end the update of the weights; there may be too little memory, for instance
        except Exception as e:
            why = describe_error(as_exception(e))
            self.runner.worker.notes.append(f"steps are not captured, they run as separate operations: {why}")

    def _close_native(self) -> None:
        native = self.runner.native
        if native is not None:
            native.close()
            self.runner.forget_native_head()
            self.runner.worker.weight_bytes -= native.copied
            self.runner.native = None

    # ---- sleep ---------------------------------------------------------------------------------------------------

    def _check_sleep(self, level: int) -> None:
        """Raise ModelError if weights would be dropped that cannot be written again."""
        if level == 2:
            try:
                check_writable(self.parts)
            except ModelError as e:
                raise ModelError(f"level=2 drops weights that cannot be written again; use level=1: {e}") from e

    def _sleep(self, level: int) -> None:
        """Free the KV cache and the weights: level 1 keeps weights in host memory, level 2 drops the model's weights.

        On a CPU the weights are in host memory already, so level 1 frees the KV cache only."""
        gpu = self.runner.device.type == "cuda"
        weights = weights_of(self.parts)
        if gpu:
            if self.runner.graphs is not None:
                self._measured = self.runner.graphs.measured()
            self.runner.forget_captures()
        free(self._caches(), self._memory)
        if self.runner.mover is not None:
            self.runner.mover.memory.release()
        if gpu:
            second = [tensor for own in self.runner.worker.own_models.values() for tensor in weights_of(own.parts)]
            self._move([*second, *(weights if level == 1 else [])])
        if level == 2:
            self._close_native()
        if gpu or level == 2:
            for module in self.parts.modules.values():
                module.release()
        if level == 2:  # weights are dropped last, so that an error before leaves them in place
            self.dropped = True
            free(weights, self._weights)
        self.level = level
        release_unused() if gpu else trim_heap()

    def _caches(self) -> list[Tensor]:
        """Return the tensors of the KV cache and of the recurrent states."""
        worker = self.runner.worker
        layers: list[Mapping[str, Tensor]] = [layer for group in worker.caches for layer in group]
        if worker.states is not None:
            layers += worker.states.memory
        return [tensor for layer in layers for tensor in layer.values()]

    def _move(self, tensors: list[Tensor]) -> None:
        """Move tensors from a GPU to host memory."""
        for storage in storages(tensors):
            # pinned from the start, because pin_memory() would copy the memory once more
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage()
            host.copy_(storage, non_blocking=True)
            self._moved.append((storage, host))
        synchronize()
        free(tensors, self._weights)

    def _wake(self, reload: bool) -> None:
        """Allocate the memory that ``_sleep`` freed.  With ``reload``, dropped weights are read from the files of the
        model.

        The steps that first requests need are captured.  Other sizes follow in idle turns, or once they are frequent.
        """
        gpu = self.runner.device.type == "cuda"
        if gpu:
            allocate(self._weights)
            for storage, host in self._moved:
                # the host need not wait for the copy, and captures the next steps meanwhile
                storage.copy_(host, non_blocking=True)
            self._moved.clear()
            allocate(self._memory)
            for tensor in self._caches():
                tensor.zero_()
        if reload:
            wiring = self.runner.wiring
            tensors = initial_tensors(self.parts, wiring.load_format, wiring.seed)
            WeightUpdate(self.parts, tensors).write()
            self.dropped = False
        for module in self.parts.modules.values():
            module.refresh(())
        if self.runner.native is None:
            self._renew_native()
        self.level = 0
        if gpu:
            self.runner.graphs = self.runner.captured_steps(self._measured)
            self.runner.drafted = self.runner.drafted_steps()


def weights_of(parts: ModelParts) -> list[Tensor]:
    """Return the weights of a model."""
    return [tensor for module in parts.modules.values() for tensor in module.tensors.values()]


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())


def free(tensors: Iterable[Tensor], freed: list[tuple[torch.UntypedStorage, int]]) -> None:
    """Free the memory of tensors.  Storages on a GPU are added to ``freed``, each with its bytes.

    On a CPU the tensors keep their addresses, and their pages become zeros.
    """
    for storage in storages(tensors):
        if storage.device.type == "cpu":
            discard_pages(storage.data_ptr(), storage.nbytes())
            continue
        freed.append((storage, storage.nbytes()))
        storage.resize_(0)


def allocate(freed: list[tuple[torch.UntypedStorage, int]]) -> None:
    """Allocate the memory of freed storages again."""
    while freed:
        storage, size = freed[-1]
        storage.resize_(size)
        freed.pop()
