"""Structured output: what is asked for, its compilation under limits, and that answers fit, whatever else happens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from minivllm import LLM, AsyncLLM, RequestError, SamplingParams, StructuredOutputsParams
from minivllm.core.interfaces.executor import Part
from minivllm.core.interfaces.grammar import Compiled, Grammar, GrammarContext
from minivllm.plugins.grammar.xgrammar_schema import unheld
from minivllm.structured.params import group_depth, text_depth, value_depth
from minivllm.structured.service import Grammars, NoGrammars

torch.set_num_threads(1)  # several threads wait for each other where other programs run too
TESTS = Path(__file__).parent
SCHEMAS = {
    f"{file.stem}: {name}": schema
    for file in sorted((TESTS / "schemas").glob("*.json"))
    for name, schema in json.loads(file.read_text(encoding="utf-8")).items()
}
NEVER_ENDS = ("strings: email", "objects: map of integers", "objects: some listed, others typed")  # often too long
PERSON = SCHEMAS["objects: person"]


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


# ---- what can be asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked, says",
    [
        ({}, "structured_outputs: none given; want exactly one of json, regex, choice, grammar, json_object"),
        ({"json": {}, "regex": "a"}, "json and regex given"),
        ({"jsn": {}}, "unknown field 'jsn'. Did you mean 'json'?"),
        ({"regex": ""}, "structured_outputs.regex=: want a text that is not empty"),
        ({"regex": 7}, "structured_outputs.regex=7"),
        ({"choice": "yes"}, "structured_outputs.choice=yes: want a list of texts"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a"] * 10_001}, "structured_outputs.choice=10001 texts: want at most 10000"),
        ({"json": "{"}, "structured_outputs.json is no JSON"),
        ({"json": "[" * 1000}, "structured_outputs.json=a schema 1000 levels deep: want at most 100"),
        ({"json": deep(1000)}, "structured_outputs.json=a schema that is deeper"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json: not every value is JSON"),
        ({"json": 5}, "structured_outputs.json=5: want a schema"),
        ({"json": '{"const": "' + "a" * 300_000 + '"}'}, "bytes: want at most 262144"),
        ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, "structured_outputs.regex=groups within 30000 others"),
        ({"regex": "\ud800"}, "structured_outputs.regex is no valid Unicode"),
        ({"regex": "a", "disable_any_whitespace": True}, "beside json only, not regex"),
        ({"json": {}, "disable_any_whitespace": 1}, "want True or False"),
        (5, "structured_outputs of int"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_field_and_what_was_wanted(asked, says):
    start = time.perf_counter()
    with pytest.raises(RequestError) as e:
        SamplingParams(structured_outputs=asked)
    assert says in str(e.value) and e.value.param == "structured_outputs" and len(str(e.value)) < 300
    assert time.perf_counter() - start < 2


def test_a_schema_that_contains_itself_is_refused():
    schema = {"type": "array"}
    schema["items"] = schema
    with pytest.raises(RequestError, match="contains itself"):
        StructuredOutputsParams(json=schema)
    wide = [0]
    for _ in range(40):
        wide = [wide, wide]  # 2 ** 40 values for who walks them all
    with pytest.raises(RequestError, match="deeper"):
        StructuredOutputsParams(json={"enum": wide})


def test_text_mapping_and_model_are_the_same_schema():
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    texts = [StructuredOutputsParams(json=given).source.text
             for given in (Point, Point.model_json_schema(), json.dumps(Point.model_json_schema()))]  # fmt: skip
    assert len(set(texts)) == 1


def test_additional_properties_are_forbidden_where_the_schema_says_nothing():
    inner = {"type": "object", "properties": {"b": {}}, "additionalProperties": {"type": "null"}}
    schema = {"type": "object", "properties": {"a": inner}}
    asked = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert json.loads(asked.source.text) == {**schema, "additionalProperties": False}
    assert "additionalProperties" not in schema


def test_depths_count_what_nests_and_nothing_else():
    assert text_depth('{"a": ["[[[", "\\"[", {}]}') == 3 and value_depth({"a": [1, {"b": {}}]}) == 4
    assert group_depth(r"(a[((]\((b))") == 2


def test_choose_fn_cannot_be_used_beside_it():
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(choose_fn=lambda logits, ids: 0, structured_outputs={"regex": "a"})


@pytest.mark.parametrize("schema, finds", [
    ({"oneOf": []}, ["oneOf"]), ({"allOf": [{}, {"not": {}}]}, ["allOf of several", "not"]),
    ({"anyOf": [], "minimum": 1}, ["minimum beside anyOf"]), ({"enum": [1], "type": "integer"}, []),
    ({"pattern": "a", "maxLength": 2}, ["minLength and maxLength beside pattern or format"]),
    ({"properties": {"not": {"format": "ipv4"}}}, ["the format ipv4"]),
])  # fmt: skip
def test_what_xgrammar_passes_over_is_found(schema, finds):
    assert list(unheld(schema)) == finds


# ---- compilation under limits ----------------------------------------------------------------------------------------


class Fake(Grammar):
    """Compiles what it is told to do: "loop", "eat", "die", "refuse", "none", or a grammar of as many bytes."""

    def compile(self, source):
        text = source.text
        if text == "loop":
            while True:
                pass
        if text == "eat":
            bytearray(3 << 30)[:] = b"x"
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "refuse":
            raise ValueError("not this one")
        return Compiled(text, int(text) if text.isdigit() else 1)

    def start(self, compiled):
        return compiled.handle

    def accept(self, matchers, tokens):
        return [len(t) for t in tokens]

    def fill(self, matchers, mask, rows):
        mask[rows] = 0 if "none" in matchers else -1
        return {}

    def rollback(self, matcher, count):
        pass

    def clone(self, matcher):
        return matcher


class Threads(Fake):
    """The same with a thread of its own, so that its process cannot be forked."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@pytest.fixture
