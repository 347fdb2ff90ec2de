"""Build a worker from a wiring: model, attention back end, processors and KV cache on one device.

This runs in the process that computes the steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core.interfaces.attention import AttentionContext, GraphKey
from minivllm.core.interfaces.drafter import HeadFiles
from minivllm.core.interfaces.encoder import EncoderContext
from minivllm.core.interfaces.model import ModelArch, tap_points
from minivllm.core.interfaces.plan import StepPlan, no_rows
from minivllm.core.interfaces.sampling import Sampler, SamplingContext
from minivllm.core.timing import StartTimes
from minivllm.device.hardware import free_ram
from minivllm.device.layers.kv_memory import allocate, layouts_of
from minivllm.device.layers.parts import ModelParts
from minivllm.device.layers.rotary import prepare_qk
from minivllm.device.loading import shapes
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.device.loading.tensor_names import OF_TEXT, names_in
from minivllm.device.loading.weights import build_model, load_weights, weight_bytes
from minivllm.errors import ConfigError, MinivllmError, ModelError, ResourceError
from minivllm.registry import build_part, head_of

from . import step
from .adapters import Adapters, rows_behind
from .capture import ALONE, release_unused, synchronize
from .encoder import LoadedEncoder
from .encoder_memory import EncodingMemory, encoding_memory
from .images import lacks_points
from .pages import staging_bytes
from .recurrent import StateMemory, state_bytes
from .start import Rehearsals
from .state import DeviceState
from .target_states import TargetStates

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttentionBackend
    from minivllm.core.interfaces.executor import DraftWiring, Part, Wiring
    from minivllm.core.interfaces.kvformat import KVFormat
    from minivllm.core.interfaces.sampling import Processor

CPU_CACHE_SHARE = 0.25  # share of a CPU's free memory for the KV cache; a page is only allocated at its first write
CPU_CACHE_LIMIT = 8 << 30
# Checkpoints of recurrent states take at most this share of the memory that weights and the states of the slots leave,
# and there are at most this many for each request.
CHECKPOINT_SHARE = 0.2
CHECKPOINTS_EACH = 4


@dataclass
class Worker:
    """The model, attention back end, processors and memory of one device, from which a ``Runner`` runs steps."""

    device: torch.device
    model: Any
    backend: AttentionBackend
    processors: list[tuple[str, Processor]]
    groups: list[list[int]]  # indices of the layers of each KV group, which share block tables
    vocab_size: int
    hidden_size: int
    weight_bytes: int
    parts: ModelParts  # the modules of the model, and the plug-ins from which they were built
    times: StartTimes
    rehearsals: Rehearsals
    # KV group -> layer of the group -> cache tensors by name
    caches: list[list[dict[str, torch.Tensor]]] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    block_bytes: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    states: StateMemory | None = None  # states of recurrent layers; None for a model without such layers
    # "drafter" or the name of a processor -> its own model
    own_models: dict[str, SecondModel] = field(default_factory=dict)
    # memory for hidden states of the served model that a drafter reads; None if no drafter reads any
    target_states: TargetStates | None = None
    adapters: Adapters | None = None  # adapters such as LoRA; None if the configuration serves none
    encoder: LoadedEncoder | None = None  # image encoder; None if no images are read: ``no_images`` has the reason
    no_images: str = ""


@dataclass
class SecondModel:
    """The model of a drafter or processor.  Its layers store their KV cache in the blocks of the first group.

    ``states`` has two recurrent states per slot (``OwnModel``), or is None.  ``one_rope`` is true for a head with one
    rotary table whose served model has two.
    """

    model: Any
    backend: AttentionBackend
    parts: ModelParts
    states: StateMemory | None = None
    one_rope: bool = False


def make_processors(wiring: Wiring, vocab_size: int) -> list[tuple[str, Processor]]:
    """Build the processors and the sampler of a wiring; return (name, instance) pairs in order, the sampler last.

    The host side of the engine and the worker each build their own instances.  Raise ConfigError if the wiring needs
    processed log-probabilities and the sampler does not implement ``drawn_from``."""
    draw = fused(wiring, "draw")
    ctx = SamplingContext(vocab_size, wiring.max_model_len, wiring.eos_ids, wiring.batch_invariant, draw)
    made = [(p.name, build_part("processor", p, ctx)) for p in wiring.processors]
    part = wiring.parts["sampler"]
    sampler = build_part("sampler", part, ctx)
    if wiring.logprobs_mode == "processed_logprobs" and type(sampler).drawn_from is Sampler.drawn_from:
        what = f"logprobs_mode='processed_logprobs': the sampler {part.name} has no method drawn_from"
        raise ConfigError(f"{what}; use 'raw_logprobs', or another sampler")
    return [*made, (part.name, sampler)]


def has_kernels(wiring: Wiring) -> bool:
    """Return whether Triton kernels can run: the device is CUDA and triton is installed."""
    return wiring.device.startswith("cuda") and importlib.util.find_spec("triton") is not None


def fused(wiring: Wiring, which: str = "") -> bool:
    """Return whether fused kernels run, which compute several operations of layers or of a sampler in one launch.

    ``which`` is the name of a fused kernel that the configuration may turn off (``StepWiring.unfused``); "" means fused
    kernels in general."""
    return wiring.steps.fuse and has_kernels(wiring) and which not in wiring.steps.unfused


def build_worker(wiring: Wiring, ranks: Any = None, early: Callable[[Worker], None] | None = None) -> Worker:
    """Load the models of a wiring and allocate the memory for states and KV cache.

    ``ranks`` is the communicator of the processes that share the model, or None if one process has all of it.  Models
    of a drafter or of processors are not sharded: each process loads all weights of those in its wiring.  ``early``
    rehearses captures with a worker whose caches are small, before the attention back end tries its kernels."""
    device = torch.device(wiring.device)
    times = StartTimes()
    with times.of("config"):
        cfg = open_checkpoint(wiring.model_dir, overrides=wiring.hf_overrides).hf_config()
    fmt = build_part("kvformat", wiring.parts["kvformat"])
    rehearsals = Rehearsals(wiring, times, device, has_kernels(wiring))  # its processes start beside the weights
    rehearsals.captures = early
    with rehearsals.needed():
        return _build(wiring, ranks, cfg, fmt, rehearsals)


def _build(wiring: Wiring, ranks: Any, cfg: Any, fmt: KVFormat, rehearsals: Rehearsals) -> Worker:
    """Return the worker of ``build_worker``.  ``cfg`` is the config object of the served model."""
    device, times = rehearsals.device, rehearsals.times
    with times.of("weights"):

        def built(parts: ModelParts) -> None:
            if wiring.cache.num_kvcache_blocks <= 0:  # kernels that take longest are compiled beside the weights
                rehearsals.begin(partial(_early_layers, parts, wiring, fmt), first=True)

        groups = wiring.cache.groups
        model, parts, notes = _load(wiring, wiring.model_dir, wiring.parts, cfg, fmt, groups, ranks, built=built)
    processors = make_processors(wiring, cfg.vocab_size)
    worker = Worker(
        device=device,
        model=model,
        backend=parts.backend,
        processors=processors,
        groups=[list(group) for group in wiring.cache.groups],
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        weight_bytes=weight_bytes(parts),
        parts=parts,
        times=times,
        rehearsals=rehearsals,
        notes=notes,
    )
    if worker.rehearsals.note is not None:
        worker.notes.append(worker.rehearsals.note)
    with times.of("weights"):
        _load_others(worker, wiring, cfg, fmt)
    if parts.states:
        worker.states = _take_states(worker, wiring, parts)
    with times.of("KV cache"):
        _take_cache(worker, wiring, parts, fmt)
    return worker


def _load_others(worker: Worker, wiring: Wiring, cfg: Any, fmt: KVFormat) -> None:
    """Load the models of the drafter and of processors and the image encoder, and allocate the memory of adapters.

    ``cfg`` is the config object of the served model."""
    draft = wiring.speculation.draft_model
    second = {} if draft is None else {"drafter": draft}
    if draft is not None and "target_head" in wiring.parts["drafter"].features:
        second = {}
        _load_head(worker, wiring, draft, cfg, fmt)
    for name, chosen in {**second, **wiring.own_models}.items():
        own = open_checkpoint(chosen.model_dir).hf_config()
        layers = build_part("model", chosen.parts["model"]).attention(own)
        group = tuple(range(len(layers)))
        made, its, notes = _load(wiring, chosen.model_dir, chosen.parts, own, fmt, (group,))
        label = "the draft model" if name == "drafter" else f"the model of {name}"
        states = None
        if its.states:
            slots = wiring.max_num_seqs + 1
            states = _allocate_states(worker, its, slots, slots, 0, label)
        worker.own_models[name] = SecondModel(made, its.backend, its, states)
        worker.notes += [f"{label}: {note}" for note in notes]
        worker.weight_bytes += weight_bytes(its)
    if wiring.adapters.max_loras:
        worker.adapters = _take_adapters(wiring, cfg, worker)
    if wiring.images.max_images:
        _load_images(worker, wiring)


def _load_images(worker: Worker, wiring: Wiring) -> None:
    """Load the image encoder, or note why images are not read."""
    checkpoint = open_checkpoint(wiring.model_dir, overrides=wiring.hf_overrides)
    ctx = EncoderContext(str(checkpoint.folder), checkpoint.raw, wiring.batch_invariant)
    try:
        with torch.inference_mode():
            encoder = LoadedEncoder(wiring.parts["encoder"], ctx, wiring, worker.hidden_size)
        worker.no_images = lacks_points(tap_points(worker.model), encoder.levels)
    except ModelError as e:
        worker.no_images = str(e)
    except torch.OutOfMemoryError as e:
        raise ResourceError(f"no memory for the image encoder ({str(e).splitlines()[0]}): set max_images=0") from e
    if worker.no_images:
        worker.notes.append(f"images are not read: {worker.no_images}")
        return
    worker.notes = [note for note in worker.notes if not note.startswith(OF_TEXT)]
    worker.encoder = encoder
    worker.weight_bytes += encoder.bytes


def _take_adapters(wiring: Wiring, cfg: Any, worker: Worker) -> Adapters:
    """Allocate the memory of adapters.  Raise ResourceError if it is too small."""
    try:
        with torch.inference_mode():
            return Adapters(wiring, cfg, worker.model, worker.parts, worker.device)
    except MinivllmError:
        raise
    except (RuntimeError, MemoryError) as e:
        which = f"max_loras={wiring.adapters.max_loras} adapters of max_lora_rank={wiring.adapters.max_lora_rank}"
        raise ResourceError(f"no memory for {which} ({str(e).splitlines()[0]}): lower one of them") from e


def _load_head(worker: Worker, wiring: Wiring, draft: DraftWiring, cfg: Any, fmt: KVFormat) -> None:
    """Load the layers of a drafter that read hidden states of the served model, whose config object is ``cfg``."""
    part = wiring.parts["drafter"]
    folder = draft.model_dir
    own = cfg if folder == wiring.model_dir else open_checkpoint(folder).hf_config()
    names = names_in(Path(folder), wiring.load_format)
    arch = build_part("model", wiring.parts["model"])
    head = head_of(part, HeadFiles(folder, own, names), arch, cfg)
    worker.target_states = TargetStates(worker.model, head.points, wiring.block, worker.parts.dtype, part.name)
    chosen = {**wiring.parts, **draft.parts}
    made, parts, notes = _load(wiring, folder, chosen, head.cfg, fmt, (), arch=head.arch)
    made.attach(worker.model)
    one_rope = head.arch.switch(head.cfg) != wiring.rope_switch
    worker.own_models["drafter"] = SecondModel(made, parts.backend, parts, one_rope=one_rope)
    worker.notes += [f"the layers of the drafter: {note}" for note in notes]
    worker.weight_bytes += weight_bytes(parts)


def _take_states(worker: Worker, wiring: Wiring, parts: ModelParts) -> StateMemory:
    """Allocate the recurrent states: one for each slot, and checkpoints.  Raise ResourceError if they do not fit."""
    slots = wiring.max_num_seqs + 1
    drafts = wiring.speculation.num_speculative_tokens
    each = state_bytes(parts.states, parts.dtype, drafts)
    free = _free_for_states(worker, parts)
    checkpoints = wiring.cache.num_state_checkpoints
    if checkpoints < 0:
        left = free - slots * each
        fit = int(CHECKPOINT_SHARE * left) // each
        most = CHECKPOINTS_EACH * wiring.max_num_seqs
        checkpoints = max(0, min(fit, most))
        if parts.group is not None:
            (checkpoints,) = parts.group.least([checkpoints])
    copies = f" and {checkpoints} checkpoints" if checkpoints else ""
    what = f"max_num_seqs={wiring.max_num_seqs} requests{copies}"
    try:
        return _allocate_states(worker, parts, slots, checkpoints, drafts, what)
    except ResourceError as e:
        raise ResourceError(f"{e}, or num_state_checkpoints") from e


def _free_for_states(worker: Worker, parts: ModelParts) -> int:
    """Return the number of bytes that recurrent states may occupy on the device."""
    free = _free_memory(str(worker.device))
    if worker.device.type == "cpu":
        share = int(2 * CPU_CACHE_SHARE * free)
        free = min(share, 2 * CPU_CACHE_LIMIT) // parts.shard.size
    return free


def _allocate_states(worker: Worker, parts: ModelParts, slots: int, copies: int, drafts: int, what: str) -> StateMemory:
    """Allocate the recurrent states of a model.  Raise ResourceError, which names ``what``, if they do not fit."""
    need = (slots + copies) * state_bytes(parts.states, parts.dtype, drafts)
    free = _free_for_states(worker, parts)
    try:
        if need > free:
            raise MemoryError(f"{free / 2**30:.1f} GiB are left")
        return StateMemory(parts.states, slots, copies, drafts, parts.dtype, worker.device)
    except (RuntimeError, MemoryError) as e:
        size = f"{need / 2**30:.1f} GiB"
        raise ResourceError(f"no memory for the recurrent states of {what}, {size} ({e}): lower max_num_seqs") from e


def attention_context(wiring: Wiring, fmt: KVFormat) -> AttentionContext:
    """Return the arguments of the constructor of a wiring's attention back end."""
    with_drafts = wiring.max_num_seqs * (1 + wiring.speculation.num_speculative_tokens)
    tokens = max(wiring.max_num_batched_tokens, wiring.max_num_seqs)
    rows = min(with_drafts, tokens)
    return AttentionContext(
        device=wiring.device,
        dtype=wiring.dtype,
        kv_format=fmt,
        block=wiring.block,
        max_rows=rows,
        max_len=wiring.max_model_len,
        prepare_qk=prepare_qk,
        batch_invariant=wiring.batch_invariant,
        fuse=fused(wiring),
    )


