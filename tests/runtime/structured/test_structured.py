"""Structured output: answers fit their form, whatever else happens."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from structured_helpers import deep

from minivllm import LLM, AsyncLLM, RequestError, SamplingParams
from minivllm.plugins.grammar.xgrammar_schema import unheld

torch.set_num_threads(1)  # several threads wait for each other where other programs run too
TESTS = Path(__file__).parents[2]
SCHEMAS = {
    f"{file.stem}: {name}": schema
    for file in sorted((TESTS / "helpers" / "schemas").glob("*.json"))
    for name, schema in json.loads(file.read_text(encoding="utf-8")).items()
}
NEVER_ENDS = ("strings: email", "objects: map of integers", "objects: some listed, others typed")  # often too long
PERSON = SCHEMAS["objects: person"]


# ---- answers ---------------------------------------------------------------------------------------------------------

needs_library = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("llguidance"), reason="no llguidance"
)


@pytest.fixture(scope="module")
def llm():
    pytest.importorskip("llguidance")
    with LLM(model="pocket", dtype="float32", max_num_seqs=64, num_kvcache_blocks=2000) as made:
        yield made


def formats():
    """Return jsonschema's formats, except that dates of the year 0 are allowed, as in RFC 3339 and not in Python's
    ``date``.
    """
    import jsonschema

    checker = jsonschema.FormatChecker()
    for name in ("date", "date-time"):
        check, _ = checker.checkers.get(name, (None, ()))
        if check is not None:
            checker.checks(name, ValueError)(
                lambda v, check=check: check("2000" + v[4:] if isinstance(v, str) and v[:4] == "0000" else v)
            )
    return checker


def check_all(llm, names, params, least):
    """Check that every finished answer fits its schema, and that at least ``least`` have finished.

    Return (answers, finished, tokens).
    """
    import jsonschema

    requested = [params(SCHEMAS[name]) for name in names]
    outputs = llm.generate(["Tell me about a fox."] * len(requested), requested, use_tqdm=False)
    finished = total = tokens = 0
    for name, output in zip(names, outputs, strict=True):
        assert output.error is None, (name, output.error)
        checker = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=formats())
        for answer in output.outputs:
            total, tokens = total + 1, tokens + len(answer.token_ids)
            if answer.finish_reason == "stop":
                checker.validate(json.loads(answer.text))
                finished += 1
    assert finished >= least, f"the test itself is too weak: {finished} of {total} answers ended"
    return total, finished, tokens


def test_there_are_50_schemas():
    assert len(SCHEMAS) == 50


def test_answers_fit_a_dozen_schemas(llm):
    pytest.importorskip("jsonschema")
    make = lambda schema: SamplingParams(  # noqa: E731
        seed=3, max_tokens=60, structured_outputs={"json": schema, "disable_any_whitespace": True}
    )
    check_all(llm, list(SCHEMAS)[::5], make, 6)


def watch(monkeypatch, plugin, name, spent):
    """Notes the seconds of each call of a plug-in's method."""
    true = getattr(plugin, name)

    def timed(*args):
        start = time.perf_counter()
        try:
            return true(*args)
        finally:
            spent.append(time.perf_counter() - start)

    monkeypatch.setattr(plugin, name, timed)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("model", ["pocket", "random"])
def test_every_finished_answer_fits_its_schema(library, model, monkeypatch, capsys):
    """Each schema is used with and without whitespace, all in one batch.  The counts are printed."""
    pytest.importorskip("jsonschema")
    pytest.importorskip(library)
    names = [name for name in SCHEMAS if library == "llguidance" or not list(unheld(SCHEMAS[name]))]
    assert len(names) >= 46
    options = {"load_format": "dummy"} if model == "random" else {}
    spent = {"compile": [], "fill": [], "accept": []}
    kinds = iter([(True, 1.0)] * len(names) + [(False, 0.7)] * len(names))

    def params(schema):
        tight, temperature = next(kinds)
        requested = {"json": schema, "disable_any_whitespace": tight}
        return SamplingParams(seed=5, temperature=temperature, max_tokens=200, structured_outputs=requested)

    with LLM(
        model="pocket", dtype="float32", grammar=library, max_num_seqs=100, num_kvcache_blocks=4000, **options
    ) as made:
        for name, seconds in spent.items():
            watch(monkeypatch, made.engine.grammars.plugin, name, seconds)
        total, finished, tokens = check_all(made, names * 2, params, 1.5 * len(names))
    compiled = [1e3 * s for s in spent["compile"]]
    masks = 1e6 * (sum(spent["fill"]) + sum(spent["accept"])) / tokens
    with capsys.disabled():
        print(
            f"\n{library}, {model}: {len(names)} schemas, {finished} of {total} answers finished, 0 do not fit; "
            f"compile {sum(compiled) / len(compiled):.1f} ms, at most {max(compiled):.1f}; masks {masks:.0f} us a token"
        )


