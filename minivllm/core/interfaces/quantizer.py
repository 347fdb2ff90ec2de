"""The quantizer seam (plug-in interface): how the weight of a module is stored, loaded and multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor

API = (1, 7)  # 1.7: PartSource.groups


@dataclass(frozen=True)
class Shard:
    """Which part of a weight this process has: part ``rank`` of ``size``, in a tensor-parallel group."""

    rank: int = 0
    size: int = 1


class PartSource(NamedTuple):
    """The tensors that a checkpoint has for one part of a module, such as q of a merged qkv layer."""

    name: str  # name in the checkpoint, such as "model.layers.3.self_attn.q_proj"
    # parameter name -> (shape, dtype such as "F16")
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    # number of groups of rows in a tensor with several parts; each group has rows of every part
    groups: int = 1


@dataclass(frozen=True)
class ModuleInfo:
    """A module that owns a weight.  Sizes are those of *the part in this process* after tensor-parallel slicing.

    A merged linear layer, such as q, k and v in one matrix, has several ``parts``: (name, output rows) in the order in
    which they are stacked.  A module of kind "experts" has the parts of expert 0 first, then those of expert 1
    ("0.gate", "0.up", "1.gate" ...), and equally many for each expert.  ``names`` maps parts to their names in the
    checkpoint, where these are known."""

    name: str  # "layers.3.attn.qkv"
    kind: str  # kind of module: linear | embedding | lm_head | router | experts
    in_features: int
    parts: tuple[tuple[str, int], ...]
    dtype: str  # name of the torch dtype of the activations
    device: str
    bias: bool = False
    # How processes split the weight: None (not), "column" (each has some of the outputs) or "row"
    # (some of the inputs).
    split: str | None = None
    shard: Shard = Shard()
    experts: int = 0  # number of experts, for modules of kind "experts"
    # Number of neighbouring processes that hold the same share of a part.  It is above 1 for parts that are
    # split into fewer shares than there are processes, such as a few KV heads.
    copies: Mapping[str, int] = field(default_factory=dict, compare=False)
    # the checkpoint's tensors for each part that has any; None if the checkpoint was not read
    sources: Mapping[str, PartSource] | None = field(default=None, compare=False)
    names: Mapping[str, str] = field(
        default_factory=dict,
        compare=False,
    )

    @property
    def out_features(self) -> int:
        """Return the number of output rows of the weight, which is the sum over its parts (such as q, k and v)."""
        return sum(n for _, n in self.parts)

    def share(self, part: str) -> Shard:
        """Return which slice of a part (such as q, k or v) this process has, and the number of distinct slices."""
        copies = self.copies.get(part, 1)
        return Shard(self.shard.rank // copies, self.shard.size // copies)

    @cached_property
    def rows(self) -> Mapping[str, slice]:
        """Return the range of output rows of each part (such as q, k and v) in the merged weight."""
        found, start = {}, 0
        for name, rows in self.parts:
            found[name] = slice(start, start + rows)
            start += rows
        return found


class StoredWeight(NamedTuple):
    """The storage of a module's weight in memory, with one row for each output::

    float32, bfloat16, float16  [out, in]
    int8, float8 [out, in]      w = weight * scale[out]
    the same, or uint8          w = (weight - zero[out, group]) * scale[out, group]; zero None means 0
    uint8 [out, in / 2]         w = (q - zero[out, group]) * scale[out, group]; byte j of the 16 bytes of
                                block b has input 32 b + j in its low nibble, 32 b + 16 + j in its high nibble
    """

    weight: Tensor
    scale: Tensor | None = None  # f32
    zero: Tensor | None = None  # f32 zero points; None means 8 for nibbles and 0 for bytes
    group: int = 0  # number of consecutive inputs that share a scale; 0 means all inputs


class WeightScheme(ABC):
    """Stores the weight of one module in some format and multiplies by it.  The loader calls ``load`` once for each
    part of each parameter, and then ``finish`` once.

    ``tensors`` holds the tensors on the device.  Memory accounting and the state dict read it."""

    tensors: dict[str, Tensor]
    # Whether apply(c * x) equals c * apply(x).  If so, the engine may apply the factor of a norm after the product.
    homogeneous = True

    @abstractmethod
    def params(self) -> Mapping[str, tuple[int, ...]]:
        """Return the parameters that the checkpoint must contain: name ("weight", "scales") -> shape over all parts.

        ``bias`` is not among them, because the linear layer stores it.
        """

    def params_of(self, part: str) -> Mapping[str, tuple[int, ...]]:
        """Return the parameters of one part, if they differ from ``params``."""
        return self.params()

    @abstractmethod
    def load(self, param: str, tensor: Tensor, part: str) -> None:
        """Store this process's slice of one part (see ``slice``).  ``tensor`` has any floating dtype, may be on any
        device, and is not changed.  ModelError if its shape is wrong."""

    def slice(self, param: str, tensor: Tensor, split: str | None, shard: Shard) -> Tensor:
        """Return the slice of a complete checkpoint tensor that belongs to this process.

        The default cuts a weight [out, in] by rows if ``split`` is "column", and by columns if it is "row"."""
        if split is None or shard.size == 1:
            return tensor
        return tensor.chunk(shard.size, dim=0 if split == "column" else 1)[shard.rank]

    def finish(self) -> None:  # noqa: B027  (optional)
        """Convert the weight into its final form after all parts are loaded, and free temporary tensors."""

    @abstractmethod
    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        """Multiply x [T, in] by the weight.  Return [T, out], without the bias and without a reduction over
        processes."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        """Multiply x [T, in] by the rows of expert ``e`` only.  Return [T, rows of an expert].

        The engine calls it, and not ``apply``, for modules of kind "experts".  PluginError if the scheme does not
        implement it.
        """
        raise PluginError(
            f"{type(self).__name__} stores no experts: return None from scheme() for kind 'experts'"
        )

    def gather(self, ids: Tensor, dtype: Any) -> Tensor:
        """Return the rows i64 [T] of an embedding as [T, in], in a torch dtype.  A tied output head also calls
        ``apply``.

        The engine calls it for modules of kind "embedding".  PluginError if the scheme does not implement it.
        """
        raise PluginError(
            f"{type(self).__name__} gathers no rows: return None from scheme() for kind 'embedding'"
        )

    def stored(self) -> StoredWeight | None:
        """Return the weight if it is stored in a form of ``StoredWeight`` and ``apply`` is its plain product, else
        None.

        Captured CPU steps read some of these forms directly, and expert kernels read the quantized ones.  The engine
        ignores an inherited ``stored``, because the product of a subclass may be different.
        """
        return None

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        """Return ``apply`` fused in one kernel with the operations around it, or None if there is no such kernel.

        The result has the interface of ``device.kernels.products.Product``, which also defines the modes.  The engine
        calls it once, after everything is loaded.  It ignores an inherited ``joined``, because the product of a
        subclass may be different.
        """
        return None

    def served(self, device: str, sm: int) -> Mapping[str, str]:
        """Return the kernels that multiply on a device, for ``minivllm explain``: rows of x ("2 to 8") -> kernel.

        ``sm`` is NVIDIA's compute capability times 10, such as 90.
        """
        return {}

    @property
    def bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Quantizer(ABC):
    """Chooses a scheme for each module.  None leaves the module unquantized."""

    def __init__(self, options: Any, checkpoint: Mapping[str, Any] | None = None) -> None:
        self.options = options
        self.checkpoint = checkpoint  # the value of ``quantization_config`` in config.json, or None
        self.notes: list[str] = []  # messages for the user, read after all weights are loaded

    @abstractmethod
    def scheme(self, m: ModuleInfo) -> WeightScheme | None:
        """Return a new scheme for a module, or None to leave the module unquantized."""

    def finish(self) -> None:  # noqa: B027  (optional)
        """Check the options after ``scheme`` was called for all modules.  OptionError if an option names a module that
        does not exist."""
