"""The executor seam (plug-in interface): where steps run: in this process, in worker processes or on other machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minivllm.registration.spec import Part

from .encoder import ImageFacts
from .plan import LateInputs, StepPlan, StepResult

# Changes by version: 2.0: Wiring nests; 2.1: StepPlan.guided, Capacity.guides; 2.2:
# Wiring.own_models; 2.3: StepPlan.taps, Join.steer, Capacity.taps; 2.4: Executor.now; 2.5:
# StepPlan.pooled, Capacity.hidden, CacheWiring.recurrent; 2.6: Delta.store, Delta.fill,
# CacheWiring.stores, the verb "kv_tiers"; 2.7: Delta.adapter, Join.adapter, Wiring.adapters, the
# verb "adapters", Delta.compact, Delta.sources, StepPlan.observe, Capacity.compresses,
# CacheWiring.kv_budget and compress_every; 2.8: the verb "weights", Executor.takes_tensors,
# Delta.image, Delta.pixels, Join.image, StepResult.lost, StepResult.form, Wiring.images,
# Capacity.image_bytes and no_images; 2.9: the verbs "captures" and "start_times",
# StepWiring.graph_captures and compile_ahead, StepResult.shared; 2.10: ImageWiring.facts; 2.11:
# StepPlan.given, StepPlan.routes, Capacity.given, AdapterWiring.methods; 2.12:
# CacheWiring.pressure_budget, Delta.kept, StepResult.kept, Capacity.kept_heads; 2.13:
# StepPlan.slack, Capacity.drafts_ahead, SpeculationWiring.drafts_ahead; 2.14: StepPlan.sums,
# Capacity.sums, CacheWiring.rerotates; 2.15: Delta.image with the bytes of a value; 2.16:
# Capacity.step_sizes; 2.17: Delta.image with a number of steps
API = (2, 17)
NO_COMPRESSION = "minivllm/none"  # value of ``compressor`` with which the KV cache keeps all tokens


@dataclass(frozen=True)
class DraftWiring:
    """The configuration of a second model, which a drafter or a logits processor uses.  Its layers store keys and
    values in the blocks of the main model's first KV group."""

    model_dir: str
    # Seam (kind of plug-in) -> plug-in and options, for model and quantizer. A drafter's head uses
    # the choices of the served model for missing seams.
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class CacheWiring:
    """The options of the KV cache."""

    kvcache_block_size: int
    num_kvcache_blocks: int = -1  # number of blocks; -1 means as many as fit into memory
    gpu_memory_utilization: float = 0.9
    groups: tuple[tuple[int, ...], ...] = ()  # for each KV group, the indices of its layers
    # Number of copies of recurrent states, which prefix hits need; -1 means as many as fit into
    # memory.
    num_state_checkpoints: int = -1
    recurrent: bool = False  # whether the model has recurrent states
    # kvstore plug-ins, which store KV pages outside of the device; the fastest first
    stores: tuple[Part, ...] = ()
    # Number of tokens that a compression keeps (below 1: a share of the prompt); 0 compresses only
    # requests with their own ``kv_budget``.
    kv_budget: float = 0
    # Number of generated tokens between two compressions; 0 compresses at the end of the prompt
    # only.
    compress_every: int = 0
    # Number of tokens that a row keeps when blocks are short, below 1 a share of its computed
    # tokens; 0 preempts rows instead of compressing them.
    pressure_budget: float = 0
    # Whether a compression rotates the kept keys to new positions (``Compressor.rerotates``).
    rerotates: bool = False


@dataclass(frozen=True)
class StepWiring:
    """The options that control how steps run."""

    graph: str = "auto"  # which steps are captured in CUDA graphs: auto | mixed | decode | off
    fuse: bool = True  # whether fused kernels are used on devices that have them
    # kinds of fused kernels that are not used: pairs | norms | gate | draw
    unfused: tuple[str, ...] = ()
    # Number of steps in flight besides the newest one; None lets the executor choose.
    run_ahead: int | None = None
    # milliseconds that a step with decoding rows should take at most, "auto" or "off"
    tpot_target_ms: float | str = "off"
    # "start": all sizes of steps are captured before the engine is ready; "gradual": a few sizes are, and each other
    # size is captured when the engine is idle, or during a step once this size has become frequent
    graph_captures: str = "gradual"
    # Whether kernels that the start needs are compiled on several cores before they run; None means where possible,
    # and True adds a note where it is not.
    compile_ahead: bool | None = None


