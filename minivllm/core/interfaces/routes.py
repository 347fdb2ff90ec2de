"""Expert routes: the numbers of the experts that each token of a request uses, in each layer with experts.

    routes [positions, layers, k]      position = token of the prompt or generated token, without the last one
                                       layers   = layers with experts, in their order
                                       k        = experts of a token, best first

A client reads the routes of a request, counts them, keeps experts out of its routes, or gives the routes of another run
(rollout routing replay).  JSON holds an array as ``{"shape": [...], "dtype": "uint8", "data": base64}``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from minivllm.errors import RequestError, shown
from minivllm.registration.parameters import check_mapping, is_whole

NAME = "routes"
DTYPES = ("uint8", "int16", "int32")  # dtypes that encoded routes may have, little-endian
OWN = -1  # marks a token and layer whose experts the router itself chooses
MOST_EXPERTS = 32_767
MOST_DIGITS = 9  # largest number of digits of a layer number
INT32 = 2**31 - 1


def encode_routes(routes: np.ndarray) -> dict[str, Any]:
    """Return routes, an array of one of ``DTYPES``, as JSON data."""
    data = np.ascontiguousarray(routes, routes.dtype.newbyteorder("<")).tobytes()
    encoded = base64.b64encode(data).decode()
    return {"shape": list(routes.shape), "dtype": routes.dtype.name, "data": encoded}


def decode_routes(value: Mapping[str, Any]) -> np.ndarray:
    """Return the array that ``encode_routes`` has encoded.  RequestError if the value is damaged."""
    shape, dtype, data = (value.get(key) for key in ("shape", "dtype", "data"))
    ok = set(value) == {"shape", "dtype", "data"} and dtype in DTYPES and isinstance(data, str)
    ok = ok and isinstance(shape, (list, tuple)) and len(shape) == 3
    if not (ok and all(is_whole(n) and 0 <= n <= INT32 for n in shape or ())):
        expected = f"shape of 3 sizes, dtype ({', '.join(DTYPES)}) and data (base64)"
        raise RequestError(f"{NAME}.given: expected an object with {expected}", NAME)
    try:
        raw = base64.b64decode(data or "", validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{NAME}.given.data: expected base64", NAME) from None
    kind = np.dtype(dtype).newbyteorder("<")
    size = prod(map(int, shape or ())) * kind.itemsize
    if size != len(raw):
        raise RequestError(f"{NAME}.given.data has {len(raw)} bytes; expected {size}", NAME)
    return np.frombuffer(raw, kind).reshape(shape)


@dataclass(frozen=True)
class RouteParams:
    """How a request reads or controls which experts its tokens use.

    With ``read``, the output has ``routes``, and with ``counts`` it has ``route_counts`` [layers, experts]: the number
    of its tokens that used each expert.  ``pruned`` lists experts that no token of the request uses, in all layers as a
    list of numbers, or by layer as a mapping of layer numbers to lists.  ``given`` has the routes of the first tokens,
    integers [positions, layers, k] or the object of ``encode_routes``; the experts of a token and layer are distinct
    numbers, or all ``OWN`` for the router's own choice.  The router still computes the weights of given experts.
    RequestError for values of another form."""

    read: bool = False
    counts: bool = False
    pruned: Mapping[int, Sequence[int]] | Sequence[int] = ()
    given: Any = None

    @classmethod
    def of(cls, value: Any) -> RouteParams | None:
        """Return the parameters from an object of this class, a mapping of its fields, True (``read``), False or None.

        False and None give None.  RequestError for any other value, and for unknown fields."""
        if value is None or value is False:
            return None
        if value is True:
            return cls(read=True)
        if isinstance(value, cls):
            return value
        check_mapping(NAME, value, "True, RouteParams or a mapping", [f.name for f in fields(cls)])
        return cls(**value)

    def __post_init__(self) -> None:
        """Check the fields; convert ``pruned`` to lists of numbers, and ``given`` to its JSON form."""
        for name in ("read", "counts"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{NAME}.{name}={shown(value)}: expected True or False", NAME)
        object.__setattr__(self, "pruned", _pruned(self.pruned))
        if self.given is not None:
            object.__setattr__(self, "given", encode_routes(_given(self.given)))
        if not (self.reads or self.pruned or self.given):
            expected = "expected read, counts, pruned or given"
            raise RequestError(f"{NAME}: nothing is requested; {expected}", NAME)

    @property
    def reads(self) -> bool:
        """Return whether the engine must collect the routes of the request."""
        return self.read or self.counts

    @cached_property
    def given_routes(self) -> np.ndarray:
        """Return ``given`` as integers [positions, layers, k]; it must not be None."""
        return decode_routes(self.given)

    @property
    def given_digest(self) -> str:
        """Return the SHA-256 of ``given``, for records and for the keys of cached prefixes."""
        text = f"{self.given['shape']} {self.given['dtype']} {self.given['data']}"
        return hashlib.sha256(text.encode()).hexdigest()


def _numbers(values: Any) -> list[int] | None:
    """Return ``values`` as a list of expert ids, or None if it is not a list of whole numbers."""
    if isinstance(values, (np.ndarray, range)):
        values = list(values)
    if not isinstance(values, (list, tuple)):
        return None
    ok = all(is_whole(one) and 0 <= one <= MOST_EXPERTS for one in values)
    return [int(one) for one in values] if ok else None


def _pruned(value: Any) -> Mapping[str, list[int]] | Sequence[int]:
    """Return ``RouteParams.pruned`` as a list, or as a dict by the layer's number as text, which JSON keeps.

    RequestError for other values, and for a layer that is named twice, as "1" and "01"."""
    expected = "expected numbers of experts, as a list or as lists by the number of a layer"
    error = RequestError(f"{NAME}.pruned={shown(value)}: {expected}", NAME)
    if not isinstance(value, Mapping):
        found = _numbers(value)
        if found is None:
            raise error
        return found or ()
    by_layer: dict[str, list[int]] = {}
    for layer, experts in value.items():
        found = _numbers(experts)
        text = str(layer)
        digits = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
        if found is None or not digits or str(int(text)) in by_layer:
            raise error
        by_layer[str(int(text))] = found
    return by_layer


def _given(value: Any) -> np.ndarray:
    """Return given routes as integers i16 [positions, layers, k].  RequestError for anything else."""
    if isinstance(value, Mapping):
        array = decode_routes(value)
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):  # lists of unequal length, or elements that are not numbers
            array = np.empty(0, object)
    if array.dtype.kind not in "iu" or array.ndim != 3 or not array.size:
        shape = f"{array.dtype} {list(array.shape)}"
        raise RequestError(
            f"{NAME}.given of {shape}: expected integers [positions, layers, k]", NAME
        )
    if array.min() < OWN or array.max() > MOST_EXPERTS:
        raise RequestError(
            f"{NAME}.given: expected numbers of experts, or {OWN} for the router's choice", NAME
        )
    order = np.sort(array.astype(np.int32), axis=-1)
    twice = ((order[..., 1:] == order[..., :-1]) & (order[..., 1:] != OWN)).any(axis=-1)
    mixed = (order[..., 0] == OWN) & (order[..., -1] != OWN)
    wrong = np.argwhere(twice | mixed)
    if len(wrong):
        at, layer = wrong[0].tolist()
        found = array[at, layer].tolist()
        text = f"{NAME}.given has the experts {found} for position {at} in layer {layer}"
        raise RequestError(f"{text}; expected distinct experts, or {OWN} for all", NAME)
    return array.astype(np.int16)


def smallest(routes: np.ndarray, experts: int) -> np.ndarray:
    """Return routes as uint8 where ``experts`` fit, else as int16."""
    return routes.astype(np.uint8 if experts <= 256 else np.int16)


def count_routes(routes: np.ndarray, experts: int) -> np.ndarray:
    """Return how many tokens use each expert, i64 [layers, experts], for routes [positions, layers, k]."""
    counts = [np.bincount(routes[:, i].ravel(), minlength=experts) for i in range(routes.shape[1])]
    return np.stack(counts).astype(np.int64)
