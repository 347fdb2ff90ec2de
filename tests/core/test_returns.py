"""Return values of plug-ins and of a request's functions.

A wrong value fails only its own request, with the name of the plug-in.  It is never cut, rounded or clamped to fit.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from callback_helpers import NAN, PROMPTS, SMALL, Odd

from minivllm import LLM, EngineDeadError, RequestError, SamplingParams
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.grammar import GrammarSource
from minivllm.core.interfaces.plan import LogProbs
from minivllm.core.interfaces.sampling import Column, Row
from minivllm.runtime.structured.helpers import Helpers
from minivllm.runtime.structured.service import Grammars
from minivllm.testing.faulty import TARGETS as FAULTY
from minivllm.testing.sim import VOCAB, answer, at_rest, outputs, request, run, sim_engine
from minivllm.testing.tiny import tiny_dir

WIDE = 131


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_dir(folder, "qwen3", vocab_size=WIDE)
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, graph="off", **SMALL) as llm:  # the tests replace plug-ins of this engine
        llm.want = [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)]
        yield llm


def plain(**more):
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **more)


# ---- functions of a request ------------------------------------------------------------------------------------------

WRONG_TOKENS = [
    None, 1.0, 2.5, NAN, float("inf"), True, "5", -1, WIDE, 2**70, [5], np.array([1, 2]), np.float64(3), Odd(), (), {},
    torch.tensor(1.5), torch.tensor([1, 2]), b"5", 3 + 0j,
]  # fmt: skip
WRONG_LISTS = [
    None, 5, [], (), {}, "12", ["1", "2"], [1.5], [1.0, 2.0], [NAN], [None], [True, False], np.ones(WIDE, bool), [-1],
    [1, WIDE], [2**70], [[1, 2], [3, 4]], [[1], [2, 3]], np.arange(4.0), torch.rand(3), Odd(), [Odd()],
    np.array([2**63], np.uint64), np.empty((0, 3), np.int64), range(WIDE + 1), [1] * 10**6 + [-5],
]  # fmt: skip
WRONG_LOGITS = [
    None, 5, "x", [], [1.0], torch.zeros(WIDE + 1), torch.zeros(1, WIDE), torch.zeros(WIDE, dtype=torch.bool),
    torch.zeros(WIDE, dtype=torch.complex64), torch.full((WIDE,), NAN), torch.full((WIDE,), float("inf")),
    torch.full((WIDE,), -float("inf")), np.zeros(WIDE, object), np.array(["1"] * WIDE), Odd(), [None] * WIDE,
]  # fmt: skip
WRONG = [
    *(("choose_fn", "it chose token", lambda value: lambda logits, ids: value, value) for value in WRONG_TOKENS),
    *(("allowed_tokens_fn", "", lambda value: lambda ids: value, value) for value in WRONG_LISTS),
    *(("logits_processors", "", lambda value: [lambda output, x: value], value) for value in WRONG_LOGITS),
]


def test_a_wrong_answer_of_a_function_fails_its_own_request_by_its_name(llm):
    for field, _, of, value in WRONG:
        outs = llm.generate(PROMPTS, [plain(), plain(**{field: of(value)}), plain()], use_tqdm=False)
        assert [outs[0].tokens, outs[2].tokens] == [llm.want[0], llm.want[2]], (field, value)
        assert outs[1].finish_reason == "error" and outs[1].error.startswith(f"{field}: "), (field, outs[1].error)
        assert outs[1].tokens == [] and "\n" not in outs[1].error and len(outs[1].error) < 600


def test_right_answers_of_any_integer_type_are_taken(llm):
    for value in (7, np.int64(7), np.uint8(7), np.array(7), torch.tensor(7), torch.tensor([7])):
        assert llm.generate([1], plain(choose_fn=lambda x, ids, v=value: v), use_tqdm=False)[0].tokens == [7] * 6
    for value in ([7], (7,), np.array([7], np.uint16), torch.tensor([7]), range(7, 8)):
        assert llm.generate([1], plain(allowed_tokens_fn=lambda ids, v=value: v), use_tqdm=False)[0].tokens == [7] * 6


@pytest.mark.parametrize("token", [-1, WIDE, 10**6, -(2**40)])
def test_a_sampler_that_draws_no_token_of_the_vocabulary_on_the_host_is_named(llm, monkeypatch, token):
    host = llm.engine.processors[-1][1]
    monkeypatch.setattr(host, "draw", lambda x, rows, state, out: out.tokens.fill_(token))
    out = llm.generate([1, 2], plain(logits_processors=[lambda output, x: x]), use_tqdm=False)[0]
    assert (
        out.finish_reason == "error"
        and "sampler DefaultSampler failed on the host: ValueError: it drew token" in out.error
    )


# ---- processors ------------------------------------------------------------------------------------------------------

COLUMNS = {"a": Column((2, 3)), "i": Column(dtype="int32"), "u": Column((2,), "uint8"), "b": Column(dtype="bool")}
RIGHT_ROWS = [
    None, Row(), Row({"a": np.ones((2, 3))}, 5), Row({"a": [[1, 2, 3], [4, 5, 6]], "i": -7, "u": [0, 255], "b": True}),
    Row({"a": np.full((2, 3), np.inf, ">f4"), "i": np.int64(9), "b": 0}), Row({"a": torch.ones(2, 3), "u": (1, 2)}),
]  # fmt: skip
WRONG_ROWS = [
    5, {}, (1,), "row", Row, Odd(), Row({"x": 1}), Row({"a": 1.0}), Row({"a": [1.0] * 7}), Row({"a": None}),
    Row({"a": np.full((2, 3), NAN)}), Row({"a": ["x"] * 6}), Row({"a": [[1, 2], [3]]}), Row({"i": 1.5}),
    Row({"i": None}), Row({"i": NAN}), Row({"i": 2**31}), Row({"i": 2**70}), Row({"i": "7"}), Row({"u": [0, 256]}),
    Row({"u": [-1, 0]}), Row({"b": 2}), Row({"b": "yes"}), Row({"a": np.ones((2, 3), complex)}), Row({}, None),
    Row({}, -1), Row({}, 2**63), Row({}, 1.0), Row({}, True), Row({"i": Odd()}), Row({"i": np.array([1, 2])}),
    Row(None), Row({"i": object()}),
]  # fmt: skip


def test_what_bind_returns_is_checked_against_the_columns_and_refuses_its_request_alone(folder):
    faulty = dict(processors=[f"{FAULTY}:Faulty"], allow_targets=[FAULTY])
    given = []
    with pytest.MonkeyPatch.context() as patch:
        from minivllm.testing.faulty import Faulty

        patch.setattr(Faulty, "columns", lambda self: COLUMNS)
        patch.setattr(Faulty, "bind", lambda self, params, n: given[0] if params.extra else None)
        patch.setattr(Faulty, "apply", lambda self, logits, rows, state: None)
        patch.setattr(Faulty, "commit", lambda self, tokens, count, rows, state: None)
        with LLM(folder, **SMALL, **faulty) as llm:
            requested = [plain(), plain(extra={"fault": "x"}), plain()]
            want = [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)]
            for row in RIGHT_ROWS:
                given[:] = [row]
                assert [o.tokens for o in llm.generate(PROMPTS, requested, use_tqdm=False)] == want, row
            for at, row in enumerate(WRONG_ROWS):
                given[:] = [row]
                beside = llm.stream(PROMPTS[0], plain())
                next(beside)
                with pytest.raises(RequestError, match="Faulty failed on this request: "):
                    llm.generate(PROMPTS[1], requested[1], use_tqdm=False)
                assert sum(len(p.token_ids) for p in beside) == 5, at
                at_rest(llm.engine)


# ---- drafters --------------------------------------------------------------------------------------------------------


def drafts(n, k):
    return torch.zeros(n, k, dtype=torch.int64), torch.full((n,), k)


WRONG_DRAFTS = {
    "None": lambda n, k: None,
    "one": lambda n, k: drafts(n, k)[0],
    "short": lambda n, k: drafts(n, k - 1),
    "rows": lambda n, k: drafts(n + 1, k),
    "floats": lambda n, k: (drafts(n, k)[0].float(), drafts(n, k)[1]),
    "NaN": lambda n, k: (torch.full((n, k), NAN), drafts(n, k)[1]),
    "float count": lambda n, k: (drafts(n, k)[0], drafts(n, k)[1].float()),
    "bool": lambda n, k: (drafts(n, k)[0].bool(), drafts(n, k)[1]),
    "negative count": lambda n, k: (drafts(n, k)[0], drafts(n, k)[1] - 2 * k),
    "large count": lambda n, k: (drafts(n, k)[0], drafts(n, k)[1] + 1),
    "out of range": lambda n, k: (drafts(n, k)[0] + WIDE, drafts(n, k)[1]),
    "negative": lambda n, k: (drafts(n, k)[0] - 1, drafts(n, k)[1]),
    "lists": lambda n, k: (drafts(n, k)[0].tolist(), drafts(n, k)[1].tolist()),
}


@pytest.mark.parametrize("name", WRONG_DRAFTS)
def test_wrong_drafts_cost_the_drafts_and_no_request_anything(folder, llm, name):
    """The failing step includes beams, rows whose token the host chooses, and log-probabilities."""
    with LLM(folder, **SMALL, drafter="ngram", num_speculative_tokens=3, speculate="always") as drafting:
        propose = drafting.engine.executor.runner.drafting.drafter
        with pytest.MonkeyPatch.context() as patch:
            calls = []
            true = propose.propose

            def wrong(ask):
                calls.append(ask.k)
                return true(ask) if len(calls) < 2 else WRONG_DRAFTS[name](len(ask.slots), ask.k)

            patch.setattr(propose, "propose", wrong)
            params = [
                plain(),
                plain(choose_fn=lambda logits, ids: int(logits.argmax())),
                plain(logprobs=2),
                SamplingParams(beam_width=2, max_tokens=6, ignore_eos=True, temperature=0),
            ]
            items = [*PROMPTS, PROMPTS[0]]
            outs = drafting.generate(items, params, use_tqdm=False)
            want = [o.tokens for o in llm.generate(items, params, use_tqdm=False)]
            assert [o.tokens for o in outs] == want and not any(o.error for o in outs)
            assert len(calls) == 2 and "ngram" in drafting.stats()["speculation"]["failed"]
            at_rest(drafting.engine)


# ---- grammars --------------------------------------------------------------------------------------------------------


class Anything:
    """A grammar that accepts every token.  ``wrong`` is its result from the third step on."""

    def __init__(self, **wrong):
        self.wrong, self.steps = wrong, 0

    def start(self, compiled):
        return self.wrong.get("start", [0])

    def accept(self, matchers, tokens):
        return self._answer("accept", [len(ids) for ids in tokens], matchers)

    def fill(self, matchers, mask, rows):
        self.steps += 1
        mask[list(rows)] = -1
        return self._answer("fill", {}, matchers)

    def _answer(self, name, right, matchers):
        return self.wrong[name] if name in self.wrong and self.steps > 2 else right


WRONG_GRAMMARS = [
    ("start", None), ("accept", ["1"]), ("accept", Odd()), ("accept", np.array([0.5])),
    *(("accept", value) for value in (None, 5, [], [1, 1, 1], [None], [1.0], [NAN], [-1], [2], [True])),
    *(("fill", value) for value in (None, 5, [], {5: "x"}, {-1: "x"}, {None: "x"}, {0.0: "x"}, {NAN: "x"}, Odd())),
    ("fill", {0: "it is stuck"}), ("fill", {0: None}), ("fill", {0: Odd()}), ("fill", {True: "x"}),
]  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1])
def test_wrong_answers_of_a_grammar_fail_its_own_requests_by_its_name(depth):
    for where, value in WRONG_GRAMMARS:
        engine = sim_engine(depth=depth, slots=6)
        engine.masks.grammars = SimpleNamespace(plugin=Anything(**{where: value}), close=lambda: None)
        made = [request(engine, f"r{i}", [i, 3], max_tokens=9, ignore_eos=True) for i in range(2)]
        fn = lambda ids: range(VOCAB)  # noqa: E731
        made.append(request(engine, "fn", [2, 3], max_tokens=9, ignore_eos=True, allowed_tokens_fn=fn))
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        bad = Request("bad", np.array([4, 5], np.int32), params, 9.0)
        bad.grammar = object()
        engine.add(bad)
        run(engine, check=True)
        error = bad.sequences[0].error
        assert bad.sequences[0].finish_reason == "error" and error.startswith("structured_outputs: "), (where, value)
        stuck = where == "fill" and isinstance(value, dict) and [type(i) for i in value if i == 0] == [int]
        assert stuck or "Anything failed: " in error, error
        assert all(outputs(r) == [answer(r.prompt, r.params)] for r in made), (where, value)
        at_rest(engine)


@pytest.mark.parametrize("made", [None, 5, "grammar", SimpleNamespace(handle=1)])
def test_what_is_no_compiled_grammar_refuses_its_request(made):
    service = Grammars(SimpleNamespace(name="own/fake", features=()), None, 1.0, 64, 1 << 20)
    helper = SimpleNamespace(start=lambda: None, check=lambda source: None, close=lambda: None)
    service.helpers = Helpers(lambda: helper, 1)
    service.__dict__.update(plugin=SimpleNamespace(compile=lambda source: made))
    requested = SimpleNamespace(source=SimpleNamespace(kind="regex", text="a"))
    requested.source = ("regex",)
    with pytest.raises(RequestError, match="own/fake failed: TypeError: compile"):
        service._make(GrammarSource("regex", "a"), ("", ""))


# ---- executors -------------------------------------------------------------------------------------------------------


def ones(r):
    return np.ones(len(r.tokens), np.int32)


WRONG_RESULTS = {
    "None": lambda r: None,
    "another step": lambda r: replace(r, id=r.id + 1),
    "no id": lambda r: replace(r, id=None),
    "tokens short": lambda r: replace(r, tokens=r.tokens[:-1]),
    "tokens wide": lambda r: replace(r, tokens=np.stack([r.tokens] * 2, 1)),
    "tokens float": lambda r: replace(r, tokens=r.tokens.astype(np.float32)),
    "tokens NaN": lambda r: replace(r, tokens=np.full(len(r.tokens), NAN)),
    "tokens list": lambda r: replace(r, tokens=r.tokens.tolist()),
    "tokens None": lambda r: replace(r, tokens=None),
    "tokens out of range": lambda r: replace(r, tokens=r.tokens + VOCAB),
    "tokens negative": lambda r: replace(r, tokens=r.tokens - VOCAB),
    "count of two": lambda r: replace(r, count=2 * ones(r)),
    "count negative": lambda r: replace(r, count=-ones(r)),
    "count long": lambda r: replace(r, count=np.append(r.count, r.count)),
    "flags None": lambda r: replace(r, flags=None),
    "flags wide": lambda r: replace(r, flags=r.flags.astype(np.int64)),
    "no log-probabilities": lambda r: replace(r, logprobs=None),
    "few log-probabilities": lambda r: replace(r, logprobs=LogProbs(*(a[:-1] for a in _columns(r)))),
    "flat log-probabilities": lambda r: replace(r, logprobs=LogProbs(*(a.ravel() for a in _columns(r)))),
    "no logits": lambda r: replace(r, logits=None),
    "narrow logits": lambda r: replace(r, logits=r.logits[:, :-1]),
}


def _columns(r):
    return r.logprobs.chosen, r.logprobs.rank, r.logprobs.top_ids, r.logprobs.top


@pytest.mark.parametrize("name", WRONG_RESULTS)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_wrong_result_ends_the_engine_by_the_executors_name_and_everyone_is_told(depth, name):
    engine = sim_engine(depth=depth)
    made = [request(engine, f"r{i}", [i, 2], max_tokens=20, ignore_eos=True, logprobs=3) for i in range(3)]
    choose = lambda logits, ids: int(np.argmax(logits))  # noqa: E731
    made.append(request(engine, "host", [5], max_tokens=20, ignore_eos=True, choose_fn=choose))
    collect, wrong = engine.executor.collect, WRONG_RESULTS[name]
    for _ in range(4):
        engine.step()
    engine.executor.collect = lambda n: [
        wrong(r) if r is None or r.logits is None or len(r.logits) else r for r in collect(n)
    ]
    while not engine.dead:
        engine.step()
    assert engine.dead.startswith("executor SimExecutor failed: ValueError: "), engine.dead
    assert all(r.done and r.sequences[0].error == engine.dead for r in made)
    with pytest.raises(EngineDeadError, match="SimExecutor"):
        engine.step()


@pytest.mark.parametrize("found", [None, 5, [None] * 9, "results"])
def test_what_is_no_list_of_results_ends_the_engine_by_the_executors_name(found):
    engine = sim_engine()
    made = [request(engine, f"r{i}", [i, 2], max_tokens=20, ignore_eos=True) for i in range(3)]
    engine.executor.collect = lambda n: found
    while not engine.dead:
        engine.step()
    assert engine.dead.startswith("executor SimExecutor failed: "), engine.dead
    assert all(r.done for r in made)


# ---- models, formats, quantizers -------------------------------------------------------------------------------------


def test_a_model_that_gives_something_else_than_hidden_states_fails_the_requests_of_the_step_by_its_name(llm):
    runner = llm.engine.executor.runner
    wrong = [lambda h: None, lambda h: h[:0], lambda h: h.long(), lambda h: h[..., :-1], lambda h: "hidden"]
    for at, of in enumerate(wrong):
        true, calls = runner.model, []

        class Wrong:
            def __call__(self, step, of=of, true=true, calls=calls):
                calls.append(1)
                return of(true(step)) if len(calls) == 2 else true(step)

            def __getattr__(self, name, true=true):
                return getattr(true, name)

        runner.model = Wrong()
        try:
            outs = llm.generate(PROMPTS, plain(), use_tqdm=False)
        finally:
            runner.model = true
        assert all(o.finish_reason == "error" and "the step failed: " in o.error for o in outs), (at, outs[0].error)
        at_rest(llm.engine)
        assert [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)] == llm.want