def fake(monkeypatch, request):
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    part = Part("test/fake", f"test_structured:{getattr(request, 'param', 'Fake')}")
    made = Grammars(part, lambda: GrammarContext((b"a", b""), 2, (1,)), 0.6, 512, 100)
    yield made
    made.close()


def compiled(grammars, text):
    return grammars.compile(StructuredOutputsParams(regex=text))


@pytest.mark.parametrize("fake", ["Fake", "Threads"], indirect=True)
def test_a_hostile_grammar_costs_a_process_its_life_and_the_next_is_compiled(fake):
    """A child of the helper; with a plug-in that has threads, which a fork would lack, the helper."""
    assert compiled(fake, "1").handle == "1"
    helper = fake.helper._process.pid
    cases = [
        ("loop", "structured_outputs.regex: it takes more than 0.6 s to compile"),
        ("eat", "structured_outputs.regex: "),
        ("die", "structured_outputs.regex: it takes more than 512 MB of memory to compile, or is more than"),
        ("refuse", "structured_outputs.regex: not this one"),
        ("none", "structured_outputs.regex: no text that this model's tokens can spell fits it"),
    ]
    forks = fake.part.target == "test_structured:Fake"
    for text, says in cases if forks else cases[::3]:
        with pytest.raises(RequestError) as e:
            compiled(fake, text)
        assert says in str(e.value) and e.value.param == "structured_outputs"
        assert compiled(fake, f"0{len(text)}").handle == f"0{len(text)}"
    assert (fake.helper._process.pid == helper) == forks


def test_what_was_refused_is_refused_again_at_once(fake):
    for _ in range(2):
        start = time.perf_counter()
        with pytest.raises(RequestError, match=r"more than 0\.6 s"):
            compiled(fake, "loop")
    assert time.perf_counter() - start < 0.1


def test_compiled_grammars_are_kept_up_to_the_byte_limit_and_the_least_recently_used_go(fake):
    first = compiled(fake, "40")
    assert compiled(fake, "40") is first
    compiled(fake, "50")
    assert compiled(fake, "40") is first and fake.bytes == 90
    compiled(fake, "30")
    assert fake.bytes == 70 and compiled(fake, "40") is first
    compiled(fake, "101")
    assert fake.bytes == 0, "one that is larger than the limit is not kept, nor is room made for it in vain"


