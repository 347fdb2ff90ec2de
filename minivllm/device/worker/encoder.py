"""Load the image encoder plug-in of a worker, and check its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception, call_foreign
from minivllm.errors import MinivllmError, PluginError, describe_error
from minivllm.registry import build_part

from .encoder_graphs import EncoderGraphs

if TYPE_CHECKING:
    from minivllm.core.interfaces.encoder import EncoderContext, ImageEncoder
    from minivllm.core.interfaces.executor import Part, Wiring


class LoadedEncoder:
    """The image encoder plug-in on a device, with its weights.  A call returns the features of one image."""

    def __init__(self, part: Part, ctx: EncoderContext, wiring: Wiring, hidden: int) -> None:
        """Build the plug-in and load its weights, or draw them for ``load_format=dummy``.

        ``hidden`` is the number of elements of a token's features.

        ModelError for weights that do not fit, torch.OutOfMemoryError, and PluginError for other failures."""
        self.plugin: ImageEncoder = build_part("encoder", part, ctx)
        self.levels = wiring.images.facts.levels
        self.hidden = hidden
        self.dtype: torch.dtype = getattr(torch, wiring.dtype)
        try:
            if wiring.load_format == "dummy":
                size = call_foreign(self.plugin.load_dummy, wiring.device, wiring.dtype, wiring.seed)
            else:
                size = call_foreign(self.plugin.load, wiring.device, wiring.dtype)
            self.bytes = _checked_size(size)
        except (MinivllmError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise PluginError(f"encoder {part.name} could not be loaded: {describe_error(e, self.plugin)}") from e

        self.graphs: EncoderGraphs | None = None
        if "graph_safe" in part.features and wiring.device.startswith("cuda") and wiring.steps.graph != "off":
            self.graphs = EncoderGraphs(lambda *args: self._checked(call_foreign(self.plugin.encode, *args), args[0]))

    def __call__(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Return features [levels, tokens, hidden] of an image with values f32 or u8 [n] of this shape.

        PluginError for features of another type, shape, dtype or device.  Their number of tokens is checked by the
        steps that read them."""
        if self.graphs is not None:
            return self.graphs(values, (shape[0], shape[1], shape[2]))
        return self._checked(call_foreign(self.plugin.encode, values, tuple(shape)), values)

    def parts(self, values: Tensor, shape: Sequence[int]) -> Iterator[float | Tensor]:
        """Yield the share of the work that is done after each part, and at last the features of an image.

        PluginError for other values than ascending shares in [0, 1) and features as ``__call__`` returns them."""
        running = call_foreign(self.plugin.encode_parts, values, (shape[0], shape[1], shape[2]))
        done = 0.0
        while True:
            found = call_foreign(next, running, None)
            if not isinstance(found, float):
                yield self._checked(found, values)
                return
            if not done <= found < 1:
                raise PluginError(f"encode_parts() gave {found}; expected a share of at least {done} and below 1")
            done = found
            yield done

    def _checked(self, found: Any, values: Tensor) -> Tensor:
        """Return the features ``found`` of an image encoder.  PluginError for another type, shape, dtype or device."""
        want = f"{self.dtype} [{self.levels}, tokens, {self.hidden}]"
        if not isinstance(found, Tensor):
            raise PluginError(f"the encoder gave a {type(found).__name__}; expected a tensor {want}")
        sizes = found.ndim == 3 and found.shape[0] == self.levels and found.shape[2] == self.hidden
        if not sizes or found.dtype != self.dtype or found.device.type != values.device.type:
            raise PluginError(f"the encoder gave {found.dtype} {list(found.shape)} on {found.device}; expected {want}")
        return found.detach()

    def describe(self, exc: BaseException) -> str:
        """Return the message of an exception in the encoder, with the line of the plug-in's code."""
        return f"the image encoder failed: {describe_error(as_exception(exc), self.plugin)}"


def _checked_size(size: Any) -> int:
    """Return ``size``, the bytes of the encoder's weights.  PluginError unless it is an int of at least 0."""
    if type(size) is not int or size < 0:
        raise PluginError(f"load() gave {size!r}; expected the bytes of the weights, an int >= 0")
    return size