def _load(
    wiring: Wiring,
    folder: str,
    chosen: Mapping[str, Part],
    cfg: Any,
    fmt: Any,
    groups: Sequence[Sequence[int]],
    ranks: Any = None,
    arch: ModelArch | None = None,
    built: Callable[[ModelParts], None] | None = None,
) -> tuple[Any, ModelParts, list[str]]:
    """Build a model with its own attention back end, and load its weights from ``folder``.

    ``chosen`` are the plug-ins of this model, and ``groups`` the indices of the layers of each KV group.  ``arch`` is
    the architecture of a drafter's head, which uses modules of the served model; None means the architecture plug-in in
    ``chosen``.  ``built`` is called when the model has no weights yet.  Return (model, its
    ``ModelParts``, notes on the weights for the user)."""
    context = attention_context(wiring, fmt)
    backend = build_part("attention", wiring.parts["attention"], context)
    stored = getattr(cfg, "quantization_config", None)
    quantizer = build_part("quantizer", chosen["quantizer"], stored)
    head = arch is not None
    arch = arch or build_part("model", chosen["model"])
    parts = ModelParts(
        wiring.device,
        wiring.dtype,
        quantizer,
        backend,
        group=ranks,
        groups=groups or None,
        fuse=fused(wiring),
        batch_invariant=wiring.batch_invariant,
        unfused=wiring.steps.unfused,
    )
    parts.arch = arch
    if chosen is wiring.parts:
        parts.rows_behind = rows_behind(wiring)
    if wiring.images.facts.sections:
        parts.free_rows = wiring.max_num_batched_tokens + wiring.images.facts.span
    quantized = chosen["quantizer"].name != "minivllm/none"
    free = _free_memory(parts.device)
    parts.found = shapes.check(folder, arch, cfg, parts, wiring.load_format, quantized, free)
    with torch.inference_mode():
        model = build_model(arch, cfg, parts, folder)
        parts.described = type(arch).build is ModelArch.build
        # quantizer options may name modules that a drafter's head lacks; they were checked with the served model
        if not head:
            quantizer.finish()
        if built is not None:
            built(parts)
        notes = load_weights(folder, arch, cfg, parts, wiring.load_format, wiring.seed)
    return model, parts, notes


