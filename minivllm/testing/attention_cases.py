"""What an attention back end's claims leave to try: settings inside its limits, and steps of any mix of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest
import torch
from hypothesis import strategies as st

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.kvformat import KVFormat
from minivllm.registration.spec import ANY, PluginQuery, Spec

from .attention_world import Rows, Setting, World, WorldSeq
from .base import Subject

CANDIDATES = {  # the plain ones first
    "dtype": ("float32", "bfloat16", "float16"),
    "block": (4, 16, 8, 1, 32, 64, 128, 256),
    "queries_per_kv": (2, 1, 3, 4, 5, 6, 7, 8, 16),
    "dim_qk": (32, 16, 64, 8, 24, 80, 96, 128, 192, 256, 576),
    "dim_v": (32, 16, 64, 8, 24, 80, 96, 128, 192, 256, 512),
}


class SpaceSuite(Protocol):
    """What a space of settings needs of its suite: the claims of the plug-in, and the KV formats."""

    @property
    def spec(self) -> Spec: ...
    @property
    def subject(self) -> Subject: ...
    @property
    def long(self) -> bool: ...

    def place(self) -> str: ...
    def values(self, fact: str, *candidates: Any) -> list[Any]: ...
    def claims(self, feature: str) -> bool: ...
    def formats(self) -> Sequence[str]: ...
    def format(self, name: str) -> KVFormat: ...
    def format_serves(self, name: str, dtype: str) -> bool: ...


def _device(suite: SpaceSuite) -> str:
    """Return the claimed device; a CPU with the interpreter stands for the GPU that a Triton kernel claims."""
    asked = suite.place().partition(":")[0]
    return next(iter(suite.values("device", asked, "cuda", "cpu")), asked)


def request(suite: SpaceSuite, setting: Setting) -> PluginQuery:
    """Return the engine's query for a back end for these layers."""
    specs = setting.specs
    facts: dict[str, Any] = {
        "device": _device(suite),
        "dtype": setting.dtype,
        "kv_format": setting.kv_format,
        "block": setting.block,
        "dim_qk": frozenset(s.dim_qk for s in specs),
        "dim_v": frozenset(s.dim_v for s in specs),
        "queries_per_kv": frozenset(s.heads // s.kv_heads for s in specs),
    }
    if suite.place().startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(suite.place())
        facts["sm"] = 10 * major + minor
    wanted = {
        "window": any(s.window is not None for s in specs),
        "softcap": any(s.softcap is not None for s in specs),
        "sinks": any(s.sinks for s in specs),
        "alibi": any(s.alibi is not None for s in specs),
        "v_in_k": any(s.v_in_k for s in specs),
    }
    return PluginQuery(facts, frozenset(name for name, on in wanted.items() if on))


class Space:
    """The settings that a suite's plug-in claims."""

    def __init__(self, suite: SpaceSuite) -> None:
        self.suite = suite
        self.facts = {fact: self._values(fact, values) for fact, values in CANDIDATES.items()}
        self.facts["kv_format"] = suite.values("kv_format", *suite.formats())
        self.stores = {name: suite.format(name).dtype for name in self.facts["kv_format"]}
        empty = [fact for fact, values in self.facts.items() if not values]
        if empty:
            pytest.skip(f"claims no {' and no '.join(empty)} that is known here")
        self.spec, self.kind = replace(suite.spec, needs=()), suite.subject.kind

    def _values(self, fact: str, candidates: Sequence[Any]) -> list[Any]:
        """The claimed ones of the candidates, and the edges of a limit or all of a set where they are numbers.  On a
        GPU only the edges of a set, unless the profile is long: a kernel is compiled for each size."""
        limit = ANY if self.suite.spec.limits == ANY else self.suite.spec.limits.get(fact, frozenset())
        more = limit if isinstance(limit, Set) else [getattr(limit, edge, None) for edge in ("least", "most", "step")]
        more = sorted(n for n in more if isinstance(n, int) and 0 < n <= 1024)
        if self.suite.place().startswith("cuda") and not self.suite.long:
            more = [*more[:1], *more[-1:]]
        return list(dict.fromkeys(self.suite.values(fact, *candidates, *more)))

    def serves(self, setting: Setting) -> bool:
        fits = all(s.dim_v <= s.dim_qk for s in setting.specs if s.v_in_k)
        known = self.suite.format_serves(setting.kv_format, setting.dtype)
        return fits and known and not self.spec.refuse(request(self.suite, setting), self.kind)

    def plain(self, kv_heads: int = 2, **wanted: Any) -> Setting | None:
        """The plainest setting with one layer that is as wanted: facts, or fields of its AttnSpec; None if none is
        claimed.  Where the dimensions are left open they are equal if that is claimed."""
        dtypes, *facts, formats = [
            [wanted.pop(fact)] if fact in wanted else values for fact, values in self.facts.items()
        ]
        found = None
        for dtype, block, ratio, dim_qk, dim_v in itertools.product(dtypes, *facts):
            spec = AttnSpec(kv_heads * ratio, kv_heads, dim_qk, dim_v, **wanted)
            if found is None or dim_qk == dim_v:
                for kv_format in sorted(formats, key=lambda name: self.stores[name] != dtype):  # its own format first
                    if self.serves(setting := Setting((spec,), dtype, kv_format, block)):
                        if dim_qk == dim_v:
                            return setting
                        found = found or setting
        return found

    def features(self) -> dict[str, Sequence[Any]]:
        """Fields of AttnSpec that may be varied, each with values; what is not claimed keeps its default."""
        values = {"window": (None, 1, 2, 3, 5, 17, 1000), "sinks": (False, True), "softcap": (None, 1.5, 30.0)}
        return {"scale": (None, None, 0.05, 0.9), **{k: v for k, v in values.items() if self.suite.claims(k)}}

    def settings(self) -> st.SearchStrategy[Setting]:
        """Any setting of one or two layers; the second shares the first's KV group or has one of its own."""
        facts = {fact: st.sampled_from(values) for fact, values in self.facts.items()}
        features = {name: st.sampled_from(values) for name, values in self.features().items()}
        equal = st.booleans()  # dim_v == dim_qk
        in_k = st.booleans() if self.suite.claims("v_in_k") else st.just(False)

        @st.composite
        def any_setting(draw: Any) -> Setting:
            f = {fact: draw(values) for fact, values in facts.items()}
            dim_v = f["dim_qk"] if draw(equal) else f["dim_v"]
            kv_heads = draw(st.sampled_from((1, 2, 2, 3)))
            more = {name: draw(values) for name, values in features.items()}
            first = AttnSpec(kv_heads * f["queries_per_kv"], kv_heads, f["dim_qk"], dim_v, draw(in_k), **more)
            specs = [first]
            if draw(st.booleans()):
                more = {name: draw(values) for name, values in features.items()}
                if draw(st.booleans()):
                    specs.append(replace(first, **{**more, "window": first.window}))
                else:
                    ratio = draw(facts["queries_per_kv"])
                    specs.append(replace(first, heads=ratio * (kv_heads + 1), kv_heads=kv_heads + 1, **more))
            return Setting(tuple(specs), f["dtype"], f["kv_format"], f["block"])

        return any_setting().filter(self.serves)

    def each(self, fact: str, **wanted: Any) -> Iterator[tuple[Any, Setting]]:
        """The plainest setting for each claimed value of a fact; skips the test if there is none."""
        found = [(value, self.plain(**{fact: value}, **wanted)) for value in self.facts[fact]]
        if not any(setting for _, setting in found):
            pytest.skip(f"no setting with any {fact}" + (f" and {wanted}" if wanted else "") + " is claimed")
        yield from ((value, setting) for value, setting in found if setting is not None)


def room(setting: Setting) -> int:
    """Tokens that a sequence may have in a test that is repeated often: enough for some blocks, if they are not too
    much work."""
    work = max(s.heads * (s.dim_qk + s.dim_v) for s in setting.specs)
    return max(20, min(320, 400_000 // work, 5 * setting.block + 40))


@dataclass(frozen=True)
class RowLife:
    """A sequence of a test: tokens in the cache at first, and how many it brings in each step (0: it is not in it)."""

    past: int
    news: tuple[int, ...]
    shares: bool = False  # the start of the first sequence
    ended: bool = False
    null: bool = False


@st.composite
def lives(draw: Any, block: int, most: int) -> tuple[RowLife, ...]:
    """One to five sequences through one to three steps, none of them empty; at most ``most`` tokens each."""
    steps = draw(st.integers(1, 3))
    sharing = 2 if 3 * block < most else int(block + 40 < most)  # blocks that may be shared, if there is room behind
    common = draw(st.integers(0, sharing)) * block if sharing else 0  # tokens of a prefix that some share
    edge = st.builds(lambda n, d: n * block + d, st.integers(1, 4), st.sampled_from((-1, 0, 1)))
    many = st.one_of(st.integers(2, 9), edge, st.integers(2, most // 3))
    past = st.one_of(st.integers(1, 5), edge, edge, st.integers(1, most // 2))
    out = []
    for i in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(("live", "live", "live", "ended", "null"))) if i else "live"
        shares = draw(st.booleans())
        start = 0 if draw(st.integers(0, 2)) == 0 else draw(past)
        left, news = most, []
        start = min(max(start, common if shares or not i else 0), left - steps)
        left -= start
        for step in range(steps):
            how = draw(st.sampled_from(("one", "many", "many" if not start and not step else "none")))
            new = {"one": 1, "none": 0}.get(how)
            new = max(draw(many) if new is None else new, int(not i))  # the first sequence is in every step
            news.append(min(new, left - (steps - 1 - step)))
            left -= news[-1]
        out.append(RowLife(start, tuple(news), shares, kind == "ended", kind == "null"))
    return tuple(out)


def settle(world: World, plan: Sequence[RowLife]) -> list[WorldSeq]:
    """Bring the sequences of a plan into a world."""
    seqs: list[WorldSeq] = []
    for life in plan:
        like = seqs[0] if life.shares and seqs else None
        seqs.append(world.add_null() if life.null else world.add(life.past, like, life.ended))
    return seqs


def rows_of(plan: Sequence[RowLife], seqs: Sequence[WorldSeq], step: int) -> Rows:
    """The rows of a step, in a changed order."""
    rows = [(seq, life.news[step]) for seq, life in zip(seqs, plan, strict=True) if life.news[step]]
    return rows[::-1] if step % 2 else rows


def seen_in(rows: Rows, plan: Sequence[RowLife], block: int) -> Iterator[str]:
    """What a step is a case of."""
    live = [(seq, new) for seq, new in rows if seq.live]
    if any(new == 1 for _, new in live) and any(new > 1 for _, new in live):
        yield "mixed"
    for seq, new in live:
        end = seq.length + new
        yield "decode" if new == 1 else "chunk" if seq.length else "prompt"
        if seq.length and seq.length % block:
            yield "mid-block"
        if end % block in (0, 1 % block):
            yield "border"
    shared = [life for life in plan[1:] if life.shares and not life.null]
    if any(min(life.past, plan[0].past) >= block for life in shared):
        yield "shared"
    if len(live) < len(rows):
        yield "padded"
