"""A temperature that changes from token to token: with the position, or with how sure the model is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Processor, Row, Rows
from minivllm.errors import RequestError, shown

from .spec import TEMPERATURE_SCHEDULE

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

LINEAR, COSINE, ENTROPY = 1, 2, 4  # in the column, and variant bits
KINDS = {"linear": LINEAR, "cosine": COSINE, "entropy": ENTROPY}
LEAST, MOST = 0.01, 2.0  # of a factor
FIELD = "temperature_schedule"


class TemperatureSchedule(Processor):
    """``temperature_schedule={"kind": ..., ...}``; its number multiplies ``temperature`` (1 unless given, so that it is
    the temperature).  For the output token t = 0, 1, ...:

    * ``linear``, ``start``, ``end``, ``tokens``: from start to end over so many tokens, then end
    * ``cosine``, the same: along half a cosine (as learning rates, Loshchilov and Hutter, arXiv:1608.03983)
    * ``entropy``, ``low``, ``high``, ``exponent`` (1): low + (high - low) * (H / log m) ** exponent, H the entropy of
      softmax(logits) over the m tokens that are not -inf: low where the model is sure (llama.cpp's dynamic temperature)

    It divides the logits, so it comes last in the list of processors.  Column ``numbers`` f32 [S, 4]: kind (0 = off),
    then start, end, tokens or low, high, exponent.
    """

    reads = TEMPERATURE_SCHEDULE.reads

    def columns(self) -> Mapping[str, Column]:
        return {"numbers": Column((4,))}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        given = params.temperature_schedule
        if given is None:
            return None
        kind = given.get("kind")
        _check(isinstance(kind, str) and kind in KINDS, f"{FIELD}: kind={shown(kind)}: expected {', '.join(KINDS)}")
        names = ("low", "high", "exponent") if kind == "entropy" else ("start", "end", "tokens")
        values = {"exponent": 1.0, **given} if kind == "entropy" else dict(given)
        _check(
            values.keys() == {"kind", *names},
            f"{FIELD}: {kind} has {shown(sorted(map(str, given)))}: expected kind, {', '.join(names)}",
        )
        first, second = (_number(values, name, LEAST, MOST) for name in names[:2])
        third = _number(values, names[2], *((0.25, 4.0) if kind == "entropy" else (1, 2.0**20)))
        _check(params.temperature > 0, f"{FIELD}: temperature=0 is greedy: expected temperature above 0")
        return Row({"numbers": (KINDS[kind], first, second, third)}, KINDS[kind])

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        kind, first, second, third = state["numbers"][rows.slots].unbind(1)
        by = torch.ones_like(first, dtype=torch.float64)
        a, b = first.double(), second.double()
        way = ((rows.position - rows.prompt).double() / third.clamp(min=1e-3)).clamp(max=1)
        by = torch.where(kind == LINEAR, a + (b - a) * way, by)
        by = torch.where(kind == COSINE, b + (a - b) * (1 + torch.cos(math.pi * way)) / 2, by)
        if rows.variant & ENTROPY:
            by = torch.where(kind == ENTROPY, a + (b - a) * _unsure(logits) ** third, by)
        logits.div_(by.to(logits.dtype)[:, None])


def _unsure(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) divided by its largest possible value, f64 [N]: 0 for one certain token,
    1 if all tokens are equally likely.  The arithmetic is float64, because a power of a small entropy would magnify
    rounding errors."""
    logp = torch.log_softmax(logits.double(), dim=1)
    entropy = -torch.where(logp.isneginf(), 0.0, logp * logp.exp()).sum(dim=1)
    most = (~logits.isneginf()).sum(dim=1).double().log()
    return torch.where(most > 0, entropy / most.clamp(min=1e-9), 0.0).clamp(0, 1)


def _number(values: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = values[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _check(
        number and least <= value <= most,
        f"{FIELD}: {name}={shown(value)}: expected a number from {least:g} to {most:g}",
    )
    return float(value)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message, FIELD)
