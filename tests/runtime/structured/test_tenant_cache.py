"""Caches of texts and grammars are separate for each key and salt, within common bounds and a bound for each."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.core.interfaces.executor import Part
from minivllm.core.interfaces.grammar import Compiled, GrammarContext, GrammarSource
from minivllm.core.interfaces.structured import StructuredOutputsParams
from minivllm.errors import RequestError
from minivllm.runtime.structured.helpers import Helpers
from minivllm.runtime.structured.service import Grammars
from minivllm.runtime.tenant_cache import TenantCache

A, B = ("a", ""), ("b", "")
sizes = st.integers(0, 12)
steps = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "s"]), st.integers(0, 9), sizes), max_size=80)


@given(st.integers(0, 60), steps)
def test_bytes_are_those_of_what_is_kept_and_nobody_below_an_even_share_loses_anything(capacity, requested):
    cache: TenantCache[object] = TenantCache(capacity)
    put = {}
    for tenant, inner, key, size in requested:
        before = dict(cache._sizes)
        value = object()
        cache.put((tenant, inner), key, value, size)
        if size <= capacity:
            put[tenant, inner, key] = value
        kept = {(t, *key): entry for t, entries in cache._kept.items() for key, entry in entries.items()}
        assert cache.bytes == sum(n for _, n in kept.values()) == sum(cache._sizes.values()) <= capacity
        assert len(cache) == len(kept) and all(put[place] is value for place, (value, _) in kept.items())
        for other, had in before.items():
            if other != tenant and had <= capacity // 3:
                assert cache._sizes.get(other, 0) == had
    for (tenant, inner, key), (value, _) in {
        (t, *k): e for t, es in cache._kept.items() for k, e in es.items()
    }.items():
        assert cache.get((tenant, inner), key) is value


def test_the_least_recently_used_goes_and_what_is_larger_than_all_room_makes_none():
    cache: TenantCache[int] = TenantCache(30)
    for key in range(3):
        cache.put(A, key, key, 10)
    assert cache.get(A, 0) == 0
    cache.put(A, 3, 3, 10)
    assert [cache.get(A, key) for key in range(4)] == [0, None, 2, 3]
    cache.put(A, 4, 4, 31)
    assert [cache.get(A, key) for key in range(5)] == [0, None, 2, 3, None] and cache.bytes == 30
    cache.put(A, 0, 5, 20)
    assert cache.get(A, 0) == 5 and cache.bytes == 30


def test_one_who_floods_evicts_itself_and_salts_of_one_tenant_share_its_part():
    cache: TenantCache[int] = TenantCache(1000)
    for key in range(40):
        cache.put(A, key, key, 10)
    for number in range(5000):
        cache.put(("b", str(number)), number % 7, number, 1 + number % 90)
    assert [cache.get(A, key) for key in range(40)] == list(range(40)) and cache.bytes <= 1000
    for number in range(5000):  # many others: each gets its share, and nobody less
        cache.put((f"t{number % 3}", ""), number, number, 10)
    assert sum(cache.get(A, key) is not None for key in range(40)) >= 19  # of 1000 bytes, a fifth, less an entry


def test_equal_keys_of_others_are_not_found():
    cache: TenantCache[int] = TenantCache(100)
    cache.put(("a", "bc"), "k", 1, 1)
    for salt in (("ab", "c"), ("a", ""), ("", "abc"), ("a", "b"), ("bc", "a")):
        assert cache.get(salt, "k") is None


# ---- grammars --------------------------------------------------------------------------------------------------------


class Counting:
    """A helper and a plug-in that count their calls."""

    def __init__(self):
        self.requested = []

    def start(self):
        pass

    close = start

    def check(self, source):
        self.requested.append(source.text)
        if source.text.startswith("bad"):
            raise ValueError("no")

    def compile(self, source):
        return Compiled(object(), 100)


@pytest.fixture
def grammars():
    made = Grammars(Part("test/fake", "x:Y"), lambda: GrammarContext((b"a", b""), 2, (1,)), 1.0, 64, 1000)
    made.helpers = Helpers(Counting, 1)
    made.__dict__.update(plugin=Counting())
    return made


def ask(grammars, text, salt):
    try:
        return grammars.compile(StructuredOutputsParams(regex=text), salt)
    except RequestError:
        return None


@pytest.mark.parametrize("text", ["a+", "bad+"])
def test_a_grammar_costs_each_key_and_salt_the_same_work_whoever_has_sent_it_before(grammars, text):
    found = set()
    for number, salt in enumerate([A, B, ("a", "s"), ("", "")], 1):
        for _ in range(3):
            made = ask(grammars, text, salt)
            assert len(grammars.helpers.made[0].requested) == number, "once for each salt: made anew, or refused anew"
        found.add(made)
    assert len(found) == (4 if text == "a+" else 1)


def test_a_key_that_floods_leaves_another_its_grammars_and_its_refusals(grammars):
    for text in ("a", "bad", "b"):
        ask(grammars, text, A)
    for number in range(300):
        ask(grammars, f"x{number}", B)
        ask(grammars, "bad" + "y" * 9000 + str(number), B)
    before = len(grammars.helpers.made[0].requested)
    for text in ("a", "bad", "b"):
        ask(grammars, text, A)
    assert len(grammars.helpers.made[0].requested) == before
    assert grammars.bytes <= 1000 and grammars._refused.bytes <= 1 << 20


def test_a_plug_in_that_does_not_say_how_much_memory_it_takes_is_bounded_by_the_texts(grammars):
    grammars.plugin.compile = lambda source: Compiled(object(), 0)
    for number in range(300):
        ask(grammars, f"{number:0100d}", A)
    assert len(grammars._kept) <= 10


@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
def test_a_grammar_takes_a_library_the_same_work_after_others_have_sent_its_parts(library):
    """Classes of characters are the costly part, and the result for one of them is not kept for the next grammar."""
    pytest.importorskip(library)
    from json_helpers import BYTES

    from minivllm.plugins.grammar import code_points, ecma_regex
    from minivllm.registry import build_part

    target = {"llguidance": "llguidance_plugin:LLGuidance", "xgrammar": "xgrammar_plugin:XGrammar"}[library]
    code_points.tables.cache_clear()
    made = build_part("grammar", Part(library, f"minivllm.plugins.grammar.{target}"), BYTES)
    assert code_points.tables.cache_info().currsize == 1, "before the first grammar comes"
    written = []
    plain = ecma_regex._write_set
    ecma_regex._write_set = lambda ranges: written.append(ranges) or plain(ranges)
    try:
        for _ in range(2):
            made.compile(GrammarSource("regex", r"[a-f\p{Lu}]x[a-f\p{Lu}]\d"))
    finally:
        ecma_regex._write_set = plain
    half = len(written) // 2
    assert written[:half] == written[half:] and len(set(written)) == half == 3
    assert code_points.tables.cache_info().misses == 1


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("fastapi")
    from http_helpers import Running

    running = Running(keys=["one", "two"])
    yield running
    running.close()


class Spy:
    """Records each lookup in a cache as (salt, whether it was found)."""

    def __init__(self, cache):
        self.cache, self.get, self.seen = cache, cache.get, []

    def __enter__(self):
        self.cache.get = self._look
        return self

    def __exit__(self, *error):
        self.cache.get = self.get

    def _look(self, salt, key):
        found = self.get(salt, key)
        self.seen.append((salt, found is not None))
        return found


def bodies(more):
    text = "".join(random.Random(time.time_ns()).choices("abcdefgh ", k=60))
    chat = {"messages": [{"role": "user", "content": text}], **more}
    short = {"max_tokens": 1}
    return {
        "/v1/completions": {"prompt": text, **short, **more},
        "/v1/chat/completions": {**chat, **short},
        "/tokenize": {"prompt": text + "!"},
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_ids_of_a_text_are_kept_for_the_key_and_the_salt_that_asked(server, path):
    body = bodies({})[path]
    salts = [{}] if path == "/tokenize" else [{}, {"cache_salt": "s"}, {"cache_salt": "t"}]
    with Spy(server.app.service.tokens._kept) as spy:
        for number, key in enumerate(("one", "two")):
            for more in salts:
                spy.seen.clear()
                for _ in range(2):
                    answer = server.post(path, {**body, **more}, headers={"Authorization": f"Bearer {key}"})
                    assert answer.status_code == 200
                salt = (f"key-{number}", more.get("cache_salt", ""))
                assert {s for s, _ in spy.seen} == {salt}
                half = len(spy.seen) // 2
                assert not spy.seen[half - 1][1], "another has asked for it, which is to make no difference"
                assert all(found for _, found in spy.seen[half:])


def test_grammars_of_requests_are_kept_for_the_key_and_the_salt_that_asked(server):
    engine = server.app.service.client._engine
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "ab?c"}}
    with Spy(engine.grammars._kept) as spy:
        for number, key in enumerate(("one", "two")):
            for more in ({}, {"cache_salt": "s"}):
                spy.seen.clear()
                for _ in range(2):
                    answer = server.post(
                        "/v1/completions", {**body, **more}, headers={"Authorization": f"Bearer {key}"}
                    )
                    assert answer.status_code == 200, answer.text
                salt = (f"key-{number}", more.get("cache_salt", ""))
                assert {s for s, _ in spy.seen} == {salt}
                assert not spy.seen[0][1] and spy.seen[-1][1]
