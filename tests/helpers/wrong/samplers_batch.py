"""Wrong samplers in which the allowed tokens of a row depend on other rows, or on their number."""

from __future__ import annotations

import torch

from minivllm.core.interfaces.sampling import Column, Row, Sampler
from minivllm.device.worker.sampling import gumbel
from minivllm.errors import RequestError
from minivllm.plugins.sampler.default import DefaultSampler
from minivllm.registration.spec import ANY, Spec

SEAM = "sampler"
SUPPORT = "test_what_may_be_drawn_does_not_depend_on_the_batch"
FAULTS = {
    "BestOfTheBatch": (SUPPORT,),
    "SaysTheBestOfTheBatch": (SUPPORT,),
    "MeanOfTheBatch": (SUPPORT,),
    "FewInACrowd": (SUPPORT,),
    "AllForOne": (SUPPORT,),
    "LongestTail": (SUPPORT,),
    "SilentBest": (SUPPORT,),
    "SilentAllForOne": (SUPPORT,),
}
RIGHT = ("TopA",)
OWN = {"params": lambda self, vocab: [{"extra": {"top_a": a}} for a in (0.02, 0.3)],
       "wrong_params": lambda self, vocab: [{"extra": {"top_a": a}} for a in (-1, 2, "a")]}  # fmt: skip
SUITE = dict.fromkeys([*FAULTS, *RIGHT], OWN)  # overrides of a test class


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 1), "for a test of the kit", limits={"device": ANY}, features=frozenset())


class TopA(DefaultSampler):
    """Right.  It keeps tokens of at least a times the square of the largest probability."""

    spec = spec("TopA")
    reads = frozenset({"temperature", "top_a"})

    def columns(self):
        return {"temperature": Column(), "a": Column()}

    def bind(self, params, prompt_len):
        a = params.extra.get("top_a", 0)
        if not isinstance(a, (int, float)) or isinstance(a, bool) or not 0 <= a <= 1:
            raise RequestError(f"top_a={a!r}: expected a number from 0 to 1", "top_a")
        return Row({"temperature": params.temperature if params.temperature >= 1e-5 else 0.0, "a": float(a)})

    def draw(self, logits, rows, state, out):
        best = logits.argmax(dim=1)
        x = self.cut(logits, rows, state)
        x += gumbel(rows.seed, rows.position, rows.sample, x.shape[1])
        out.tokens.copy_(torch.where(state["temperature"][rows.slots] > 0, x.argmax(dim=1), best))

    def drawn_from(self, logits, rows, state):
        return self.cut(logits, rows, state)

    def cut(self, logits, rows, state):
        temperature = state["temperature"][rows.slots]
        x = (logits - logits.amax(dim=1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)[:, None]
        a = torch.where(temperature > 0, state["a"][rows.slots], 0.0)
        return self.limited(x, a)

    def limited(self, x, a):
        highest = torch.softmax(x, dim=1).amax(dim=1)
        return x.masked_fill(x < (a * highest).log()[:, None], float("-inf"))


class BestOfTheBatch(TopA):
    """The largest probability is taken over all rows."""

    spec = spec("BestOfTheBatch")

    def limited(self, x, a):
        highest = torch.softmax(x, dim=1).nan_to_num(0.0).amax()
        return x.masked_fill(x < (a * highest).log()[:, None], float("-inf"))


class SaysTheBestOfTheBatch(BestOfTheBatch):
    """Draws as it should."""

    spec = spec("SaysTheBestOfTheBatch")

    def cut(self, logits, rows, state):
        return TopA.limited(self, *self._parts(logits, rows, state))

    def drawn_from(self, logits, rows, state):
        return self.limited(*self._parts(logits, rows, state))

    def _parts(self, logits, rows, state):
        temperature = state["temperature"][rows.slots]
        x = (logits - logits.amax(dim=1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)[:, None]
        return x, torch.where(temperature > 0, state["a"][rows.slots], 0.0)


class MeanOfTheBatch(TopA):
    """All rows of a step get the mean of their limits."""

    spec = spec("MeanOfTheBatch")

    def limited(self, x, a):
        return super().limited(x, torch.where(a > 0, a[a > 0].mean() if bool((a > 0).any()) else a, a))


class FewInACrowd(TopA):
    """Of more rows than 32 the tail is cut, which saves time."""

    spec = spec("FewInACrowd")

    def limited(self, x, a):
        return super().limited(x, a if len(x) <= 32 else a.clamp(min=0.05))


class AllForOne(TopA):
    """A row that is alone goes another way, which takes the probability itself for its square."""

    spec = spec("AllForOne")

    def limited(self, x, a):
        if len(x) > 1:
            return super().limited(x, a)
        return x.masked_fill(x < a.log()[:, None], float("-inf"))


class LongestTail(TopA):
    """Sorts as many tokens as the row with the fewest has."""

    spec = spec("LongestTail")

    def limited(self, x, a):
        x = super().limited(x, a)
        few = int((x > -torch.inf).sum(dim=1).clamp(min=1).amin())
        return x if len(x) < 3 else x.masked_fill(x < x.topk(min(2 * few + 8, x.shape[1])).values[:, -1:], -torch.inf)


class SilentBest(BestOfTheBatch):
    """Does not declare the distribution from which it draws."""

    spec = spec("SilentBest")
    drawn_from = Sampler.drawn_from


class SilentAllForOne(AllForOne):
    spec = spec("SilentAllForOne")
    drawn_from = Sampler.drawn_from