@dataclass(frozen=True)
class SpeculationWiring:
    """The options of speculative decoding."""

    num_speculative_tokens: int = 0  # largest number of drafts of a row in a step
    speculate: str = "auto"  # "always" also speculates where measurements showed it to be slower
    draft_model: DraftWiring | None = None  # second model, for a drafter that uses one
    # Whether steps with drafts and calls of the drafter are captured in CUDA graphs.
    captured_drafts: bool = False
    # "auto" plans a row with drafts while its last step is in flight if ``Capacity.drafts_ahead`` allows it, "off"
    # after its result
    drafts_ahead: str = "auto"


@dataclass(frozen=True)
class AdapterWiring:
    """The options of adapters, such as LoRA."""

    # largest number of adapters on the device at the same time; 0 refuses requests with adapters
    max_loras: int = 0
    max_lora_rank: int = 16  # largest rank of an adapter
    # largest number of adapters in host memory, including those on the device
    max_cpu_loras: int = 0
    methods: tuple[Part, ...] = ()  # adapter plug-ins, one for each kind of adapters such as LoRA


@dataclass(frozen=True)
class ImageWiring:
    """The options of images in prompts, and the facts of the checkpoint's images."""

    max_images: int = 0  # largest number of images of a request; 0 refuses requests with images
    why_not: str = ""  # why requests with images are refused
    cache_mb: int = 0  # memory on the device for image features, in MiB
    facts: ImageFacts = field(default_factory=ImageFacts)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ImageWiring:
        """Return the wiring whose fields were sent as JSON."""
        facts = dict(values["facts"])
        for name in ("before", "after", "sections"):
            facts[name] = tuple(facts[name])
        facts["joined"] = tuple(map(tuple, facts["joined"]))
        return cls(**{**values, "facts": ImageFacts(**facts)})


@dataclass(frozen=True)
class ParallelWiring:
    """The size of a tensor-parallel group of processes, and the number (rank) of this process in it."""

    tensor_parallel_size: int = 1  # number of processes among which the model is split
    rank: int = 0  # number of this process, from 0