def _take_cache(worker: Worker, wiring: Wiring, parts: ModelParts, fmt: Any) -> None:
    chosen = None
    measured = wiring.cache.num_kvcache_blocks <= 0  # as many blocks as the memory beside a trial step allows
    if measured and not worker.own_models and worker.target_states is None:
        # threads compile the kernels of the trial step and of captures while the attention back end tries its own
        chosen = _rehearse_steps(worker, wiring, fmt)
    layouts = layouts_of(worker.backend, parts.layers, fmt, wiring.block)
    if chosen != _choices(worker.backend):
        worker.rehearsals.named.clear()  # captures use other kernels
    worker.notes += getattr(worker.backend, "notes", ())  # attention back ends of an older interface have no notes
    worker.block_bytes = [sum(layouts[i].bytes for i in group) for group in worker.groups]
    for own in worker.own_models.values():
        its = layouts_of(own.backend, own.parts.layers, fmt, wiring.block)
        worker.block_bytes[0] += sum(layout.bytes for layout in its)
        layouts += its
    if worker.target_states is not None:
        worker.block_bytes[0] += worker.target_states.layout.bytes
        layouts.append(worker.target_states.layout)
    windows = [parts.layers[group[0]].spec.window for group in worker.groups]
    if measured:
        budget = _budget(worker, wiring, parts, layouts)
        blocks = _fit(worker, wiring, budget, windows)
        if parts.group is not None:
            blocks = parts.group.least(blocks)
    else:
        blocks = [wiring.cache.num_kvcache_blocks + 1] * len(worker.groups)
    try:
        _allocate(worker, parts, layouts, blocks)
    except (RuntimeError, MemoryError) as e:
        need = _cache_bytes(worker, blocks) / 2**30
        raise ResourceError(
            f"no memory for a KV cache of {need:.1f} GiB: lower num_kvcache_blocks or gpu_memory_utilization"
        ) from e


