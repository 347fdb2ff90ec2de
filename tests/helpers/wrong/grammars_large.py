"""Wrong grammars: vocabularies with tokens of equal bytes, long texts, many of them, threads and matchers that stay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from .grammars import MASK, Base
from .grammars import spec as made

SEAM = "grammar"
LONG = "test_long_texts_and_long_lists_are_held_whole"
KEPT = "test_what_has_ended_leaves_nothing_behind"
FAULTS = {
    "OneTokenForItsBytes": (MASK,),
    "SixtyFourTexts": (LONG,),
    "SixtyFourBytes": (LONG,),
    "KeepsMatchers": (KEPT,),
    "GrammarsForGood": (KEPT,),
    "ThreadsForEachFill": (KEPT,),
}
RIGHT = ("KeepsAHundred",)


def spec(name):
    return replace(made(name), impl=f"{__name__}:{name}")


class OneTokenForItsBytes(Base):
    """Finds tokens in a dictionary by their bytes, so the last of equal ones replaces the others."""

    spec = spec("OneTokenForItsBytes")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.ids = {piece: ids[-1:] for piece, ids in self.ids.items()}


class SixtyFourTexts(Base):
    spec = spec("SixtyFourTexts")

    def compile(self, source):
        found = super().compile(source)
        return replace(found, handle=found.handle[:64])


class SixtyFourBytes(Base):
    spec = spec("SixtyFourBytes")

    def compile(self, source):
        found = super().compile(source)
        return replace(found, handle=tuple(text[:64] for text in found.handle))


class KeepsMatchers(Base):
    """A list of all matchers that it made."""

    spec = spec("KeepsMatchers")

    def start(self, compiled):
        self.made = [*getattr(self, "made", ()), super().start(compiled)]
        return self.made[-1]


class ThreadsForEachFill(Base):
    """A pool of threads for each call, which nobody ends."""

    spec = spec("ThreadsForEachFill")
    pools = ()

    def fill(self, matchers, mask, rows):
        pool = ThreadPoolExecutor(1)
        self.pools = [*self.pools, pool]
        return pool.submit(super().fill, matchers, mask, rows).result()


class KeepsAHundred(Base):
    """Right.  It keeps the allowed tokens for a hundred texts."""

    spec = spec("KeepsAHundred")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.found = {}

    def next(self, texts, text):
        if len(self.found) > 100:
            self.found.clear()
        if (texts, text) not in self.found:
            self.found[texts, text] = super().next(texts, text)
        return self.found[texts, text]


class GrammarsForGood(Base):
    """A cache of all that was compiled."""

    spec = spec("GrammarsForGood")

    def __init__(self, *args):
        super().__init__(*args)
        self.compiled = {}

    def compile(self, source):
        if source not in self.compiled:
            self.compiled[source] = super().compile(source)
        return self.compiled[source]
