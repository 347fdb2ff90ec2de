"""Draw test cases for an attention back end: settings within the limits of its spec, and steps of any mix of rows."""

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

CANDIDATES = {  # values to try for each fact of an engine's configuration, the plainest first
    "dtype": ("float32", "bfloat16", "float16"),
    "block": (4, 16, 8, 1, 32, 64, 128, 256),
    "queries_per_kv": (2, 1, 3, 4, 5, 6, 7, 8, 16),
    "dim_qk": (32, 16, 64, 8, 24, 80, 96, 128, 192, 256, 576),
    "dim_v": (32, 16, 64, 8, 24, 80, 96, 128, 192, 256, 512),
}


class SpaceSuite(Protocol):
    """The attributes of a conformance suite that ``Space`` uses: the claims of the plug-in, and the KV formats."""

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
    """Return a device that the plug-in claims, preferably the device of the test.

    A back end that claims only a GPU can be tested on a CPU: there Triton's interpreter runs its kernels.
    """
    wanted = suite.place().partition(":")[0]
    claimed = suite.values("device", wanted, "cuda", "cpu")
    return claimed[0] if claimed else wanted


def request(suite: SpaceSuite, setting: Setting) -> PluginQuery:
    """Return the engine's query for an attention back end that fits a setting."""
    specs = setting.specs
    dim_qk = frozenset(spec.dim_qk for spec in specs)
    dim_v = frozenset(spec.dim_v for spec in specs)
    queries_per_kv = frozenset(spec.heads // spec.kv_heads for spec in specs)
    device = _device(suite)
    dtype = setting.dtype
    kv_format = setting.kv_format
    block = setting.block
    facts: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "kv_format": kv_format,
        "block": block,
        "dim_qk": dim_qk,
        "dim_v": dim_v,
        "queries_per_kv": queries_per_kv,
    }
    if suite.place().startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(suite.place())
        facts["sm"] = 10 * major + minor
    features: set[str] = set()
    for spec in specs:
        features |= _features_of(spec)
    return PluginQuery(facts, frozenset(features))


def _features_of(spec: AttnSpec) -> set[str]:
    """Return the names of the features that a layer uses."""
    used = {name for name in ("window", "softcap", "alibi") if getattr(spec, name) is not None}
    if spec.sinks:
        used.add("sinks")
    if spec.v_in_k:
        used.add("v_in_k")
    return used


