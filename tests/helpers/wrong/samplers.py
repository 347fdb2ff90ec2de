"""Wrong samplers: ``DefaultSampler`` with one fault each, or one written another way with a fault."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.core.interfaces.sampling import Column, Row, Sampler
from minivllm.device.worker.sampling import noise
from minivllm.plugins.sampler.default import FULL, DefaultSampler
from minivllm.registration.spec import ANY, Spec

SEAM = "sampler"
ODDS = "test_draws_come_with_the_probabilities_of_the_softmax"
REFERENCE = "test_parameters_leave_the_tokens_and_the_probabilities_of_the_reference"
LIMIT = "test_each_limit_is_where_it_should_be"
BATCH = "test_a_key_draws_the_same_token_again"
PAIRS = "test_draws_of_neighbouring_keys_are_independent"
KEYS = "test_no_two_keys_are_taken_for_one"
TAIL = "test_unlikely_tokens_come_as_often_as_they_should"
NEVER = "test_impossible_tokens_are_never_drawn"
GREEDY = "test_greedy_takes_a_best_token_and_no_noise"
PRECISE = "test_logits_keep_the_precision_of_float32"
EXTREME = "test_extreme_temperatures_and_logits"
FAULTS = {
    "OnePercent": (ODDS,),
    "HalfLogits": (PRECISE,),
    "BrainLogits": (PRECISE,),
    "HalfSums": (PRECISE,),
    "OneMore": (REFERENCE, LIMIT),
    "NotTheCrossing": (REFERENCE, LIMIT),
    "MinPOfOne": (REFERENCE, LIMIT),
    "TemperatureLast": (REFERENCE, LIMIT),
    "TopPOfAll": (REFERENCE, LIMIT),
    "TemperatureTimes": (REFERENCE, LIMIT),
    "Epsilon": (NEVER,),
    "LowIsNever": (NEVER,),
    "EndOfTheSum": (NEVER,),
    "NoisyGreedy": (GREEDY,),
    "NotRelative": (EXTREME,),
    "StepTemperature": ("test_a_row_does_not_depend_on_the_rows_beside_it",),
    "RaisesOnNan": ("test_rows_without_a_distribution_leave_the_others_alone",),
    "OwnTensor": (ODDS,),
    "ByRow": ("test_stale_history_and_other_slots_do_not_matter",),
    "ForgetsTopK": (REFERENCE, LIMIT),
    "Scribbles": (LIMIT,),
    "PeakOfSome": (LIMIT,),
}
RIGHT = ("Inverse", "Exponential", "Greedier", "Captured")


def spec(name: str, *features: str) -> Spec:
    features = frozenset(features)
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault", limits={"device": ANY}, features=features)


class Plain(Sampler):
    """Written another way: each row by itself, an inverse of the cumulative sum in float64 from one uniform number.
    Subclasses put one fault into a step of it."""

    reads = DefaultSampler.reads

    def columns(self):
        return {"all": Column((4,), "float64")}

    def bind(self, params, prompt_len):
        return Row({"all": (params.temperature, params.top_k, params.top_p, params.min_p)})

    def draw(self, logits, rows, state, out):
        best = logits.argmax(dim=1)
        u = noise(rows.seed, rows.position, rows.sample, 2**30).double()
        values = state["all"][rows.slots]
        for value in values.unique(dim=0):  # rows of equal parameters together
            index = (values == value).all(dim=1).nonzero().flatten()
            temperature, top_k, top_p, min_p = value.tolist()
            if temperature < 1e-5:
                out.tokens[index] = best[index]
            else:
                p = self.limited(self.softmax(logits[index], temperature), int(top_k), top_p, min_p)
                out.tokens[index] = self.pick(p, u[index])

    def softmax(self, x, temperature):
        x = x.double()
        return ((x - x.amax(dim=1, keepdim=True)) / temperature).softmax(dim=1)

    def limited(self, p, top_k, top_p, min_p):
        p = torch.where(p >= min_p * p.amax(dim=1, keepdim=True), p, 0.0)
        sorted_, order = p.sort(dim=1, descending=True, stable=True)
        if top_k > 0:
            sorted_[:, top_k:] = 0
        total = sorted_.sum(dim=1, keepdim=True)
        sorted_[self.beyond(sorted_.cumsum(dim=1) - sorted_, sorted_, top_p * total)] = 0
        return torch.zeros_like(p).scatter_(1, order, sorted_)

    def beyond(self, before, p, budget):
        return before >= budget

    def pick(self, p, u):
        mass = p.cumsum(dim=1)
        return torch.searchsorted(mass, (u * mass[:, -1])[:, None]).squeeze(1)


class Inverse(Plain):
    """Right."""

    spec = spec("Inverse")


class Exponential(DefaultSampler):
    """Right.  The race of exponential clocks, after the limits of the default sampler."""

    spec = spec("Exponential")

    def draw(self, logits, rows, state, out):
        greedy = logits.argmax(dim=1)
        temperature = state["temperature"][rows.slots]
        x = (logits - logits.amax(dim=1, keepdim=True)).div_(torch.where(temperature > 0, temperature, 1.0)[:, None])
        rows = replace(rows, variant=rows.variant | FULL)
        floor = self._limit(x, rows, state, state["min_p"][rows.slots].log())
        p = self.odds(torch.where(x < floor[:, None], -torch.inf, x))
        lane = torch.arange(p.shape[1], device=p.device)
        u = noise(rows.seed[:, None], rows.position[:, None], rows.sample[:, None], lane)
        out.tokens.copy_(torch.where(temperature > 0, (p / -torch.log1p(-u)).argmax(dim=1), greedy))

    def odds(self, x):
        return x.exp()


class Greedier(DefaultSampler):
    """Right.  It reads only the temperature."""

    spec = spec("Greedier")
    reads = frozenset(("temperature",))

    def bind(self, params, prompt_len):
        values = super().bind(params, prompt_len).values
        return Row({"temperature": values["temperature"]}, 3)


class OnePercent(DefaultSampler):
    """Every fourth token is drawn 1 % too often."""

    spec = spec("OnePercent")

    def draw(self, logits, rows, state, out):
        logits[:, ::4] += 0.01 * (state["temperature"][rows.slots] > 0)[:, None]
        super().draw(logits, rows, state, out)


class HalfLogits(DefaultSampler):
    spec = spec("HalfLogits")

    def draw(self, logits, rows, state, out):
        super().draw(logits.half().float(), rows, state, out)


class BrainLogits(DefaultSampler):
    spec = spec("BrainLogits")

    def draw(self, logits, rows, state, out):
        super().draw(logits.bfloat16().float(), rows, state, out)


class HalfSums(Plain):
    """The cumulative sum in float16."""

    spec = spec("HalfSums")

    def pick(self, p, u):
        mass = p.cumsum(dim=1).half().double()
        return torch.searchsorted(mass, (u * mass[:, -1])[:, None]).squeeze(1)


class OneMore(DefaultSampler):
    """top_k off by one."""

    spec = spec("OneMore")

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        if row.values["top_k"]:
            row.values["top_k"] += 1
        return row


class ForgetsTopK(DefaultSampler):
    """Declares top_k and ignores it."""

    spec = spec("ForgetsTopK")

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        return Row({**row.values, "top_k": 0}, row.variant)


class NotTheCrossing(Plain):
    """top_p keeps only tokens that are wholly below it, and the best token."""

    spec = spec("NotTheCrossing")

    def beyond(self, before, p, budget):
        return (before + p > budget + 1e-9) & (before > 0)


class TopPOfAll(Plain):
    """top_p uses the mass of all tokens, not of the tokens that top-k kept."""

    spec = spec("TopPOfAll")

    def beyond(self, before, p, budget):
        return before >= budget / (p.sum(dim=1, keepdim=True))


class MinPOfOne(Plain):
    """min_p is a probability, not a share of the best one's."""

    spec = spec("MinPOfOne")

    def limited(self, p, top_k, top_p, min_p):
        best = p.amax(dim=1, keepdim=True)
        p = torch.where((p >= min_p) | (p == best), p, 0.0)
        return super().limited(p, top_k, top_p, 0.0)