@dataclass(frozen=True)
class Wiring:
    """Everything that a process needs to build its part of the engine.  It is sent as JSON, never as pickle.  Options
    have the same names as in the configuration."""

    model_dir: str
    load_format: str  # format of the weights to load: auto | safetensors | pt | dummy
    device: str
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batch_invariant: bool
    seed: int
    # Seam (kind of plug-in) -> plug-in and options, for model, quantizer, kvformat, attention,
    # sampler, drafter, compressor, and for encoder if requests may have images.
    parts: Mapping[str, Part]
    cache: CacheWiring
    steps: StepWiring = StepWiring()
    speculation: SpeculationWiring = SpeculationWiring()
    parallel: ParallelWiring = ParallelWiring()
    adapters: AdapterWiring = AdapterWiring()
    images: ImageWiring = ImageWiring()
    processors: tuple[Part, ...] = ()
    # Second models, each by the name of the logits processor that uses it (feature ``own_model``).
    own_models: Mapping[str, DraftWiring] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    # Which log-probabilities are returned: "raw_logprobs" of the model's logits,
    # "processed_logprobs" of the logits from which the sampler draws.
    logprobs_mode: str = "raw_logprobs"
    # largest number of log-probabilities per token that a request may have; -1 means the whole
    # vocabulary
    max_logprobs: int = 20
    # largest number of bytes of float32 values that a request may read with taps
    max_tap_bytes: int = 256 << 20
    # requests that can become longer than this use other rotary frequencies (decoder.Rope.switch)
    rope_switch: int | None = None
    # values that replace those of config.json
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Return the number of tokens in a block of the KV cache."""
        return self.cache.kvcache_block_size

    @property
    def compressor(self) -> Part | None:
        """Return the compressor plug-in and its options, None if the KV cache keeps all tokens."""
        part = self.parts.get("compressor")
        return None if part is None or part.name == NO_COMPRESSION else part


@dataclass(frozen=True)
class Capacity:
    """The memory and features that the executor has after ``start``."""

    blocks: tuple[int, ...]  # number of blocks of each KV group, the null block included
    # Bytes of a block of each KV group, for all layers of the group together.
    block_bytes: tuple[int, ...]
    vocab_size: int
    weight_bytes: int
    depth: int  # number of steps that may be in flight besides the newest one
    notes: tuple[str, ...] = ()  # messages for the user about the start
    # whether the executor implements ``StepPlan.guided``; if not, requests with a guide are refused
    guides: bool = False
    # whether the executor runs ``Wiring.own_models``; if not, processors with a second model are refused
    own_models: bool = False
    # Tap points (named tensors of the model that requests may read or change) and their widths.
    # ``StepPlan.taps`` numbers them in this order.  None means that the executor serves no taps;
    # requests with taps are then refused.
    taps: Mapping[str, int] | None = None
    # Tap points at which the experts of a token may be set from outside (``StepPlan.given``), in
    # the order of the layers; empty means that requests with given routes are refused
    given: tuple[str, ...] = ()
    # Width of the hidden states that ``StepPlan.pooled`` adds up. 0 means that the executor does
    # not implement it; requests for embeddings are then refused.
    hidden: int = 0
    # Number of copies of recurrent states (``CacheWiring.num_state_checkpoints``); None if the
    # model has no such states.
    checkpoints: int | None = None
    state_bytes: int = 0  # bytes of the recurrent states of one sequence
    # How many of the last tokens' queries the compressor reads; None if the executor does not
    # compress rows (``Delta.compact``), and then a compressor is refused
    compresses: int | None = None
    # Whether the compressor reads attention sums over the prompt (``StepPlan.sums``).
    sums: bool = False
    # number of KV heads of each layer of each KV group, for ``StepResult.kept``; () if the executor returns no kept
    # tokens, and then requests that read them are refused
    kept_heads: tuple[tuple[int, ...], ...] = ()
    # bytes of the features of one token of an image; 0 if the executor reads no images, for the reason ``no_images``
    image_bytes: int = 0
    no_images: str = ""
    # largest number of tokens of an efficient step; longer ones are planned only while a request needs steps that do
    # not run in captures.  0 means ``Wiring.max_num_batched_tokens``.
    step_tokens: int = 0
    # Ascending numbers of tokens with which long steps with prompts run without padding; () means
    # any number.
    step_sizes: tuple[int, ...] = ()
    # Whether the executor implements ``StepPlan.slack``. If not, a row with drafts is planned only
    # after the result of its last step.
    drafts_ahead: bool = False


class Executor(ABC):
    """Runs steps in order.  No method raises because a step failed; the result of the step reports the failure."""

    # The clock of the engine in seconds, for policies and requests.  None means time.monotonic.  A
    # simulator sets it to its simulated time.
    now: Callable[[], float] | None = None
    # Whether ``call("weights", ...)`` accepts ``tensors``, pairs of a name and a tensor, although other arguments are
    # JSON.  If not, the frontend writes the tensors to a folder that the workers read.
    takes_tensors = False

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @abstractmethod
    def start(self, wiring: Wiring) -> Capacity:
        """Load the model and allocate its memory.  Raises ModelError, PluginError or ResourceError."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Enqueue a step and return without waiting for it."""

    @abstractmethod
    def supply(self, step: int, late: LateInputs) -> None:
        """Deliver the token masks of a submitted step.  Its plan has the rows with a mask in ``StepPlan.late``."""

    def mask_memory(self, rows: int, words: int) -> np.ndarray:
        """Return host memory i32 [rows, words] of any content, in which the engine writes the masks for ``supply``.

        ``LateInputs.mask`` is then the first rows of this array.  Override it to return memory that the device can read
        without a copy, such as pinned memory.
        """
        return np.empty((rows, words), np.int32)

    @abstractmethod
    def collect(self, in_flight: int) -> Sequence[StepResult]:
        """Return the results of all finished steps, in order.  Wait until at most ``in_flight`` steps remain
        unfinished."""

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        """Run a rare operation, named by ``verb``, and return its result.  Arguments and result must be JSON values.

        Verbs: "profile_start", "profile_stop", "seams_start", "seams_stop", "kv_resident" (bytes of the KV cache that
        are resident in this machine's memory), "devices" (the devices that compute, "cpu" or a GPU's UUID),
        "start_times" (the seconds of the parts of ``start``, by name), "kv_tiers" (orders for the stores of
        ``CacheWiring.stores``, carried out by each rank as ``core.mover.Mover`` describes; the answer is a list with
        one element for each rank), "adapters" (``load``: pairs (number, folder) of adapters to load next to the steps;
        ``free``: numbers of adapters to remove, only while no step is in flight; the answer is a list with, for each
        rank, pairs (number, error or None) of the loads that have ended since the last call), "captures" (make one of
        the captures that the start left for later, only while no step is in flight; the answer has ``left``, the number
        of captures that are still to be made, and ``worked``, which is False if the executor could do nothing but wait
        for a compiler) and "weights" (``do``: check, write, commit or restore an update of the weights, sleep or wake,
        while no step is in flight; the answer is a list with, for each rank, a mapping with its ``error`` or None).
        NotImplementedError names a verb that the executor does not implement.
        """
        raise NotImplementedError(f"{type(self).__name__} has no verb {verb!r}")

    @abstractmethod
    def alive(self) -> bool:
        """Return False if the executor cannot run further steps, for example because a worker died."""

    @abstractmethod
    def stop(self, deadline: float = 10.0) -> None:
        """Free all resources within ``deadline`` seconds.  A second call does nothing."""
