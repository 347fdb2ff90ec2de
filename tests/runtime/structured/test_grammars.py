"""Structured output: possible forms, their compilation under limits, vocabularies, and threads for masks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from minivllm import RequestError, StructuredOutputsParams
from minivllm.core.interfaces.executor import Part
from minivllm.core.interfaces.grammar import Compiled, Grammar, GrammarContext, GrammarSource
from minivllm.runtime.structured.service import Grammars, NoGrammars

HERE = Path(__file__).parent


# ---- compilation under limits ----------------------------------------------------------------------------------------


class Fake(Grammar):
    """A plug-in whose compilation follows the source: "loop", "eat", "die", "refuse", "none", or a grammar of as many
    bytes.
    """

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


class Threads(Fake):
    """The same with a thread of its own, so that its process cannot be forked."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@pytest.fixture
def fake(monkeypatch, request):
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    part = Part("test/fake", f"test_grammars:{getattr(request, 'param', 'Fake')}")
    made = Grammars(part, lambda: GrammarContext((b"a", b""), 2, (1,)), 0.6, 512, 100)
    yield made
    made.close()


def compiled(grammars, text, salt=("", "")):
    return grammars.compile(StructuredOutputsParams(regex=text), salt)


@pytest.mark.parametrize("fake", ["Fake", "Threads"], indirect=True)
def test_a_hostile_grammar_costs_a_process_its_life_and_the_next_is_compiled(fake):
    """The process is a child of the helper.

    With a plug-in that has threads, which a fork would lack, it is the helper.
    """
    assert compiled(fake, "1").handle == "1"
    helper = fake.helpers.made[0]._process.pid
    cases = [
        ("loop", "structured_outputs.regex: the grammar takes more than 0.6 s to compile"),
        ("eat", "structured_outputs.regex: "),
        ("die", "structured_outputs.regex: the grammar takes more than 512 MB of memory to compile, or is more than"),
        ("refuse", "structured_outputs.regex: not this one"),
        ("none", "structured_outputs.regex: the tokens of this model cannot spell any text that fits the grammar"),
    ]
    forks = fake.part.target == "test_grammars:Fake"
    for text, says in cases if forks else cases[::3]:
        with pytest.raises(RequestError) as e:
            compiled(fake, text)
        assert says in str(e.value) and e.value.param == "structured_outputs"
        assert compiled(fake, f"0{len(text)}").handle == f"0{len(text)}"
    assert (fake.helpers.made[0]._process.pid == helper) == forks and len(fake.helpers.made) == 1


@pytest.mark.parametrize("fake", ["Fake", "Threads"], indirect=True)
@pytest.mark.parametrize("when", ["before it is tried out", "while it is"])
def test_one_that_nobody_wants_any_more_ends_at_once_and_is_not_held_against_who_asks_again(fake, when):
    """It ends long before its limit.  Compilations of other requests continue, and a helper that forks stays."""
    fake.helpers._make = lambda made=fake.helpers._make: patient(made())
    assert compiled(fake, "1").handle == "1"
    requested, found = StructuredOutputsParams(regex="loop"), []
    fake.stop(requested, ("", ""))  # nothing is being made: without effect

    def ask():
        with pytest.raises(RequestError, match="the requests for it have ended") as e:
            fake.compile(requested, ("", ""))
        found.append(e.value.param)

    begun, thread = time.monotonic(), threading.Thread(target=ask)
    with fake.helpers.one() if when.startswith("before") else contextlib.nullcontext():
        thread.start()
        while (("", ""), requested.source) not in fake._making:
            time.sleep(0.01)
        time.sleep(0.5)
        fake.stop(StructuredOutputsParams(regex="other"), ("", ""))
        fake.stop(requested, ("somebody", ""))
        time.sleep(0.2)
        assert thread.is_alive()
        fake.stop(requested, ("", ""))
    thread.join(30)
    assert found == ["structured_outputs"] and time.monotonic() - begun < 20
    assert not fake._making and not fake._stopped and not fake._trying
    assert fake.find(requested, ("", "")) is None, "it was not refused: whoever asks again is not told so"
    assert compiled(fake, "2").handle == "2"


def patient(helper):
    """Return a helper with very large limits."""
    helper.seconds = 60.0
    helper._hello = helper._hello.replace(b'"seconds": 0.6', b'"seconds": 60')
    return helper


def test_what_was_refused_is_refused_again_at_once(fake):
    for _ in range(2):
        start = time.perf_counter()
        with pytest.raises(RequestError, match=r"more than 0\.6 s"):
            compiled(fake, "loop")
    assert time.perf_counter() - start < 0.5


def test_compiled_grammars_are_kept_up_to_the_byte_limit_and_the_least_recently_used_go(fake):
    first = compiled(fake, "40")
    assert compiled(fake, "40") is first
    compiled(fake, "50")
    assert compiled(fake, "40") is first and fake.bytes == 90
    compiled(fake, "30")
    assert fake.bytes == 70 and compiled(fake, "40") is first
    compiled(fake, "101")
    assert fake.bytes == 70, "one that is larger than the limit is not kept, nor is room made for it in vain"