class TemperatureLast(Plain):
    """The limits see the probabilities at temperature 1."""

    spec = spec("TemperatureLast")

    def softmax(self, x, temperature):
        self.temperature = temperature
        return super().softmax(x, 1.0)

    def limited(self, p, top_k, top_p, min_p):
        p = super().limited(p, top_k, top_p, min_p) ** (1 / self.temperature)
        return p / p.sum(dim=1, keepdim=True)


class TemperatureTimes(Plain):
    """Multiplies by the temperature."""

    spec = spec("TemperatureTimes")

    def softmax(self, x, temperature):
        return super().softmax(x, 1 / temperature)


class Epsilon(Exponential):
    """Adds a little, so that nothing is divided into 0."""

    spec = spec("Epsilon")

    def odds(self, x):
        return x.exp() + 1e-9


class LowIsNever(DefaultSampler):
    """Takes -1e9 for -inf."""

    spec = spec("LowIsNever")

    def draw(self, logits, rows, state, out):
        super().draw(logits.clamp(min=-1e9), rows, state, out)


class EndOfTheSum(Plain):
    """In float32 the largest uniform number times the sum equals the sum, so an index behind the last token is
    drawn.
    """

    spec = spec("EndOfTheSum")

    def pick(self, p, u):
        mass = p.float().cumsum(dim=1)
        at = torch.searchsorted(mass, (u.float() * (1 + 2**-23) * mass[:, -1])[:, None], right=True)
        return at.squeeze(1).clamp(max=p.shape[1] - 1)


