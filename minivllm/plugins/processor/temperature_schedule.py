"""Change the temperature from token to token, with the position or with the model's confidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Processor, Row, Rows, State
from minivllm.errors import RequestError, shown

from .spec import TEMPERATURE_SCHEDULE

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

LINEAR, COSINE, ENTROPY = 1, 2, 4  # kinds of schedules: values in the column ``numbers``, and bits of a row's variant
KINDS = {"linear": LINEAR, "cosine": COSINE, "entropy": ENTROPY}
LEAST, MOST = 0.01, 2.0  # smallest and largest factor of the temperature
FIELD = "temperature_schedule"


class TemperatureSchedule(Processor):
    """A processor for ``temperature_schedule={"kind": ..., ...}``.

    The factor of a schedule multiplies ``temperature``, whose default is 1.  Kinds, for the output tokens 0, 1, ...:

    * ``linear`` with ``start``, ``end``, ``tokens``: from start to end over a number of tokens, then end
    * ``cosine`` with the same fields: half a cosine, as for learning rates (Loshchilov and Hutter, arXiv:1608.03983)
    * ``entropy`` with ``low``, ``high``, ``exponent`` (1): low + (high - low) * (H / log m) ** exponent.  H is the
      entropy of softmax(logits) over the m tokens that are not -inf, so the factor is low if the model is confident
      (llama.cpp's dynamic temperature)

    The processor divides the logits, so it is the last in the list.  Column ``numbers`` is f32 [S, 4]: the kind, where
    0 means none, then start, end, tokens or low, high, exponent.
    """

    reads = TEMPERATURE_SCHEDULE.reads

    def columns(self) -> Columns:
        return {"numbers": Column((4,))}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        schedule = params.temperature_schedule
        if schedule is None:
            return None
        kind = schedule.get("kind")
        _check(isinstance(kind, str) and kind in KINDS, f"{FIELD}: kind={shown(kind)}: expected {', '.join(KINDS)}")
        values = dict(schedule)
        names = ("start", "end", "tokens")
        least, most = 1.0, 2.0**20
        if kind == "entropy":
            values.setdefault("exponent", 1.0)
            names = ("low", "high", "exponent")
            least, most = 0.25, 4.0
        found = shown(sorted(map(str, schedule)))
        complete = values.keys() == {"kind", *names}
        _check(complete, f"{FIELD}: {kind} has {found}: expected kind, {', '.join(names)}")
        first = _number(values, names[0], LEAST, MOST)
        second = _number(values, names[1], LEAST, MOST)
        third = _number(values, names[2], least, most)
        _check(params.temperature > 0, f"{FIELD}: temperature=0 is greedy: expected temperature above 0")
        bit = KINDS[kind]
        return Row({"numbers": (bit, first, second, third)}, bit)

    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        numbers = state["numbers"][rows.slots]
        kind, first, second, third = numbers.unbind(1)
        factor = torch.ones_like(first, dtype=torch.float64)
        a = first.double()
        b = second.double()
        generated = (rows.position - rows.prompt).double()
        progress = (generated / third.clamp(min=1e-3)).clamp(max=1)
        factor = torch.where(kind == LINEAR, a + (b - a) * progress, factor)
        descent = (1 + torch.cos(math.pi * progress)) / 2
        factor = torch.where(kind == COSINE, b + (a - b) * descent, factor)
        if rows.variant & ENTROPY:
            spread = _relative_entropy(logits) ** third
            factor = torch.where(kind == ENTROPY, a + (b - a) * spread, factor)
        logits.div_(factor.to(logits.dtype)[:, None])


def _relative_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) divided by its largest possible value, f64 [N].

    It is 0 for a single certain token and 1 if all tokens are equally likely.  The arithmetic is float64, because a
    power of a small entropy would magnify rounding errors.
    """
    logp = torch.log_softmax(logits.double(), dim=1)
    terms = torch.where(logp.isneginf(), 0.0, logp * logp.exp())
    entropy = -terms.sum(dim=1)
    possible = (~logits.isneginf()).sum(dim=1)
    most = possible.double().log()
    share = torch.where(most > 0, entropy / most.clamp(min=1e-9), 0.0)
    return share.clamp(0, 1)


def _number(values: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = values[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    ok = number and least <= value <= most
    _check(ok, f"{FIELD}: {name}={shown(value)}: expected a number from {least:g} to {most:g}")
    return float(value)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message, FIELD)