def test_regexes_choices_and_grammars_hold(llm):
    import re

    requested = [
        {"regex": r"[0-9]{3}-\d{4}"},
        {"choice": ["yes", "no", "h\u00e9"]},
        {"json_object": True},
        {"grammar": 'start: "(" start ")" | "x"'},
        {"grammar": 'root ::= "a" | "b" root'},
    ]
    params = [SamplingParams(n=3, seed=1, max_tokens=20, structured_outputs=a) for a in requested]
    outputs = llm.generate(["Who?"] * len(requested), params, use_tqdm=False)
    texts = [[o.text for o in output.outputs if o.finish_reason == "stop"] for output in outputs]
    assert len(texts[0]) == 3 and all(re.fullmatch("[0-9]{3}-[0-9]{4}", t) for t in texts[0])
    assert len(texts[1]) == 3 and set(texts[1]) <= {"yes", "no", "h\u00e9"}
    assert all(isinstance(json.loads(t), dict) for t in texts[2])
    assert texts[3] and all(re.fullmatch(r"(\(*)x\)*", t) and t.count("(") == t.count(")") for t in texts[3])
    assert texts[4] and all(re.fullmatch("b*a", t) for t in texts[4])
    assert len({*texts[0]}) > 1, "the branches of a request draw apart"


def test_rows_without_a_grammar_are_not_touched_by_those_beside_them(llm):
    golden = SamplingParams(temperature=0, max_tokens=24)
    prompts = ["Tell me a story about a fox.", "What did the box hold?"]
    alone = [o.tokens for o in llm.generate(prompts, golden, use_tqdm=False)]
    ruled = SamplingParams(max_tokens=24, seed=2, structured_outputs={"json": PERSON})
    mixed = llm.generate([prompts[0], "Who?", prompts[1]], [golden, ruled, golden], use_tqdm=False)
    assert [mixed[0].tokens, mixed[2].tokens] == alone


def test_the_end_comes_where_the_grammar_lets_it(llm):
    def ask(regex, **values):
        params = SamplingParams(temperature=0, structured_outputs={"regex": regex}, **{"max_tokens": 12, **values})
        output = llm.generate("Once", params, use_tqdm=False)[0]
        return output.text, output.finish_reason, output.error

    assert ask("abc") == ("abc", "stop", None)
    assert ask("a{300}")[1] == "length"
    assert ask("abc", min_tokens=10) == ("abc", "stop", None), "a text that cannot go on ends before min_tokens"
    assert ask("abc", ignore_eos=True) == ("abc", "stop", None)
    text, reason, _ = ask("(ab)*", ignore_eos=True)
    assert reason == "length" and text.startswith("abab"), "ignore_eos goes on as long as the grammar can"
    assert len(ask("[ab]{1,50}", min_tokens=8)[0]) >= 8
    assert ask("aXb+", stop="X")[:2] == ("a", "stop")
    banned = {i: -100.0 for i in range(2048) if llm.tokenizer.decode([i]) in ("a", "ab", "abc")}
    assert ask("abc", logit_bias=banned)[0] == "abc", "a bias is no ban"


def test_a_mask_and_allowed_tokens_fn_must_agree(llm):
    only = lambda text: lambda ids: llm.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    requested = {"choice": ["a", "b"]}
    some = SamplingParams(temperature=0, max_tokens=1, structured_outputs=requested, allowed_tokens_fn=only("b"))
    assert llm.generate("Once", some, use_tqdm=False)[0].text == "b"
    none = SamplingParams(temperature=0, max_tokens=4, structured_outputs=requested, allowed_tokens_fn=only("c"))
    output = llm.generate("Once", none, use_tqdm=False)[0]
    assert output.finish_reason == "error"
    assert "structured_outputs and allowed_tokens_fn allow no token in common" in output.error