class Space:
    """All settings (model, KV format and block size) that the plug-in of a suite claims to serve."""

    def __init__(self, suite: SpaceSuite) -> None:
        self.suite = suite
        self.facts = {fact: self._values(fact, values) for fact, values in CANDIDATES.items()}
        self.facts["kv_format"] = suite.values("kv_format", *suite.formats())
        self.stores = {name: suite.format(name).dtype for name in self.facts["kv_format"]}
        empty = [fact for fact, values in self.facts.items() if not values]
        if empty:
            pytest.skip(f"claims no {' and no '.join(empty)} that is known here")
        self.spec = replace(suite.spec, needs=())
        self.kind = suite.subject.kind

    def _values(self, fact: str, candidates: Sequence[Any]) -> list[Any]:
        """Return the values of a fact to test, which are the claimed candidates and the numbers at the limits of the
        spec.

        If the limit is a range, its edges are tested, and if it is a set, all elements.  On a GPU only the least and
        the greatest number are tested, unless the profile is long, because a kernel is compiled for each size.
        """
        if self.suite.spec.limits == ANY:
            limit = ANY
        else:
            limit = self.suite.spec.limits.get(fact, frozenset())
        if isinstance(limit, Set):
            named = limit
        else:
            named = [getattr(limit, edge, None) for edge in ("least", "most", "step")]
        numbers = [n for n in named if isinstance(n, int) and 0 < n <= 1024]
        numbers.sort()
        if self.suite.place().startswith("cuda") and not self.suite.long:
            numbers = [*numbers[:1], *numbers[-1:]]
        listed = self.suite.values(fact, *candidates, *numbers)
        return list(dict.fromkeys(listed))

    def serves(self, setting: Setting) -> bool:
        """Return whether the plug-in claims to serve a setting."""
        for spec in setting.specs:
            if spec.v_in_k and spec.dim_v > spec.dim_qk:
                return False
        if not self.suite.format_serves(setting.kv_format, setting.dtype):
            return False
        query = request(self.suite, setting)
        return not self.spec.refuse(query, self.kind)

    def plain(self, kv_heads: int = 2, **fixed: Any) -> Setting | None:
        """Return the plainest claimed setting of one layer, or None.

        ``fixed`` has facts, or fields of the layer's AttnSpec, that the setting must have.  dim_qk and dim_v are equal
        if such a setting is claimed.
        """
        choices = []
        for fact, values in self.facts.items():
            fixed_value = [fixed.pop(fact)] if fact in fixed else values
            choices.append(fixed_value)
        *facts, formats = choices
        found = None
        for dtype, block, ratio, dim_qk, dim_v in itertools.product(*facts):
            equal = dim_qk == dim_v
            if found is not None and not equal:
                continue
            spec = AttnSpec(kv_heads * ratio, kv_heads, dim_qk, dim_v, **fixed)
            served = self._with_a_format(spec, dtype, block, formats)
            if equal and served is not None:
                return served
            found = found or served
        return found

    def _with_a_format(self, spec: AttnSpec, dtype: str, block: int, formats: Sequence[str]) -> Setting | None:
        """Return a claimed setting of one layer, preferably with a KV format that keeps all bits; None if there is
        none."""
        lossless_first = sorted(formats, key=lambda name: self.stores[name] != dtype)
        for kv_format in lossless_first:
            setting = Setting((spec,), dtype, kv_format, block)
            if self.serves(setting):
                return setting
        return None

    def features(self) -> dict[str, Sequence[Any]]:
        """Return values to draw for fields of AttnSpec: the scale, and the features that the plug-in claims."""
        values: dict[str, Sequence[Any]] = {"scale": (None, None, 0.05, 0.9)}
        if self.suite.claims("window"):
            values["window"] = (None, 1, 2, 3, 5, 17, 1000)
        if self.suite.claims("sinks"):
            values["sinks"] = (False, True)
        if self.suite.claims("softcap"):
            values["softcap"] = (None, 1.5, 30.0)
        return values

    def settings(self) -> st.SearchStrategy[Setting]:
        """Return a hypothesis strategy for claimed settings of one or two layers.

        The second layer shares the KV group of the first layer or has its own group.
        """
        facts = {fact: st.sampled_from(values) for fact, values in self.facts.items()}
        features = {}
        for name, values in self.features().items():
            features[name] = st.sampled_from(values)
        if self.suite.claims("v_in_k"):
            v_in_k = st.booleans()
        else:
            v_in_k = st.just(False)

        @st.composite
        def any_setting(draw: Any) -> Setting:
            fact = {name: draw(values) for name, values in facts.items()}
            dim_qk = fact["dim_qk"]
            equal_dims = draw(st.booleans())
            dim_v = dim_qk if equal_dims else fact["dim_v"]
            kv_heads = draw(st.sampled_from((1, 2, 2, 3)))
            fields = {name: draw(values) for name, values in features.items()}
            heads = kv_heads * fact["queries_per_kv"]
            first = AttnSpec(heads, kv_heads, dim_qk, dim_v, draw(v_in_k), **fields)
            specs = [first]
            if draw(st.booleans()):
                fields = {name: draw(values) for name, values in features.items()}
                same_group = draw(st.booleans())
                if same_group:
                    fields["window"] = first.window
                else:
                    more = kv_heads + 1
                    fields["kv_heads"] = more
                    fields["heads"] = more * draw(facts["queries_per_kv"])
                second = replace(first, **fields)
                specs.append(second)
            return Setting(tuple(specs), fact["dtype"], fact["kv_format"], fact["block"])

        return any_setting().filter(self.serves)

    def each(self, fact: str, **fixed: Any) -> Iterator[tuple[Any, Setting]]:
        """Yield (value, setting) for each claimed value of a fact, with the plainest setting that has the value.

        ``fixed`` has other facts or AttnSpec fields that the settings must have.  Skip the test if no setting is
        claimed.
        """
        claimed = []
        for value in self.facts[fact]:
            setting = self.plain(**{fact: value}, **fixed)
            if setting is not None:
                claimed.append((value, setting))
        if not claimed:
            more = f" and {fixed}" if fixed else ""
            pytest.skip(f"no setting with any {fact}{more} is claimed")
        yield from claimed


