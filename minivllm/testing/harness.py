"""Run a model without an engine: ``Harness`` in one process, ``Seat`` in a tensor-parallel group of threads.

The steps have hand-made attention metadata over a cache whose blocks are in random order.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from minivllm.core.interfaces.attention import AttentionContext, AttnMeta, GraphKey
from minivllm.core.interfaces.kvformat import KVFormat
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.quantizer import Shard
from minivllm.core.interfaces.states import StepStates
from minivllm.device.layers.parts import ModelParts
from minivllm.device.layers.rotary import prepare_qk
from minivllm.device.loading import shapes
from minivllm.device.loading.weights import build_model, load_weights
from minivllm.device.worker.recurrent import StateMemory
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.kvformat.plain import Bf16, Fp16, Fp32
from minivllm.plugins.quantizer.none import Unquantized

from .attention_world import KeptTensors, allocate, keep_tensors, make_meta, number_of_blocks

torch.set_num_threads(1)  # use one thread, because several threads only wait for each other on tiny tensors
FORMATS = {"float32": Fp32, "bfloat16": Bf16, "float16": Fp16}


class Harness:
    """A model with a KV cache for one sequence in each of some slots.

    ``step`` appends tokens to some slots and returns their logits.  Without a path no weights are loaded, which is
    enough to inspect the layers of the model.
    """

    def __init__(
        self,
        path,
        arch,
        cfg,
        dtype: str = "float32",
        kv: str | None = None,
        block: int = 4,
        slots: int = 8,
        max_len: int = 96,
        device: str = "cpu",
        quantizer=None,
        shard: Shard | None = None,
        group=None,
        backend=Sdpa,
        load_format: str = "auto",
        seed: int = 0,
        batch_invariant: bool = False,
        drafts: int = 0,
        checkpoints: int = 0,
    ) -> None:
        fmt = FORMATS[kv or dtype]()
        self.block = block
        self.device = device
        ctx = AttentionContext(device, dtype, fmt, block, slots, max_len, prepare_qk, batch_invariant)
        self.backend = backend(None, ctx)
        used = quantizer or Unquantized()
        self.parts = ModelParts(device, dtype, used, self.backend, shard, group, batch_invariant=batch_invariant)
        if path is not None:
            self.parts.found = shapes.check(str(path), arch, cfg, self.parts, load_format, True, 1 << 50)
        self.model = build_model(arch, cfg, self.parts, path or "")
        # a weight that the checkpoint does not fill stays NaN, so that it is noticed
        for module in self.parts.modules.values():
            for tensor in module.tensors.values():
                unfilled = torch.nan if tensor.is_floating_point() else 1
                tensor.fill_(unfilled)
        if path is not None:
            load_weights(path, arch, cfg, self.parts, load_format, seed)
        self._make_cache(fmt, slots, max_len, seed)
        self.states = self._make_states(slots, checkpoints, drafts)
        self.stopped: set[int] = set()  # slots whose sequence has ended
        self.drafted: set[int] = set()  # slots whose next step has drafts at all tokens except the first one
        self.known = [0] * slots  # number of known tokens in each slot
        # a sequence longer than ``switch`` uses another rotary embedding for all of its tokens, so ``ends`` has the
        # final length of each sequence
        self.switch = arch.switch(cfg)
        self.ends = [0] * slots
        self.rope_rows = max_len + 1
        self.taps: Any = None  # taps (``model.StepTaps``) for all steps, or None
        self.kept: KeptTensors = {}  # keeps the block table, so that it is the same tensor in all steps

    def _make_cache(self, fmt: KVFormat, slots: int, max_len: int, seed: int) -> None:
        """Allocate the cache of each layer, and a block table with the blocks of each KV group in random order."""
        layers = self.parts.layers
        last_group = max(layer.group for layer in layers)
        groups = 1 + last_group
        per_slot = number_of_blocks(max_len, self.block)
        blocks = 1 + slots * per_slot
        ascending = np.tile(np.arange(1, blocks), (groups, 1))
        rng = np.random.default_rng(seed)
        order = rng.permuted(ascending, axis=1)
        table = order.reshape(groups, slots, per_slot)
        self.table = table.astype(np.int32)
        for layer in layers:
            layout = self.backend.layout(layer.spec, fmt, self.block)
            # a read of an unwritten slot gives NaN, so that it is noticed
            layer.cache = allocate(layout, blocks, self.device, torch.nan)

    def _make_states(self, slots: int, checkpoints: int, drafts: int) -> StateMemory | None:
        """Return the memory of recurrent states, filled with NaN; None for a model without recurrent states."""
        if not self.parts.states:
            return None
        place = torch.device(self.device)
        states = StateMemory(self.parts.states, slots + 1, checkpoints, drafts, self.parts.dtype, place)
        for memory in states.memory:
            for tensor in memory.values():
                tensor.fill_(torch.nan)
        return states

    def step(self, feed: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run a step that appends tokens, ``feed[slot]``, to some slots, and return slot -> logits [tokens, V]."""
        logits, order = self.logits(feed)
        lengths = [len(feed[slot]) for slot in order]
        parts = logits.split(lengths)
        return dict(zip(order, parts, strict=True))

    def logits(
        self, feed: Mapping[int, Sequence[int]], wanted: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Run a step that appends tokens to some slots; return its logits [T, V] and the order of its slots.

        ``feed`` has slot -> tokens. ``wanted`` has indices of the tokens whose logits are computed, for a model that
        accepts them.  None means all.
        """
        order = sorted(feed, key=lambda slot: len(feed[slot]) != 1)
        new: list[int] = []
        rows = []
        for slot in order:
            tokens = feed[slot]
            new += tokens
            self.known[slot] += len(tokens)
            rows.append((slot, len(tokens), self.known[slot]))
        meta = make_meta(rows, self.table, self.block, self.device)
        keep_tensors(self.kept, meta, ("table",))
        position = meta.position
        if self.switch is not None:
            final = [max(self.known[slot], self.ends[slot]) for slot in order]
            is_long = torch.tensor(final, device=self.device) > self.switch
            meta.position = position + self.rope_rows * is_long[meta.row]
        self.backend.plan(meta, GraphKey())
        ids = torch.tensor(new, device=self.device)
        pick = None if wanted is None else torch.tensor(wanted, device=self.device)
        with torch.inference_mode():
            states = self._states(meta)
            step = StepTensors(ids, position, meta, pick, self.taps, states)
            hidden = self.model(step)
            if states is not None:
                states.advance()
            logits = self.model.logits(hidden)
        return logits.float(), order

    def _states(self, meta: AttnMeta) -> StepStates | None:
        """Return the recurrent states of a step; None for a model without recurrent states."""
        if self.states is None:
            return None
        stopped = torch.zeros(self.states.slots, dtype=torch.bool, device=self.device)
        stopped[sorted(self.stopped)] = True
        slots = meta.slots.tolist()
        drafts = [slot in self.drafted for slot in slots]
        has_drafts = torch.tensor(drafts, device=self.device)
        return self.states.of_meta(meta, stopped, has_drafts)

    # ---- recurrent states, as the engine moves them --------------------------------------------------------------

    def clear(self, slot: int) -> None:
        """Empty a slot, so that another sequence can start there."""
        self._begin(slot, empty=True)
        self.known[slot] = 0

    def copy(self, source: int, to: int) -> None:
        """Fork the sequence of slot ``source`` into slot ``to``: copy its keys, values and recurrent state."""
        self._copy_keys(source, to)
        self._move(source, to)
        self._begin(to, empty=False)
        self.known[to] = self.known[source]

    def checkpoint(self, which: int) -> int:
        """Return the index of checkpoint ``which`` in the memory of recurrent states, after the states of the slots."""
        assert self.states is not None
        return self.states.slots + which

    def save(self, slot: int, positions: Sequence[int]) -> None:
        """Make steps copy a slot's recurrent state to checkpoint ``i`` once it covers ``positions[i]`` tokens."""
        states = self.states
        assert states is not None
        for which, position in enumerate(positions):
            checkpoint = self.checkpoint(which)
            states.valid[checkpoint] = 0
            numbers = (slot, which, position, checkpoint)
            tensors = [torch.tensor([number], device=self.device) for number in numbers]
            states.save(*tensors)

    def restore(self, slot: int, which: int, position: int, of: int) -> None:
        """Start a sequence from a checkpoint of ``position`` tokens, with the keys and values of slot ``of``."""
        self._copy_keys(of, slot)
        self._move(self.checkpoint(which), slot)
        self._begin(slot, empty=False)
        self.known[slot] = position

    def draft(self, slot: int, tokens: Sequence[int], accepted: int) -> torch.Tensor:
        """Return the logits of a step with a token and its drafts; only ``accepted`` of these tokens stay."""
        self.drafted = {slot}
        found = self.step({slot: tokens})[slot]
        self.drafted = set()
        self.known[slot] -= len(tokens) - accepted
        return found

    def _begin(self, slot: int, empty: bool) -> None:
        assert self.states is not None
        slots = torch.tensor([slot], device=self.device)
        emptied = slots if empty else slots[:0]
        self.states.begin(slots, emptied)

    def _move(self, source: int, to: int) -> None:
        assert self.states is not None
        old = torch.tensor([source], device=self.device)
        new = torch.tensor([to], device=self.device)
        self.states.copy(old, new)

    def _copy_keys(self, source: int, to: int) -> None:
        """Copy the keys and values of the blocks of slot ``source`` to the blocks of slot ``to``."""
        for layer in self.parts.layers:
            table = torch.from_numpy(self.table[layer.group]).long()
            blocks = table.to(self.device)
            for tensor in layer.cache.values():
                tensor[blocks[to]] = tensor[blocks[source]]

    def chunked(self, slot: int, tokens: Sequence[int], cuts: Sequence[int]) -> torch.Tensor:
        """Return the logits [tokens, V] of a sequence whose tokens are computed in several steps.

        ``cuts`` has the index of the first token of each step after the first one.
        """
        self.ends[slot] = len(tokens)
        edges = itertools.pairwise([0, *cuts, len(tokens)])
        parts = []
        for start, end in edges:
            logits = self.step({slot: tokens[start:end]})
            parts.append(logits[slot])
        return torch.cat(parts)

    def greedy(self, slot: int, prompt: Sequence[int], n: int) -> list[int]:
        """Return the n most likely tokens after a prompt."""
        logits = self.step({slot: prompt})[slot]
        tokens: list[int] = []
        for _ in range(n):
            token = int(logits[-1].argmax())
            tokens.append(token)
            logits = self.step({slot: [token]})[slot]
        return tokens


class Seat:
    """A rank of a tensor-parallel group whose ranks are threads (a ``device.layers.communicator.Communicator``).

    ``gather`` gives all ranks the result that in a real group only rank 0 gets.
    """

    def __init__(self, rank: int, sent: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(sent)
        self.sent = sent  # rank -> the tensor that it sends
        self.barrier = barrier
        self.peers = None

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x by the sum over all ranks."""
        parts = torch.stack(self.all_of(x))
        x.copy_(parts.sum(0))

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Return the first ``width`` columns of the tensors of all ranks, side by side."""
        joined = torch.cat(self.all_of(x), dim=1)
        return joined[:, :width]

    def all_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that all ranks pass to this call, in the order of the ranks."""
        self.sent[self.rank] = x.clone()
        self.barrier.wait()
        tensors = list(self.sent)
        self.barrier.wait()  # no rank may replace its tensor before all ranks have read it
        return tensors


def seats(n: int) -> list[Seat]:
    """Return the n ranks of a group."""
    sent = [None] * n
    barrier = threading.Barrier(n, timeout=60)
    return [Seat(rank, sent, barrier) for rank in range(n)]


def play(seats: Sequence[Seat], calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call ``calls[i]`` in a thread for rank i, and return the results; raise the error that occurred first."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as exc:
            errors.append(exc)
            seats[i].barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