def test_fields_that_exclude_every_token_together_are_named(llm):
    ids = llm.tokenizer.encode("b", add_special_tokens=False)
    for fields, names in (
        (
            {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": ids},
            "structured_outputs and allowed_token_ids",
        ),
        ({"bad_words": ["b"], "allowed_token_ids": ids}, "allowed_token_ids and bad_words"),
        (
            {"structured_outputs": {"regex": "b{4}"}, "no_repeat_ngram_size": 1},
            "structured_outputs and no_repeat_ngram_size",
        ),
        (
            {"allowed_token_ids": ids, "thinking_token_budget": 0, "thinking_tags": {"start": "b", "end": "c"}},
            "allowed_token_ids, thinking_token_budget and thinking_tags",
        ),
    ):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **fields)
        output = llm.generate("Once", params, use_tqdm=False)[0]
        assert output.finish_reason == "error" and f"{names} allow no token in common" in output.error


@needs_library
@pytest.mark.parametrize(
    "options", [{"run_ahead": 2}, {"num_kvcache_blocks": 9, "run_ahead": 1}, {"max_num_batched_tokens": 16}]
)
def test_answers_do_not_depend_on_run_ahead_preemption_or_chunks(llm, options):
    names = [name for name in list(SCHEMAS)[::10] if name not in NEVER_ENDS]
    params = [
        SamplingParams(n=1 + i % 2, seed=i, max_tokens=24, structured_outputs={"json": SCHEMAS[name]})
        for i, name in enumerate(names)
    ]
    prompts = [f"Tell me about fox {i}." for i in range(len(names))]
    want = [[o.token_ids for o in out.outputs] for out in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(model="pocket", dtype="float32", **{"max_num_seqs": 8, "max_model_len": 128, **options}) as other:
        got = [[o.token_ids for o in out.outputs] for out in other.generate(prompts, params, use_tqdm=False)]
        assert got == want
        if "num_kvcache_blocks" in options:
            assert other.stats()["preemptions"] > 0


CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
REFUSED, ANSWERED = "refused", "answered"
HOSTILE = [
    ({"regex": "(a+)+b"}, ANSWERED), ({"regex": "(x+x+)+y"}, ANSWERED), ({"regex": "(a?){300}a{300}"}, ANSWERED),
    ({"regex": "((a{0,999}){0,999}){0,999}"}, ANSWERED), ({"regex": ".*" * 200}, REFUSED),
    ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, REFUSED), ({"json": '{"$ref": "#"}'}, REFUSED),
    ({"json": CYCLE}, REFUSED), ({"json": deep(1000)}, REFUSED), ({"json": "[" * 1000}, REFUSED),
    ({"json": deep(40)}, ANSWERED), ({"json": {"type": "string", "pattern": "(a+)+b"}}, ANSWERED),
    ({"json": {"enum": [f"x{i}" for i in range(20_000)]}}, ANSWERED),
    ({"json": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}}, ANSWERED),
    ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, REFUSED), ({"grammar": "start: start | start"}, REFUSED),
    ({"choice": [f"{i:05}" for i in range(10_000)]}, ANSWERED), ({"choice": ["a"] * 10_001}, REFUSED),
]  # fmt: skip


@needs_library
def test_hostile_grammars_are_refused_or_answered_within_2_s_and_golden_requests_beside_them_are_unchanged():
    golden = SamplingParams(temperature=0, max_tokens=60)
    prompts = ["Tell me a story about a fox.", "What did the box hold?"]

    async def last(llm, prompt, params):
        async for piece in llm.generate(prompt, params):
            output = piece.output
        return output

    async def outcome(llm, requested):
        start = time.perf_counter()
        try:
            output = await last(llm, "Go", SamplingParams(max_tokens=4, structured_outputs=requested))
            reported = ANSWERED if output.error is None else output.error
        except RequestError as e:
            named = f"structured_outputs.{next(iter(requested))}" in str(e) and e.param == "structured_outputs"
            reported = REFUSED if named and len(str(e)) < 600 else str(e)
        return reported, time.perf_counter() - start

    async def run():
        async with AsyncLLM(model="pocket", dtype="float32", grammar="llguidance", max_num_seqs=8) as llm:
            alone = [(await last(llm, p, golden)).tokens for p in prompts]
            await outcome(llm, {"regex": "a"})  # the helper is there
            beside = [asyncio.create_task(last(llm, p, golden)) for p in prompts]
            found = [await outcome(llm, requested) for requested, _ in HOSTILE]
            return alone, [(await task).tokens for task in beside], found

    alone, beside, found = asyncio.run(run())
    assert beside == alone
    received = [(i, reported, round(seconds, 2)) for i, (reported, seconds) in enumerate(found)]
    assert [reported for reported, _ in found] == [want for _, want in HOSTILE], received
    assert max(seconds for _, seconds in found) < 2, received