def test_many_threads_compile_one_grammar_once(fake):
    found = []
    threads = [threading.Thread(target=lambda: found.append(compiled(fake, "7"))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_without_a_library_or_a_vocabulary_a_request_is_refused_with_what_to_do():
    from minivllm.wiring import NO_GRAMMAR

    with pytest.raises(RequestError, match="pip install llguidance"):
        NoGrammars(NO_GRAMMAR).compile(StructuredOutputsParams(regex="a"))


# ---- a vocabulary ----------------------------------------------------------------------------------------------------


def test_the_bytes_of_tokens_are_those_of_their_text():
    from minivllm.loading.hf_config import open_checkpoint
    from minivllm.text.tokenizer import load_tokenizer
    from minivllm.text.vocabulary import token_bytes

    tokenizer = load_tokenizer(open_checkpoint("pocket").folder)
    tokens = token_bytes(tokenizer, 3000)
    assert len(tokens) == 3000 and not any(tokens[2048:]) and not any(tokens[i] for i in tokenizer.eos_ids)
    for text in ("The fox's box held 12 things.\n\tTab", "h\u00e9llo \u4f60\u597d \U0001f98a", ' {"a": [1, 2.5e3]}'):
        assert b"".join(tokens[i] for i in tokenizer.encode(text, add_special_tokens=False)) == text.encode()


def test_the_bytes_of_a_sentencepiece_vocabulary():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    from minivllm.errors import ModelError
    from minivllm.text.tokenizer import Tokenizer
    from minivllm.text.vocabulary import token_bytes

    vocab = {"<unk>": 0, "\u2581the": 1, "<0x0A>": 2, "\u2581\u2581": 3, "</s>": 4}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend, None, {"eos_token": "</s>"}, None)
    assert token_bytes(tokenizer, 6) == [b"", b" the", b"\n", b"  ", b"", b""]
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="the decoder of this one is WordPiece"):
        token_bytes(tokenizer, 6)


# ---- threads ---------------------------------------------------------------------------------------------------------


def calls(threads, cost, n=1000, rows=64):
    """What n calls of so many rows took: the pools that they were made with."""
    from minivllm.plugins.grammar import threads as module

    clock, used = [0.0], []
    module.perf_counter = lambda: clock[0]
    try:
        for _ in range(n):

            def call(pool):
                used.append(pool or 1)
                clock[0] += cost(pool or 1)

            threads.run("fill", rows, call)
    finally:
        module.perf_counter = time.perf_counter
    return used


def test_a_call_is_spread_over_the_threads_that_make_it_fastest():
    from minivllm.plugins.grammar.threads import Threads

    threads = Threads(14, lambda n: n)
    assert threads.sizes == [1, 2, 4, 8, 14]
    for cost, best in ((lambda n: 1 / n, 14), (lambda n: n, 1), (lambda n: abs(n - 8) + 1, 8), (lambda n: 1 / n, 14)):
        used = calls(threads, cost, 8000)
        assert used[-100:].count(best) >= 90 and threads.used() == {"fill 127": best}
        assert len(set(used[-2000:])) > 1, "it goes on looking"
    assert set(calls(threads, lambda n: 1.0, rows=1)) == {1}, "one row is for the caller's own thread"


def test_on_few_cores_there_are_no_threads():
    from minivllm.plugins.grammar.threads import Threads
    from minivllm.structured.service import default_threads

    assert set(
        calls(Threads(default_threads() if len(os.sched_getaffinity(0)) < 4 else 1, broken_pool), lambda n: 1)
    ) == {1}