class NoisyGreedy(DefaultSampler):
    """temperature=0 is a small temperature."""

    spec = spec("NoisyGreedy")

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        return row if row.values["temperature"] else Row({"temperature": 1e-5}, 2)


class NotRelative(Plain):
    """exp of logits / temperature as they are."""

    spec = spec("NotRelative")

    def softmax(self, x, temperature):
        e = (x / temperature).exp()
        return e / e.sum(dim=1, keepdim=True)

    def pick(self, p, u):
        return super().pick(p.nan_to_num(), u).clamp(max=p.shape[1] - 1)


class StepTemperature(DefaultSampler):
    """Draws the whole step with the mean of its rows' temperatures."""

    spec = spec("StepTemperature")

    def draw(self, logits, rows, state, out):
        values = state["temperature"].clone()
        mine = values[rows.slots]
        values[rows.slots] = torch.where(mine > 0, mine[mine > 0].mean(), 0.0)
        super().draw(logits, rows, {**state, "temperature": values}, out)


class RaisesOnNan(DefaultSampler):
    """As torch.multinomial does."""

    spec = spec("RaisesOnNan")

    def draw(self, logits, rows, state, out):
        if not logits.softmax(dim=1).isfinite().all():
            raise RuntimeError("probability tensor contains either inf, nan or element < 0")
        super().draw(logits, rows, state, out)


class OwnTensor(DefaultSampler):
    """Puts a tensor of its own into ``out``."""

    spec = spec("OwnTensor")

    def draw(self, logits, rows, state, out):
        out.tokens = out.tokens.clone()
        super().draw(logits, rows, state, out)


class ByRow(DefaultSampler):
    """Indexes its columns by row instead of by slot."""

    spec = spec("ByRow")

    def draw(self, logits, rows, state, out):
        super().draw(logits, replace(rows, slots=torch.arange(len(logits), device=logits.device)), state, out)


class Scribbles(DefaultSampler):
    """Declares that the logits are unchanged, but bans tokens in place."""

    spec = spec("Scribbles")

    def draw(self, logits, rows, state, out):
        super().draw(logits, rows, state, out)
        logits.scatter_(1, out.tokens[:, None], -torch.inf)


class PeakOfSome(DefaultSampler):
    """Its peaks omit the first token, whose logit may be the largest, or a NaN."""

    spec = spec("PeakOfSome")

    def draw(self, logits, rows, state, out):
        out.peaks = logits[:, 1:].amax(dim=1, keepdim=True)
        super().draw(logits, rows, state, out)


class Captured(DefaultSampler):
    """Right.  The built-in sampler, which may be captured in a graph."""

    spec = spec("Captured", "graph_safe")