def _cache_bytes(worker: Worker, blocks: Sequence[int]) -> int:
    """Return the bytes of a KV cache with ``blocks[g]`` blocks in group g."""
    return sum(count * size for count, size in zip(blocks, worker.block_bytes, strict=True))


def _allocate(worker: Worker, parts: ModelParts, layouts: list, blocks: list[int]) -> None:
    """Allocate the caches of the layers of all models, with ``blocks[g]`` blocks in group g.

    The layers of second models belong to group 0."""
    second: list[Any] = [layer for own in worker.own_models.values() for layer in own.parts.layers]
    if worker.target_states is not None:
        second.append(worker.target_states)
    layers = [*parts.layers, *second]
    groups = [list(group) for group in worker.groups]
    if second:
        groups[0] += range(len(parts.layers), len(layers))
    worker.num_blocks = blocks
    worker.caches = allocate(layers, layouts, groups, blocks, worker.device)


def _fit(worker: Worker, wiring: Wiring, budget: int, windows: list[int | None]) -> list[int]:
    """Return the number of KV blocks of each group of layers, for ``budget`` bytes in total.

    ``windows[g]`` is the attention window of group g in tokens; None means no window.  A group has at most the blocks
    that all rows can use: for ``max_model_len`` tokens, or with a window for the window and one step.  If the budget is
    smaller, all groups are reduced by the same factor.  Raise ResourceError if a group would have fewer than 3 blocks.
    """
    block = wiring.block
    per_row = -(-wiring.max_model_len // block) + 1
    most = wiring.max_num_seqs * per_row + 1
    step_blocks = -(-wiring.max_num_batched_tokens // block)
    want = []
    for g, window in enumerate(windows):
        if g == 0 or window is None:
            want.append(most)
            continue
        seen = min(per_row, -(-window // block) + 2)
        want.append(min(most, wiring.max_num_seqs * seen + step_blocks + 1))
    whole = _cache_bytes(worker, want)
    share = min(1.0, budget / max(1, whole))
    blocks = [int(n * share) for n in want]
    if min(blocks) < 3:
        left = f"{budget / 2**20:.0f} MiB"
        each = sum(worker.block_bytes)
        raise ResourceError(
            f"no room for a KV cache: {left} are left for it, a block takes {each} bytes; "
            "raise gpu_memory_utilization, lower max_num_batched_tokens, or set num_kvcache_blocks"
        )
    tokens = (blocks[0] - 1) * block
    if tokens < wiring.max_model_len:
        worker.notes.append(f"the KV cache holds {tokens} tokens, less than max_model_len={wiring.max_model_len}")
    return blocks


def _budget(worker: Worker, wiring: Wiring, parts: ModelParts, layouts: list) -> int:
    """Return the number of bytes for the KV cache.

    On a CPU it is a share of the free memory.  On a GPU a trial step first measures the memory of activations, and two
    trial images that of encodings.
    """
    if worker.device.type == "cpu":
        usable = int(CPU_CACHE_SHARE * free_ram())
        return min(usable, CPU_CACHE_LIMIT) // parts.shard.size
    _allocate(worker, parts, layouts, [1] * len(worker.groups))
    worker.rehearsals.compile(lambda: _trial_step(worker, wiring))
    with ALONE:  # memory of a concurrent capture of another engine would be counted as activations
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _trial_step(worker, wiring)
        activations = torch.cuda.max_memory_allocated() - before
        encoding = _trial_images(worker, wiring)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
    reserved = (1 - wiring.cache.gpu_memory_utilization) * total
    reserved += 256 << 20
    if worker.encoder is not None:
        reserved += wiring.images.cache_mb << 20
    if wiring.cache.stores:
        reserved += 2 * staging_bytes(total)
    return int(free - reserved - 1.2 * encoding.beside(activations))


def _trial_images(worker: Worker, wiring: Wiring) -> EncodingMemory:
    """Return the memory of encoding the largest image, 0 bytes without an encoder.

    If the plug-in fails on a trial image, the result is 0 bytes too, and a note has the error.  ResourceError if the
    memory does not suffice for a trial image."""
    if worker.encoder is None:
        return EncodingMemory()
    try:
        return encoding_memory(worker.encoder, worker.device, wiring.max_model_len - 1)
    except torch.OutOfMemoryError as e:
        reason = str(e).splitlines()[0]
        raise ResourceError(f"no memory to encode an image ({reason}): set max_images=0") from e
    except Exception as e:  # the code of a package may raise anything
        worker.notes.append(f"no memory is reserved for encoding images: {worker.encoder.describe(e)}")
        return EncodingMemory()


def _rehearse_steps(worker: Worker, wiring: Wiring, fmt: Any) -> Any:
    """Start to compile the kernels of the trial step and of captures; return the choices of the attention back end in
    these rehearsals, or None."""
    rehearsals = worker.rehearsals
    captures, rehearsals.captures = rehearsals.captures, None
    chosen: list[Any] = []
    rehearsals.begin(partial(_early_step, worker, wiring, fmt, chosen))
    if captures is not None and chosen and rehearsals.active:
        with suppress(Exception), torch.inference_mode():  # the captures themselves report errors
            captures(worker)
        release_unused()  # memory of the rehearsals
    return chosen[0] if chosen else None


@contextmanager
def _rehearsed(backend: Any) -> Iterator[None]:
    """Remove the notes that an attention back end adds in the body of the ``with`` statement, a rehearsal: without
    kernels they may be wrong.  Ignore errors, because the steps themselves report them."""
    notes = list(getattr(backend, "notes", ()))
    with suppress(Exception):
        yield
    if notes != list(getattr(backend, "notes", ())):
        backend.notes[:] = notes


def _early_layers(parts: ModelParts, wiring: Wiring, fmt: Any) -> None:
    """Show the layers to the attention back end in a rehearsal, as ``layouts_of`` does later."""
    with _rehearsed(parts.backend):
        layouts_of(parts.backend, parts.layers, fmt, wiring.block)


def _early_step(worker: Worker, wiring: Wiring, fmt: Any, chosen: list[Any]) -> None:
    """Run the trial step in a rehearsal (kernels are compiled, not launched), with small caches, before the attention
    back end has tried its kernels.  Append the back end's choices to ``chosen``."""
    backend = worker.backend
    with _rehearsed(backend):
        layouts = layouts_of(backend, worker.parts.layers, fmt, wiring.block)
        _allocate(worker, worker.parts, layouts, [1] * len(worker.groups))
        _trial_step(worker, wiring)
        chosen.append(_choices(backend))


def _choices(backend: Any) -> Any:
    """Return what an attention back end noted and chose when it saw its layers."""
    chosen = {name: set(value) for name, value in vars(backend).items() if isinstance(value, set)}
    return chosen, list(getattr(backend, "notes", ()))


def _trial_step(worker: Worker, wiring: Wiring) -> None:
    """Run the largest possible step, with keys and values written to the null block, so that its memory can be
    measured."""
    whole = wiring.max_model_len
    t = min(wiring.max_num_batched_tokens, wiring.max_num_seqs * whole)
    longest = -(-t // whole)  # number of rows of ``max_model_len`` tokens that hold t tokens
    rows = max(1, min(wiring.max_num_seqs, longest))
    q_len = np.full(rows, t // rows, np.int32)
    computed = np.zeros(rows, np.int32)
    plan = StepPlan(0, np.arange(rows), q_len, computed, no_rows())
    state = DeviceState(rows, whole, len(worker.groups), wiring.block, worker.device)
    host = step.host_lengths(plan, state.dropped_host)
    state.recurrent = worker.states
    with torch.inference_mode():
        table = state.to(step.pack_rows(plan, rows, host.tokens, 0))
        tensors, _ = step.read_rows(state, table, host)
        hidden = step.forward(worker.model, worker.backend, tensors, GraphKey())
        n = min(wiring.max_num_seqs, host.tokens)
        logits = worker.model.logits(hidden[:n]).float()
        del hidden
        torch.softmax(logits, dim=-1).sort(dim=-1)  # the temporary tensors that a sampler may need
        synchronize()


def _free_memory(device: str) -> int:
    """Return the free bytes of the device, which weights may occupy."""
    if device == "cpu":
        return free_ram()
    release_unused()  # memory of an earlier engine in this process that was dropped without close()
    return torch.cuda.mem_get_info()[0]