def test_masks_are_those_of_fresh_matchers_whoever_comes_and_goes(llm, monkeypatch):
    engine, seen = llm.engine, []
    true, plugin = type(engine.masks).of, engine.grammars.plugin
    words = -(-engine.capacity.vocab_size // 32)

    def of(masks, flight):
        mask = true(masks, flight)
        for row, j in zip(mask, flight.plan.samples[flight.plan.late].tolist(), strict=True):
            seq = masks.slots.seq[flight.plan.slots[j]]
            if seq is None or seq.serial != flight.serial[j]:
                assert (row == -1).all(), "a row that has left is restricted"
                continue
            p, n = seq.request.params, len(seq.request.prompt)
            drawn = masks.slots.tokens[seq.slot, n : masks.slots.collected[seq.slot]].tolist()
            fresh, want = plugin.start(seq.request.grammar), np.zeros((1, words), np.int32)
            plugin.accept([fresh], [drawn])
            assert not plugin.fill([fresh], want, [0])
            bits, out = want[0].copy(), p.ignore_eos or len(drawn) < p.min_tokens
            for i in seq.request.stops.ids if len(drawn) < p.min_tokens else engine.eos_ids if out else ():
                bits[i // 32] &= ~np.int32(1 << i % 32)
            assert (row == (bits if bits.any() else want[0])).all()
            seen.append((seq.id, len(drawn)))
        return mask

    monkeypatch.setattr(type(engine.masks), "of", of)
    schema = {"json": PERSON, "disable_any_whitespace": True}
    requested = [
        SamplingParams(
            max_tokens=4 + 5 * i,
            seed=i,
            structured_outputs=schema if i % 3 else {"regex": "[a-c]{2,30}"},
            min_tokens=3 * (i % 4),
            ignore_eos=i % 2 == 0,
            n=1 + (i == 4),
            stop_token_ids=[70 + i],
        )
        for i in range(8)
    ]
    pieces = [llm.stream("Once", params) for params in requested]
    for turn in range(400):  # they come one after the other
        for stream in pieces[: 1 + turn // 3]:
            next(stream, None)
    assert not engine.busy and len({i for i, _ in seen}) == 9 and len(seen) == len(set(seen)) > 100
    assert engine.masks._late is None, "what has ended is kept"


def test_a_matcher_that_fails_ends_its_own_request(llm, monkeypatch):
    plugin = llm.engine.grammars.plugin
    true = type(plugin).fill
    monkeypatch.setattr(type(plugin), "fill", lambda self, m, mask, rows: {**true(self, m, mask, rows), 0: "too much"})
    requested = SamplingParams(max_tokens=4, structured_outputs={"regex": "a+"})
    first, second = llm.generate(["Once", "Once"], [requested, SamplingParams(max_tokens=4)], use_tqdm=False)
    assert first.error == "structured_outputs: too much" and second.error is None and len(second.tokens) == 4


def test_a_record_holds_what_was_asked_for(tmp_path):
    from minivllm.frontend.record.tally import plain_params

    requested = {"json": PERSON, "disable_any_whitespace": True}
    assert plain_params(SamplingParams(structured_outputs=requested)) == {"structured_outputs": requested}
    again = SamplingParams.make(**json.loads(json.dumps(plain_params(SamplingParams(structured_outputs=requested)))))
    assert again == SamplingParams(structured_outputs=requested)


@needs_library
def test_the_command_line_takes_a_schema_and_a_regex(tmp_path, capsys):
    from minivllm.cli import main

    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"enum": ["fox", "owl"]}))
    assert main(["generate", "--json-schema", str(file), "--max-tokens", "8", "Who?"]) == 0
    assert json.loads(capsys.readouterr().out) in ("fox", "owl")
    assert main(["generate", "--json-schema", "no.json", "Who?"]) == 2
    assert "--json-schema: no.json: no such file" in capsys.readouterr().err
    assert main(["generate", "--regex", "[", "--max-tokens", "8", "Who?"]) == 2
    assert "structured_outputs.regex" in capsys.readouterr().err