def broken_pool(n):
    raise AssertionError(f"a pool of {n} threads was made")


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
    """jsonschema's, but for dates of the year 0: RFC 3339 has it, and Python's ``date`` has not."""
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
    """Every finished answer fits its schema; at least ``least`` of them have finished.  (answers, finished, tokens)."""
    import jsonschema

    asked = [params(SCHEMAS[name]) for name in names]
    outputs = llm.generate(["Tell me about a fox."] * len(asked), asked, use_tqdm=False)
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
    """Each schema with and without whitespace, all in one batch; what was seen is printed."""
    pytest.importorskip("jsonschema")
    pytest.importorskip(library)
    names = [name for name in SCHEMAS if library == "llguidance" or not list(unheld(SCHEMAS[name]))]
    assert len(names) >= 46
    options = {"load_format": "dummy"} if model == "random" else {}
    spent = {"compile": [], "fill": [], "accept": []}
    kinds = iter([(True, 1.0)] * len(names) + [(False, 0.7)] * len(names))

    def params(schema):
        tight, temperature = next(kinds)
        asked = {"json": schema, "disable_any_whitespace": tight}
        return SamplingParams(seed=5, temperature=temperature, max_tokens=200, structured_outputs=asked)

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

    asked = [
        {"regex": r"[0-9]{3}-\d{4}"}, {"choice": ["yes", "no", "h\u00e9"]}, {"json_object": True},
        {"grammar": 'start: "(" start ")" | "x"'}, {"grammar": 'root ::= "a" | "b" root'},
    ]  # fmt: skip
    params = [SamplingParams(n=3, seed=1, max_tokens=20, structured_outputs=a) for a in asked]
    outputs = llm.generate(["Who?"] * len(asked), params, use_tqdm=False)
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
    asked = {"choice": ["a", "b"]}
    some = SamplingParams(temperature=0, max_tokens=1, structured_outputs=asked, allowed_tokens_fn=only("b"))
    assert llm.generate("Once", some, use_tqdm=False)[0].text == "b"
    none = SamplingParams(temperature=0, max_tokens=4, structured_outputs=asked, allowed_tokens_fn=only("c"))
    output = llm.generate("Once", none, use_tqdm=False)[0]
    assert output.finish_reason == "error" and "allow no token in common" in output.error


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

    async def outcome(llm, asked):
        start = time.perf_counter()
        try:
            output = await last(llm, "Go", SamplingParams(max_tokens=4, structured_outputs=asked))
            said = ANSWERED if output.error is None else output.error
        except RequestError as e:
            named = f"structured_outputs.{next(iter(asked))}" in str(e) and e.param == "structured_outputs"
            said = REFUSED if named and len(str(e)) < 600 else str(e)
        return said, time.perf_counter() - start

    async def run():
        async with AsyncLLM(model="pocket", dtype="float32", grammar="llguidance", max_num_seqs=8) as llm:
            alone = [(await last(llm, p, golden)).tokens for p in prompts]
            await outcome(llm, {"regex": "a"})  # the helper is there
            beside = [asyncio.create_task(last(llm, p, golden)) for p in prompts]
            found = [await outcome(llm, asked) for asked, _ in HOSTILE]
            return alone, [(await task).tokens for task in beside], found

    alone, beside, found = asyncio.run(run())
    assert beside == alone
    told = [(i, said, round(seconds, 2)) for i, (said, seconds) in enumerate(found)]
    assert [said for said, _ in found] == [want for _, want in HOSTILE], told
    assert max(seconds for _, seconds in found) < 2, told


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
            for i in seq.request.stop_ids if len(drawn) < p.min_tokens else seq.request.eos_ids if out else ():
                bits[i // 32] &= ~np.int32(1 << i % 32)
            assert (row == (bits if bits.any() else want[0])).all()
            seen.append((seq.id, len(drawn)))
        return mask

    monkeypatch.setattr(type(engine.masks), "of", of)
    schema = {"json": PERSON, "disable_any_whitespace": True}
    asked = [
        SamplingParams(max_tokens=4 + 5 * i, seed=i, structured_outputs=schema if i % 3 else {"regex": "[a-c]{2,30}"},
                       min_tokens=3 * (i % 4), ignore_eos=i % 2 == 0, n=1 + (i == 4), stop_token_ids=[70 + i])
        for i in range(8)
    ]  # fmt: skip
    pieces = [llm.stream("Once", params) for params in asked]
    for turn in range(400):  # they come one after the other
        for stream in pieces[: 1 + turn // 3]:
            next(stream, None)
    assert not engine.busy and len({i for i, _ in seen}) == 9 and len(seen) == len(set(seen)) > 100
    assert engine.masks._late is None, "what has ended is kept"


def test_a_matcher_that_fails_ends_its_own_request(llm, monkeypatch):
    plugin = llm.engine.grammars.plugin
    true = type(plugin).fill
    monkeypatch.setattr(type(plugin), "fill", lambda self, m, mask, rows: {**true(self, m, mask, rows), 0: "too much"})
    asked = SamplingParams(max_tokens=4, structured_outputs={"regex": "a+"})
    first, second = llm.generate(["Once", "Once"], [asked, SamplingParams(max_tokens=4)], use_tqdm=False)
    assert first.error == "structured_outputs: too much" and second.error is None and len(second.tokens) == 4


def test_a_record_holds_what_was_asked_for(tmp_path):
    from minivllm.record.tally import plain_params

    asked = {"json": PERSON, "disable_any_whitespace": True}
    assert plain_params(SamplingParams(structured_outputs=asked)) == {"structured_outputs": asked}
    again = SamplingParams.make(**json.loads(json.dumps(plain_params(SamplingParams(structured_outputs=asked)))))
    assert again == SamplingParams(structured_outputs=asked)


@needs_library
def test_the_command_line_takes_a_schema_and_a_regex(tmp_path, capsys):
    from minivllm.cli import main

    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"enum": ["fox", "owl"]}))
    assert main(["generate", "--json-schema", str(file), "--max-tokens", "8", "Who?"]) == 0
    assert json.loads(capsys.readouterr().out) in ("fox", "owl")
    assert main(["generate", "--json-schema", "no.json", "Who?"]) == 2
    assert "--json-schema: no.json: No such file" in capsys.readouterr().err
    assert main(["generate", "--regex", "[", "--max-tokens", "8", "Who?"]) == 2
    assert "structured_outputs.regex" in capsys.readouterr().err
