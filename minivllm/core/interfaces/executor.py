"""The executor seam: where steps run.  In this process, in worker processes, on other machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minivllm.registration.spec import Part

from .plan import LateInputs, StepPlan, StepResult

# 2.0: Wiring nests; 2.1: StepPlan.guided, Capacity.guides; 2.2: Wiring.own_models; 2.3: StepPlan.taps, Join.steer,
# Capacity.taps; 2.4: Executor.now
API = (2, 4)


@dataclass(frozen=True)
class DraftWiring:
    """The model of a drafter or processor.  Its layers keep their KV in the blocks of the target's leading group."""

    model_dir: str
    parts: Mapping[str, Part]  # seam -> part, for model and quantizer


@dataclass(frozen=True)
class CacheWiring:
    """The KV cache."""

    kvcache_block_size: int
    num_kvcache_blocks: int = -1  # -1 = as many as fit
    gpu_memory_utilization: float = 0.9
    groups: tuple[tuple[int, ...], ...] = ()  # layers of each KV group


@dataclass(frozen=True)
class StepWiring:
    """How steps run."""

    graph: str = "auto"  # captured steps: auto | mixed | decode | off
    fuse: bool = True  # fused kernels, where the device has them
    # but for these: pairs | norms | gate | draw
    unfused: tuple[str, ...] = ()
    # steps in flight beside the newest; None = the executor's choice
    run_ahead: int | None = None


@dataclass(frozen=True)
class SpeculationWiring:
    num_speculative_tokens: int = (
        0  # drafts a row may bring to a step, by parts["drafter"]; 0: none
    )
    speculate: str = "auto"  # always: also where it was measured to lose
    draft_model: DraftWiring | None = None  # for a drafter that has one


@dataclass(frozen=True)
class ParallelWiring:
    """Which share of the model a process has."""

    tensor_parallel_size: int = 1  # processes that share it
    rank: int = 0  # of this one among them


@dataclass(frozen=True)
class Wiring:
    """Everything that a process needs to build its share of the engine; goes over as JSON, never as pickle.  Options
    have their names of the configuration."""

    model_dir: str
    load_format: str  # auto | safetensors | pt | dummy
    device: str
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batch_invariant: bool
    seed: int
    # seam -> part, for model, quantizer, kvformat, attention, sampler, drafter
    parts: Mapping[str, Part]
    cache: CacheWiring
    steps: StepWiring = StepWiring()
    speculation: SpeculationWiring = SpeculationWiring()
    parallel: ParallelWiring = ParallelWiring()
    processors: tuple[Part, ...] = ()
    # name of a processor that claims ``own_model`` -> that model
    own_models: Mapping[str, DraftWiring] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    # or "processed_logprobs": of what the sampler draws from
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = 20  # that a request may ask for; -1: as many as there are tokens
    max_tap_bytes: int = 256 << 20  # float32 values that a request may read by taps
    # a request that may become longer has another rotary embedding (decoder.Rope.switch)
    rope_switch: int | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)  # over the served config.json

    @property
    def block(self) -> int:
        """Tokens of a block of the KV cache."""
        return self.cache.kvcache_block_size


@dataclass(frozen=True)
class Capacity:
    """What the executor found room for."""

    blocks: tuple[int, ...]  # per KV group, the null block included
    block_bytes: tuple[int, ...]  # over all layers of the group
    vocab_size: int
    weight_bytes: int
    depth: int  # steps that may be in flight beside the newest
    notes: tuple[str, ...] = ()
    guides: bool = False  # ``StepPlan.guided`` is obeyed; else requests with a guide are refused
    # ``Wiring.own_models`` are run; else processors that have one are refused
    own_models: bool = False
    # points of the model that requests may tap and their widths, in the order that ``StepPlan.taps``
    # counts; None: the executor serves no taps, and such requests are refused
    taps: Mapping[str, int] | None = None


class Executor(ABC):
    """Runs steps in order.  Nothing here raises for a failed step: the failure is in its result."""

    # seconds of a clock of its own, which then is the engine's: policies and requests see its
    # time; None: time.monotonic
    now: Callable[[], float] | None = None

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @abstractmethod
    def start(self, wiring: Wiring) -> Capacity:
        """Load the model, take the memory.  ModelError, PluginError or ResourceError."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Enqueue a step; returns without waiting for it."""

    @abstractmethod
    def supply(self, step: int, late: LateInputs) -> None:
        """Masks for the late rows of a submitted step."""

    def mask_memory(self, rows: int, words: int) -> np.ndarray:
        """i32 [rows, words], of any content: host memory that the engine writes late masks to, whose leading rows then
        are ``LateInputs.mask``.  An executor overrides it to give memory that its device reads without a copy."""
        return np.empty((rows, words), np.int32)

    @abstractmethod
    def collect(self, in_flight: int) -> Sequence[StepResult]:
        """All finished steps, in order; waits until at most ``in_flight`` remain."""

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        """Rare verbs ("profile_start", "profile_stop", "seams_start", "seams_stop", "kv_resident": bytes of the KV
        cache in this machine's memory whose pages were taken, "devices": those that compute, "cpu" or a GPU's UUID);
        JSON in and out.  NotImplementedError names the verb."""
        raise NotImplementedError(f"{type(self).__name__} does not know the verb {verb!r}")

    @abstractmethod
    def alive(self) -> bool: ...

    @abstractmethod
    def stop(self, deadline: float = 10.0) -> None:
        """Give everything back within ``deadline`` seconds; idempotent."""