def room(setting: Setting) -> int:
    """Return the largest number of tokens of a sequence in tests that run often.

    It is enough for some blocks, unless attention over them is too much work.
    """
    work = max(spec.heads * (spec.dim_qk + spec.dim_v) for spec in setting.specs)
    affordable = 400_000 // work
    some_blocks = 5 * setting.block + 40
    return max(20, min(320, affordable, some_blocks))


@dataclass(frozen=True)
class RowLife:
    """The plan of one sequence in a test: its cached tokens, and its new tokens in each step."""

    past: int  # tokens in the cache before the first step
    news: tuple[int, ...]  # new tokens in each step; 0 means that the sequence is not in the step
    shares: bool = False  # the sequence shares blocks with the start of the first sequence
    ended: bool = False
    null: bool = False


@st.composite
def lives(draw: Any, block: int, most: int) -> tuple[RowLife, ...]:
    """Draw the plans of one to five sequences through one to three steps.

    No step is empty.  A sequence has at most ``most`` tokens.  ``block`` is the number of tokens of a block.
    """
    steps = draw(st.integers(1, 3))
    # number of full blocks that sequences may share at their start and still have room for tokens of their own
    shareable = int(block + 40 < most)
    if 3 * block < most:
        shareable = 2
    if shareable:
        common = draw(st.integers(0, shareable)) * block
    else:
        common = 0
    shift = st.sampled_from((-1, 0, 1))
    edge = st.builds(lambda n, d: n * block + d, st.integers(1, 4), shift)
    long = st.integers(2, most // 3)
    many = st.one_of(st.integers(2, 9), edge, long)
    longest = st.integers(1, most // 2)
    past = st.one_of(st.integers(1, 5), edge, edge, longest)
    plans = []
    for i in range(draw(st.integers(1, 5))):
        is_first = i == 0
        if is_first:
            kind = "live"
        else:
            kind = draw(st.sampled_from(("live", "live", "live", "ended", "null")))
        shares = draw(st.booleans())
        if draw(st.integers(0, 2)) == 0:
            start = 0
        else:
            start = draw(past)
        if shares or is_first:
            start = max(start, common)
        start = min(start, most - steps)
        room_left = most - start
        news = []
        for step in range(steps):
            is_prompt = start == 0 and step == 0
            choice = draw(st.sampled_from(("one", "many", "many" if is_prompt else "none")))
            if choice == "many":
                new = draw(many)
            else:
                new = int(choice == "one")
            if is_first:
                new = max(new, 1)  # no step may be empty
            news.append(min(new, room_left - (steps - 1 - step)))
            room_left -= news[-1]
        plan = RowLife(start, tuple(news), shares, kind == "ended", kind == "null")
        plans.append(plan)
    return tuple(plans)


def settle(world: World, plan: Sequence[RowLife]) -> list[WorldSeq]:
    """Create the sequences of a plan in a test cache, and return them."""
    seqs: list[WorldSeq] = []
    for life in plan:
        if life.null:
            seqs.append(world.add_null())
            continue
        like = seqs[0] if life.shares and seqs else None
        seqs.append(world.add(life.past, like, life.ended))
    return seqs


def rows_of(plan: Sequence[RowLife], seqs: Sequence[WorldSeq], step: int) -> Rows:
    """Return (sequence, new tokens) of each row of step number ``step``, in reverse order if that is odd."""
    rows = []
    for seq, life in zip(seqs, plan, strict=True):
        new = life.news[step]
        if new:
            rows.append((seq, new))
    if step % 2:
        rows.reverse()
    return rows


def seen_in(rows: Rows, plan: Sequence[RowLife], block: int) -> Iterator[str]:
    """Yield the name of each difficult case that a step contains, such as "border", to be counted in ``Seen``."""
    live = [(seq, new) for seq, new in rows if seq.live]
    single = {new == 1 for _, new in live}
    if len(single) == 2:
        yield "mixed"
    for seq, new in live:
        end = seq.length + new
        if new == 1:
            yield "decode"
        elif seq.length:
            yield "chunk"
        else:
            yield "prompt"
        if seq.length % block:
            yield "mid-block"
        if end % block in (0, 1 % block):
            yield "border"
    for life in plan[1:]:
        common = min(life.past, plan[0].past)
        if life.shares and not life.null and common >= block:
            yield "shared"
            break
    if len(live) < len(rows):
        yield "padded"
