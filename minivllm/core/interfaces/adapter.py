"""The adapter seam (plug-in interface): weights of a request that change linear layers or tap points of a model.

A *method*, such as LoRA, reads the folders whose adapter_config.json names its ``peft_type``, a trait of its spec.  The
device has memory for ``places`` adapters, of all methods together.  The index of an adapter in it is its *place*.  The
engine gives each token of a step the place of its row's adapter::

    folder ──check──► host       read ──► host memory ──store──► place on the device
    step     begin(tokens) ─► layer change: product(x) ──► y ─► at_point(x) ─► end()

An adapter keeps its place while a row with it runs.  So a method only applies the adapters in the places of the tokens.
Places, loads, prefix keys and captures belong to the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from minivllm.errors import RequestError, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .quantizer import ModuleInfo

# added in 1.1: AdaptedModel.empty, AdapterSource.layout and .read, AdapterMemory.reserve
# added in 1.2: AdapterMethod.rows_behind, AdaptedLayer.extended
API = (1, 2)


@dataclass(frozen=True)
class AdapterContext:
    """The arguments with which a method (a kind of adapters) is constructed, on the host and in each process of the
    model."""

    places: int  # largest number of adapters on the device at the same time
    max_rank: int  # the option max_lora_rank


class NeededRows(NamedTuple):
    """The rows behind a weight that a step needs: the first ``used`` i32 [1] * ``each``.

    The products of the others may have any value."""

    used: Tensor
    each: int


class ExtendedWeight(Protocol):
    """The unquantized weight of a linear layer with further rows behind it in memory, multiplied by one kernel."""

    rows: Tensor  # [n, in], the further rows, written by the adapter method
    # called after the rows have lost their values, because the memory of the weights was freed meanwhile
    renew: Callable[[], object] | None

    def __call__(self, x: Tensor, needed: NeededRows | None = None) -> Tensor:
        """Return [T, out + n], the products of x [T, in] with the weight, and behind them those with ``rows``.

        ``needed`` None means that all rows are."""

    def fits(self, x: Tensor) -> bool:
        """Return whether ``divided`` can compute the products of x [T, in]."""

    def divided(
        self, x: Tensor, squares: Tensor, eps: float, needed: NeededRows | None = None
    ) -> Tensor:
        """Return the products of x [T, in] as a call does, divided by the root mean square of each row of x.

        ``squares`` f32 [T, parts] are sums of squares of parts of the rows, and ``eps`` is that of the norm."""

    def extends(self, product: Callable[[Tensor], Tensor]) -> bool:
        """Return whether ``product`` multiplies by this weight without ``rows``, so that a call can replace it."""


class AdaptedLayer(NamedTuple):
    """A linear layer whose output a method (a kind of adapters) may change.  Sizes are those of the part of the layer
    in this tensor-parallel process."""

    info: ModuleInfo
    # The layer's bias [out]. It is added to the changed product, after the sum over processes if
    # the inputs are split.
    bias: Tensor | None
    # the weight and the rows of ``AdapterMethod.rows_behind`` behind it; None if there are no rows
    extended: ExtendedWeight | None = None


@dataclass(frozen=True)
class AdaptedModel:
    """The model of a tensor-parallel process, as methods (kinds of adapters) see it."""

    layers: Mapping[str, AdaptedLayer]  # name of the module, such as "layers.0.attn.qkv" -> layer
    # tap point (named tensor of the model) to which values can be added -> its width
    points: Mapping[str, int]
    dtype: torch.dtype  # of activations
    device: torch.device
    # True: the result of a token may not depend on the other tokens of the step
    batch_invariant: bool
    # zeros(size, dtype) and empty(size, dtype) return host memory [size] with zeros or of any
    # content; it is pinned for a GPU.
    zeros: Callable[[int, torch.dtype], Tensor]
    empty: Callable[[int, torch.dtype], Tensor]


class AdapterTarget(Protocol):
    """Where a linear layer of the checkpoint is in the served model, which may merge several layers into one and split
    them over processes."""

    @property
    def layer(self) -> str:
        """Return the name of the served layer in ``AdaptedModel.layers``."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the parts of the served layer (such as q, k and v) that the checkpoint's layer fills, in
        the order of its outputs."""

    @property
    def inputs(self) -> int:
        """Return the number of inputs of the checkpoint's layer, over all processes."""

    @property
    def outputs(self) -> int:
        """Return the number of outputs of the checkpoint's layer, over all processes."""

    def rows(self, values: Tensor) -> list[tuple[str, slice, Tensor]]:
        """Return the part of ``values`` [outputs, ...] that belongs to this process.

        The result has an entry for each part of the served layer: its name, its range in the outputs of the served
        layer, and its values in that order."""

    def columns(self, values: Tensor) -> Tensor:
        """Return the part of ``values`` [..., inputs] that belongs to this process."""


class TensorCopy(NamedTuple):
    """An order to copy consecutive numbers of a tensor in a file to host memory ``to`` [rows, width] of any float
    dtype."""

    name: str
    first: int  # index of the first number to copy, in the order of the file
    to: Tensor


