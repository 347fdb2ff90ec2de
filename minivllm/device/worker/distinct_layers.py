"""Runs of a model in which equal layers are left out, for runs whose result is not used.

A rehearsal, and the run before a capture, only have to launch each kernel once.  A model of 28 equal layers launches
the same kernels in 3 of them:

    layers   0 1 2 3 4 5 6 7 8 9 ... 26 27        the first layers, until each form and each pair of neighbouring forms
    runs     0 1                        27        has occurred, then the last layers

The first layer of a form may use another kernel than later layers, so each form occurs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from minivllm.device.layers.decoder import Decoder

from .graph_keys import TappedKey

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import GraphKey

    from .runner import Runner


class DistinctLayers:
    """Selects the layers of a runner's model that together launch every kernel of the model.

    All layers run if the model is no table of layers, has recurrent states or is split over processes, or if something
    reads values of each layer: a KV compressor, a drafter, or the features of images.
    """

    def __init__(self, runner: Runner) -> None:
        self.model = runner.model
        self.blocks: list[Any] | None = None  # the layers that run; None means all
        self._run = set[Any]()  # kinds of captures before which all layers have run
        read = (runner.compactor, runner.states_read, runner.images, runner.state.recurrent)
        if type(self.model) is not Decoder or not runner.alone or any(reader is not None for reader in read):
            return
        blocks = self.model.blocks
        forms = layer_forms(self.model, runner.worker.parts)
        chosen = distinct(forms)
        if len(chosen) < len(blocks):
            self.blocks = [blocks[i] for i in chosen]

    def before(self, key: GraphKey, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return the function to call before ``run``, the layers of a step of shape ``key``, is recorded.

        It runs all layers for the first steps of a kind until such a run succeeds, because each layer may allocate its
        own memory then, and for a step with tap points.  For other steps it runs only the layers of ``only``."""
        kind = type(key), key.kind, key.shared, key.rows == 1
        if isinstance(key, TappedKey):
            return run
        if kind in self._run:
            return partial(self.shortened, run)

        def whole() -> Any:
            result = run()
            self._run.add(kind)
            return result

        return whole

    def shortened(self, run: Callable[[], Any]) -> Any:
        """Call ``run``, in which the model runs only the layers of ``only``."""
        with self.only():
            return run()

    @contextmanager
    def only(self) -> Iterator[None]:
        """Make calls of the model run only the selected layers (``blocks``)."""
        if self.blocks is None:
            yield
            return
        every = self.model.blocks
        self.model.blocks = self.blocks
        try:
            yield
        finally:
            self.model.blocks = every


def layer_forms(model: Decoder, parts: Any) -> list[int]:
    """Return a number for each layer of a model; layers with equal numbers launch the same kernels.

    Such layers have equal sizes and options, and equal shapes and dtypes of all weights.  ``parts`` is the
    ``ModuleParts`` of the model."""
    weights: dict[str, list[Any]] = {}
    for name, module in parts.modules.items():
        words = name.split(".", 2)
        if words[0] != "layers" or len(words) < 3:
            continue
        number, rest = words[1:]
        for key, x in module.tensors.items():
            aligned = x.data_ptr() % 16 == 0
            weights.setdefault(number, []).append((rest, key, tuple(x.shape), x.dtype, aligned))
    seen: list[Any] = []
    numbers = []
    for i, layer in enumerate(model.spec.layers):
        form = layer, weights.get(str(i))
        if form not in seen:
            seen.append(form)
        numbers.append(seen.index(form))
    return numbers


def distinct(forms: Sequence[int]) -> list[int]:
    """Return the indices of layers in which each form, and each pair of neighbouring forms, occurs; the last layer is
    one of them.

    A form that several layers have occurs twice.  Return all layers if no later layer fits behind the first ones."""
    every = list(range(len(forms)))
    pairs = set(pairwise(forms))
    for first in range(2, len(forms)):
        found = forms[:first]
        if set(pairwise(found)) != pairs:
            continue
        if any(found.count(form) < min(2, forms.count(form)) for form in forms):
            continue
        # the layers behind the first ones begin with the form that follows there
        fitting = [i for i in every[first:] if forms[i] == forms[first]]
        return [*every[:first], *every[fitting[-1] :]]
    return every
