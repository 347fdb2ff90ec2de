"""Expert routes (which experts of a mixture-of-experts model each token uses) on the host: the checks of a request's
``routes``, and the given routes of the rows of a step.

Routes that are read are values of the tap points ``layers.i.experts`` (see ``taps``).  Pruned experts get -inf added to
their logits at ``layers.i.router``, as a vector that is added.  Given routes travel with each step that computes their
positions, so preemption, chunks, branches and drafts need nothing more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minivllm.core.interfaces.routes import NAME, OWN, RouteParams
from minivllm.core.interfaces.taps import EXPERTS
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Capacity

ROUTER = ".router"


class ExpertLayer(NamedTuple):
    """A layer with experts: the numbers of its tap points for the router's logits and for the chosen experts, the count
    of its experts, and how many of them a token uses."""

    router: int
    ids: int
    experts: int
    chosen: int


class RequestRoutes(NamedTuple):
    """The checked ``routes`` parameter of a request.  ``layers`` are the layers with experts, in order.  ``given`` i32
    [positions, layers * k] are the expert ids that the client sets, None if it sets none."""

    layers: tuple[ExpertLayer, ...]
    reads: bool
    # number of a router's tap point -> vector f32 [experts] to add to its logits, with -inf for
    # pruned experts
    pruned: Mapping[int, np.ndarray]
    given: np.ndarray | None


def expert_layers(points: Mapping[str, int]) -> list[ExpertLayer]:
    """Return the layers of a model that have tap points for the router's logits and for the chosen experts.

    ``points`` are the model's tap points (``Capacity.taps``)."""
    numbers = {name: i for i, name in enumerate(points)}
    found = []
    for name, chosen in points.items():
        router = name.removesuffix(EXPERTS) + ROUTER
        if name.endswith(EXPERTS) and router in points:
            found.append(ExpertLayer(numbers[router], numbers[name], points[router], chosen))
    return found


def check_routes(params: Any, end: int, capacity: Capacity, model: str) -> RequestRoutes | None:
    """Check ``SamplingParams.routes`` and return the form that the engine uses, or None without routes.

    ``end`` is the largest number of tokens of the sequence, and ``model`` the name of the model's plug-in.
    RequestError if the model or the executor cannot serve the routes, for an unknown layer or expert, and for given
    routes whose shape differs from the model's.
    """
    if params is None:
        return None
    assert isinstance(params, RouteParams)
    layers = expert_layers(capacity.taps or {})
    if not layers:
        raise RequestError(
            f"{NAME}: the model {model} with this executor has no tap points of experts; leave the parameter out",
            NAME,
        )
    if len({(layer.experts, layer.chosen) for layer in layers}) > 1:
        raise RequestError(
            f"{NAME}: the layers of {model} have different numbers of experts; use taps", NAME
        )
    return RequestRoutes(
        tuple(layers),
        params.reads,
        _pruned_vectors(params, layers),
        _given_rows(params, end, layers, capacity, model),
    )


def _pruned_vectors(params: RouteParams, layers: list[ExpertLayer]) -> dict[int, np.ndarray]:
    """Return a vector f32 [experts] for each router with pruned experts, by the number of its tap point.

    It is -inf for pruned experts and 0 for the others.  RequestError for an unknown layer or expert, and if fewer
    experts remain than a token uses."""
    pruned: Mapping[Any, Sequence[int]] | Sequence[int] = params.pruned
    if not isinstance(pruned, Mapping):
        pruned = {str(i): pruned for i in range(len(layers))} if pruned else {}
    found = {}
    for number, experts in pruned.items():
        if int(number) >= len(layers):
            raise RequestError(
                f"{NAME}.pruned: there is no layer {number} with experts"
                f"; expected 0 to {len(layers) - 1}",
                NAME,
            )
        layer = layers[int(number)]
        vector = np.zeros(layer.experts, np.float32)
        for expert in experts:
            if expert >= layer.experts:
                raise RequestError(
                    f"{NAME}.pruned: there is no expert {expert}"
                    f"; expected 0 to {layer.experts - 1}",
                    NAME,
                )
            vector[expert] = -np.inf
        left = int(np.count_nonzero(vector == 0))
        if left < layer.chosen:
            raise RequestError(
                f"{NAME}.pruned leaves {left} experts of layer {number}"
                f"; expected at least {layer.chosen}, as many as a token uses",
                NAME,
            )
        if left < layer.experts:
            found[layer.router] = vector
    return found


def _given_rows(
    params: RouteParams, end: int, layers: list[ExpertLayer], capacity: Capacity, model: str
) -> np.ndarray | None:
    """Return the expert ids i32 [positions, layers * k] that the client sets, after a check; None if it sets none."""
    if params.given is None:
        return None
    names = list(capacity.taps or {})
    if [names[layer.ids] for layer in layers] != list(capacity.given):
        raise RequestError(
            f"{NAME}.given: the model {model} with this executor does not accept given routes"
            "; a model with a router hook computes the weights itself",
            NAME,
        )
    given = params.given_routes
    (_, _, experts, chosen) = layers[0]
    if given.shape[1:] != (len(layers), chosen):
        have = "×".join(str(size) for size in given.shape[1:])
        raise RequestError(
            f"{NAME}.given has {have} experts for each position; expected {len(layers)}×{chosen}",
            NAME,
        )
    if len(given) >= end:
        raise RequestError(
            f"{NAME}.given has routes for {len(given)} positions"
            f"; expected at most {end - 1}, one less than the longest answer",
            NAME,
        )
    if given.max(initial=OWN) >= experts:
        raise RequestError(
            f"{NAME}.given: there is no expert {given.max()}; expected below {experts}", NAME
        )
    for layer, experts_off in _pruned_vectors(params, layers).items():
        at = next(i for i, one in enumerate(layers) if one.router == layer)
        if (experts_off[given[:, at]] < 0)[given[:, at] != OWN].any():
            raise RequestError(
                f"{NAME}.given uses experts of layer {at} that are pruned; expected others", NAME
            )
    return given.reshape(len(given), -1).astype(np.int32)