def test_many_threads_compile_one_grammar_once(fake):
    found = []
    threads = [threading.Thread(target=lambda: found.append(compiled(fake, "7"))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_the_bytes_of_a_grammar_are_those_of_what_is_compiled():
    """A class of a few characters is thousands in the grammar."""
    pytest.importorskip("llguidance")
    from json_helpers import BYTES

    from minivllm.plugins.grammar.llguidance_plugin import LLGuidance, lark

    library = LLGuidance(None, BYTES)
    letters = GrammarSource("regex", r"\p{L}\W" * 10)
    nbytes = library.compile(letters).nbytes
    assert len(lark(letters)) > 100_000 and 4 * len(lark(letters)) < nbytes < 16 * len(lark(letters))
    assert nbytes > 10 * library.compile(GrammarSource("regex", "a" * len(letters.text))).nbytes


def test_without_a_library_or_a_vocabulary_a_request_is_refused_with_what_to_do():
    from minivllm.config.resolve import NO_GRAMMAR

    with pytest.raises(RequestError, match="pip install llguidance"):
        NoGrammars(NO_GRAMMAR).compile(StructuredOutputsParams(regex="a"), ("", ""))


# ---- a vocabulary ----------------------------------------------------------------------------------------------------


def test_the_bytes_of_tokens_are_those_of_their_text():
    from minivllm.device.loading.hf_config import open_checkpoint
    from minivllm.runtime.text.tokenizer import load_tokenizer
    from minivllm.runtime.text.vocabulary import token_bytes

    tokenizer = load_tokenizer(open_checkpoint("pocket").folder)
    tokens = token_bytes(tokenizer, 3000)
    assert len(tokens) == 3000 and not any(tokens[2048:]) and not any(tokens[i] for i in tokenizer.eos_ids)
    for text in ("The fox's box held 12 things.\n\tTab", "h\u00e9llo \u4f60\u597d \U0001f98a", ' {"a": [1, 2.5e3]}'):
        assert b"".join(tokens[i] for i in tokenizer.encode(text, add_special_tokens=False)) == text.encode()


def test_the_bytes_of_a_sentencepiece_vocabulary():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    from minivllm.errors import ModelError
    from minivllm.runtime.text.tokenizer import Tokenizer
    from minivllm.runtime.text.vocabulary import token_bytes

    vocab = {"<unk>": 0, "\u2581the": 1, "<0x0A>": 2, "\u2581\u2581": 3, "</s>": 4}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend, None, {"eos_token": "</s>"}, None)
    assert token_bytes(tokenizer, 6) == [b"", b" the", b"\n", b"  ", b"", b""]
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend, None, {}, None)
    with pytest.raises(ModelError, match="the decoder of this one is WordPiece"):
        token_bytes(tokenizer, 6)


# ---- threads ---------------------------------------------------------------------------------------------------------


def calls(threads, cost, n=1000, rows=64):
    """Return the pools with which n calls of so many rows were made."""
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
    from minivllm.runtime.structured.service import default_threads

    assert set(
        calls(Threads(default_threads() if len(os.sched_getaffinity(0)) < 4 else 1, broken_pool), lambda n: 1)
    ) == {1}


def broken_pool(n):
    raise AssertionError(f"a pool of {n} threads was made")


BROKEN_LARK = ["start: /(/", 'start: a\na: "x" zz', 'start: b\n\n// a comment\nb: /a(?=b)/ "c"\n', 'start: "a"~3..1']


@pytest.mark.parametrize("text", BROKEN_LARK)
def test_a_position_in_an_error_is_a_position_in_the_grammar_of_the_request(text):
    """The library reads another grammar: with a line before it, and made from a schema or from GBNF."""
    pytest.importorskip("llguidance")
    from json_helpers import BYTES

    from minivllm.plugins.grammar.llguidance_plugin import LLGuidance

    library = LLGuidance(None, BYTES)
    with pytest.raises(ValueError, match=r"^line \d+, column \d+: ") as error:
        library.compile(GrammarSource("grammar", text))
    line, column = map(int, re.findall(r"\d+", str(error.value))[:2])
    faulty = next(row for row in text.split("\n") if re.search(r"zz|/|~", row) and "//" not in row)
    assert text.split("\n")[line - 1] == faulty
    assert 1 <= column <= len(faulty)
    assert "^" not in str(error.value)


@pytest.mark.parametrize(
    "kind, text, words",
    [
        ("json", '{"type": "strin"}', "Invalid type: strin"),
        ("json", '{"$ref": "#/x"}', "Pointer '/x' does not exist"),
        ("json", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "Use anyOf"),
        ("grammar", 'root ::= "a"\n\nroot ::= "a" {2,1}', "range end must be"),
    ],
)
def test_an_error_has_no_position_in_a_grammar_that_the_request_does_not_have(kind, text, words):
    pytest.importorskip("llguidance")
    from json_helpers import BYTES

    from minivllm.plugins.grammar.llguidance_plugin import LLGuidance

    with pytest.raises(ValueError, match=words) as error:
        LLGuidance(None, BYTES).compile(GrammarSource(kind, text))
    assert not re.search(r"at \d|line \d|\^|coerce", str(error.value))
