"""Wrong policies that show late, or only where views are made when they are read, as the engine makes them."""

from __future__ import annotations

import numpy as np

from minivllm.core.interfaces.scheduler import SchedulerPolicy, StepShape
from minivllm.registration.spec import Spec

SEAM = "scheduler"
LAWFUL = "test_whatever_happens_every_answer_is_lawful_and_every_token_right"
APART = "test_keys_stay_apart_however_large_the_numbers_are"
FAULTS = {
    "SinglePrecision": (APART,),
    "TokensInFloat32": (APART,),
    "KeepsAView": (LAWFUL,),
    "KeepsWhoEnded": (LAWFUL,),
    "NumbersInFloat32": (APART,),
    "TokensInInt32": (APART,),
    "CountsIn16Bits": (APART,),
    "KeepsWhoRuns": (LAWFUL,),
    "KeepsPartOfAView": (LAWFUL,),
}
RIGHT = ("KeepsColumns",)


def spec(name: str, *features: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", features=frozenset(features))


class SinglePrecision(SchedulerPolicy):
    """After some weeks requests of one second are taken for one."""

    spec = spec("SinglePrecision", "starvation_free")

    def key(self, new):
        return new.arrival.astype(np.float32)


class NumbersInFloat32(SchedulerPolicy):
    spec = spec("NumbersInFloat32")

    def key(self, new):
        return new.id.astype(np.float32).astype(np.float64)


class TokensInFloat32(SchedulerPolicy):
    """The account of a tenant stops growing at 16 million tokens."""

    spec = spec("TokensInFloat32")
    number = np.float32

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.got = self.number(0)

    def key(self, new):
        out = []
        with np.errstate(over="ignore"):
            for work in (new.prompt + new.max_out).tolist():
                out.append(float(self.got))
                self.got = self.number(self.got + self.number(work))
        return np.array(out)


class TokensInInt32(TokensInFloat32):
    spec = spec("TokensInInt32", "starvation_free")
    number = np.int32


class CountsIn16Bits(SchedulerPolicy):
    """Numbers the requests, and begins again."""

    spec = spec("CountsIn16Bits", "starvation_free")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.n = 0

    def key(self, new):
        self.n += len(new)
        return np.arange(self.n - len(new), self.n) % 65536


class KeepsAView(SchedulerPolicy):
    """Looks at the queue when somebody must go, as it was when it was last put in order."""

    spec = spec("KeepsAView")
    head = None

    def order(self, head, running, now):
        self.head = head
        return np.arange(len(head))

    def victim(self, candidates, need):
        urgent = self.head is not None and bool((self.head.priority < 0).any())
        return int(np.argmax(candidates.max_out)) if urgent else 0


class KeepsWhoRuns(KeepsAView):
    spec = spec("KeepsWhoRuns")

    def order(self, head, running, now):
        before, self.head = self.head, running
        longest = 0 if before is None or not len(before) else before.known.max()
        return np.argsort(head.prompt > longest, kind="stable")


class KeepsPartOfAView(KeepsAView):
    spec = spec("KeepsPartOfAView")

    def order(self, head, running, now):
        self.head = head.take(np.arange(min(len(head), 3)))
        return np.arange(len(head))


class KeepsWhoEnded(SchedulerPolicy):
    """Counts ended sequences only at the next call of ``shape``."""

    spec = spec("KeepsWhoEnded")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.gone, self.tokens = [], 0

    def ended(self, gone):
        self.gone.append(gone)

    def shape(self, load, now):
        self.tokens += sum(int(view.known.sum()) for view in self.gone)
        self.gone.clear()
        return StepShape()


class KeepsColumns(SchedulerPolicy):
    """Right.  It keeps only the columns that it needs, and assigns tenants to lanes."""

    spec = spec("KeepsColumns", "starvation_free")
    priority = np.zeros(0)

    def lane(self, new):
        return new.tenant % 2

    def order(self, head, running, now):
        self.priority = head.priority
        return np.arange(len(head))

    def ended(self, gone):
        self.last = gone.known

    def victim(self, candidates, need):
        return int(np.argmax(candidates.max_out)) if (self.priority < 0).any() else 0
