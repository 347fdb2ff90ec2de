"""Tails of ended sequences, which a full cache keeps only if later prompts continue them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.engine.tail_use import LEARNED, LEAST, TRIED, WINDOW, TailUse
from minivllm.testing.sim import answer, outputs, request, run, sim_engine


def served(continues: bool, blocks: int = 20):
    """Serve requests that need all blocks.  ``continues`` sends the next turn of each request."""
    engine = sim_engine(block=4, blocks=blocks, slots=2)
    for n in range(150):
        first = request(engine, f"a{n}", [n % 40, *range(5)], max_tokens=5, ignore_eos=True)
        run(engine)
        if continues:
            again = [*first.answer[0].tokens.tolist(), 7]
            request(engine, f"b{n}", again, max_tokens=3, ignore_eos=True)
            run(engine)
        assert outputs(first) == [answer(first.prompt, first.params)]
    return engine.cache


def test_tails_that_nobody_continues_are_not_kept_in_a_full_cache():
    assert served(continues=False).tails.skipped > 50


def test_tails_that_are_continued_are_kept():
    cache = served(continues=True)
    assert cache.tails.skipped == 0 and cache.copied >= 300


def test_a_cache_with_free_blocks_keeps_every_tail():
    assert served(continues=False, blocks=4000).tails.skipped == 0


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=400), many=st.integers(0, 2000))
def test_tails_are_judged_by_their_recent_use_and_tried_again(steps, many):
    use = TailUse()
    for _ in range(many):
        if use.pays(full=True):
            use.cached()
    assert use.kept < WINDOW
    refused = 0
    for full, continued in steps:
        rare = use.kept >= LEARNED and use.used < LEAST * use.kept
        if use.pays(full):
            refused = 0
            use.cached()
        else:
            assert full and rare
            refused += 1
        assert refused < TRIED, "one of TRIED tails is kept whatever was learned"
        if continued:
            use.copied()