class AdapterSource(Protocol):
    """The folder of an adapter, from which a method reads the adapter's tensors."""

    @property
    def folder(self) -> str:
        """Return the path of the folder."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the fields of adapter_config.json."""

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the tensors in adapter_model.safetensors."""

    @property
    def layout(self) -> bytes:
        """Return a text that is equal for files whose tensors have the same names, shapes and dtypes."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the file."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the file, on the host."""

    def read(self, copies: Sequence[TensorCopy]) -> None:
        """Copy parts of the file's tensors to host memory, as ``copies`` orders.

        A part is read straight from the file if ``to`` is contiguous and has the dtype of the file, without the
        interpreter's lock.  RequestError for a file that is too short or cannot be read, and for tensors without a
        float dtype."""

    def target(self, module: str) -> AdapterTarget:
        """Return where a linear layer of the checkpoint is in the served model.

        RequestError if the model has no such layer, or if adapters cannot change layers of its kind."""


def adapter_refusal(folder: str, what: str) -> RequestError:
    """Return the RequestError which says that the adapter in a folder is refused, for the reason ``what``."""
    return RequestError(f"adapter {shown(folder)}: {what}", "lora_request")


class LowRank(NamedTuple):
    """The adapters of a layer as low-rank products: y[rows of part p] += (x A[place, p]^T) B[place, rows of part p]^T.

    Rows of A and columns of B behind the rank of an adapter are zero."""

    a: Tensor  # [places, parts, rank, in]
    b: Tensor  # [places, out, rank]
    # i32 [places] rank of the adapter in each place on the device; 0 means that it does not change
    # the layer
    ranks: Tensor


# change(product, x) returns the changed product [T, out] of a layer, as far as it belongs to this
# process. product(x) is the product of the layer itself. A change may also have the method
# gated(product, x, activation, following), which computes the gate of an MLP too (``LayerAdapters.gated``);
# ``following`` is the change of the same method for the layer that reads the result, or None. The methods
# divides, divided and added belong to steps of few rows, in which norms are parts of the kernels of
# products (``LayerAdapters``).
LayerChange = Callable[["Callable[[Tensor], Tensor]", "Tensor"], "Tensor"]


class AdapterMemory(ABC):
    """The adapters of one method in one process of the model.

    Contract.  ``begin`` is called before the layers of a step, and ``end`` after them.  A model may compute its last
    products for some tokens of the step only; before these, ``end`` and ``begin`` are called again, for these tokens.
    Between ``begin`` and ``end``:

    * A token whose place is -1 keeps its values bit for bit.
    * The result of another token depends only on its own values and on the adapter in its place.
    * Arguments are not changed in place.
    * On a GPU no tensor is read on the host, because these calls are captured.  A later ``store`` takes effect in steps
      that are captured already, so it writes to the same memory."""

    @abstractmethod
    def read(self, source: AdapterSource) -> Any:
        """Return the adapter of a folder in host memory.  RequestError if it does not fit the model.

        A thread calls this while steps run.  The engine keeps the result while the adapter is in host memory."""

    def reserve(self) -> None:
        """Allocate host memory for the first calls of ``read``.  A thread calls this once, while steps run.

        A method without it allocates the memory in ``read``."""
        return

    @abstractmethod
    def store(self, place: int, loaded: Any) -> None:
        """Copy an adapter from host memory to a place on the device, over the adapter that was there."""

    def layer(self, name: str) -> LayerChange | None:
        """Return the function that changes the product of a linear layer, None if adapters never change it.

        It is called once for each layer of the model, after the construction."""
        return None

    def low_rank(self, name: str) -> LowRank | None:
        """Return the adapters of a layer if their whole effect is a low-rank product, else None.

        The native steps of a CPU then compute it, and neither ``begin`` nor changes are called.  ``store`` must write
        to the same memory.  An inherited method is ignored, because a subclass may change layers in another way."""
        return None

    def points(self, loaded: Any) -> Sequence[str]:
        """Return the names of the tap points that an adapter changes."""
        return ()

    @abstractmethod
    def begin(self, tokens: Tensor) -> None:
        """Prepare the layers of a step.

        ``tokens`` i32 [T] has for each token the place of its row's adapter, -1 for no adapter of this method."""

    def at_point(self, point: str, x: Tensor) -> Tensor:
        """Return the changed value [T, width] of a tap point, for a step in which ``points`` of a row has it."""
        return x

    def end(self) -> None:
        """Clear the data that ``begin`` has prepared for the step."""
        return


class AdapterMethod(ABC):
    """A kind of adapters, such as LoRA: it checks their files and applies them.

    The host has an instance that checks folders; each process of the model has one that makes a memory."""

    def __init__(self, options: Any, ctx: AdapterContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def check(self, folder: str, config: Mapping[str, Any]) -> None:
        """Check the fields ``config`` of adapter_config.json before weights are read.

        RequestError for a field with an effect that is not implemented.  The host calls this for each request, and has
        no torch."""

    def rows_behind(self, info: ModuleInfo) -> int:
        """Return the number of further rows to allocate behind the weight of a linear layer (``ExtendedWeight``).

        They are allocated only if the weight is not quantized, ``batch_invariant`` is off, and no other method of the
        engine returns a number above 0.  Otherwise the method must work without them."""
        return 0

    @abstractmethod
    def memory(self, model: AdaptedModel) -> AdapterMemory:
        """Return new memory for ``ctx.places`` adapters of a model."""
