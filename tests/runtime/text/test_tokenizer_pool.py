"""``tokenizer_pool``: threads and processes convert lists of texts in order, with the errors of one thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from wrong.tokenizers import AsItIs

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError, RequestError
from minivllm.runtime.text.pool import FEW, PART, TokenizerPool, divided
from minivllm.runtime.text.tokenizer import Tokenizer, load_tokenizer

POCKET = Path(minivllm.__file__).parent / "pocket" / "model"
TEXTS = [f"The {i}th story: " + f"the cat of house {i} é 日本 🙂 " * (i % 25) for i in range(200)]
TEXTS += ["", "x" * (3 * PART), " "]
SIZES = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 4096}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(POCKET)


@pytest.fixture
def pool_of(request):
    """Return a function that makes a pool, which is closed at the end of the test."""
    made = []

    def make(tokenizer, name, size=2):
        made.append(TokenizerPool(tokenizer, name, size))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_parts_have_all_items_in_order_and_are_bounded():
    parts = divided(TEXTS)
    assert [text for part in parts for text in part] == TEXTS and len(parts) > 4
    assert all(len(part) == 1 or sum(map(len, part)) <= PART for part in parts)
    assert divided([]) == [[]] and divided(["", ""]) == [["", ""]]


@pytest.mark.parametrize("name", ["none", "auto", "threads", "process"])
def test_texts_and_ids_are_converted_in_order(tokenizer, pool_of, name):
    pool = pool_of(tokenizer, name)
    assert sum(map(len, TEXTS)) > FEW
    for special in (True, False):
        want = [tokenizer.encode(text, special) for text in TEXTS]
        assert pool.encode_all(TEXTS, special) == want
        assert pool.decode_all(want, special) == [tokenizer.decode(ids, special) for ids in want]
    assert pool.encode_all([]) == [] and pool.decode_all([[], [1]]) == ["", tokenizer.decode([1])]


@pytest.mark.parametrize("name", ["none", "threads", "process"])
def test_a_text_that_is_refused_raises_the_error_of_one_thread(tokenizer, pool_of, name):
    pool = pool_of(tokenizer, name)
    bad = [*TEXTS[:150], "a\ud800", *TEXTS[150:]]
    with pytest.raises(RequestError, match="without lone surrogates"):
        pool.encode_all(bad)
    assert pool.encode_all(TEXTS) == [tokenizer.encode(text) for text in TEXTS]  # the pool still works


def test_a_process_that_is_killed_is_started_again(tokenizer, pool_of):
    pool = pool_of(tokenizer, "process", 1)
    want = pool.encode_all(TEXTS)
    for process in pool._started:
        os.kill(process._process.pid, signal.SIGKILL)
    assert pool.encode_all(TEXTS) == want


class Sleepy(AsItIs):
    """A tokenizer whose calls take time without holding Python's lock."""

    calls: list[str] = []
    seconds = 0.01

    def encode(self, text, add_special_tokens):
        self.calls.append(threading.current_thread().name)
        time.sleep(self.seconds)
        return super().encode(text, add_special_tokens)


class Busy(AsItIs):
    """A tokenizer whose calls run one at a time."""

    lock = threading.Lock()

    def encode(self, text, add_special_tokens):
        with self.lock:
            time.sleep(0.01)
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize(("kind", "name"), [(Sleepy, "threads"), (Busy, "none")])
def test_auto_measures_whether_threads_are_faster(kind, name, pool_of):
    pool = pool_of(Tokenizer(None, kind(None, None), {}, None), "auto", 3)
    texts = [f"{i:04}" * (PART // 4) for i in range(16)]
    assert pool.name == "auto"
    found = pool.encode_all(texts)
    assert found == [AsItIs(None, None).encode(text, True) for text in texts]
    assert pool.name == name


def test_an_exception_ends_the_conversion_before_most_texts(pool_of):
    class Failing(Sleepy):
        calls = []

        def encode(self, text, add_special_tokens):
            if text[0] == "5":
                raise KeyboardInterrupt
            return super().encode(text, add_special_tokens)

    pool = pool_of(Tokenizer(None, Failing(None, None), {}, None), "threads", 2)
    texts = [f"{i % 10}" * PART for i in range(200)]
    with pytest.raises(KeyboardInterrupt):
        pool.encode_all(texts)
    pool.close()  # waits for the jobs that run
    assert len(Failing.calls) < 20


def test_an_engine_tokenizes_lists_of_prompts_by_its_pool(monkeypatch):
    monkeypatch.setattr("minivllm.runtime.text.pool.FEW", 10)
    monkeypatch.setattr("minivllm.runtime.text.pool.PART", 20)
    prompts = ["the cat", [5, 6, 7], {"prompt": "the dog"}, *(f"story {i} of it" for i in range(6))]
    params = SamplingParams(max_tokens=1, temperature=0)
    found = {}
    for name in ("none", "threads"):
        with LLM(str(POCKET), tokenizer_pool={"name": name, "size": 2}, **SIZES) as llm:
            calls = []
            convert = llm.tokenizer.pool._in_order
            llm.tokenizer.pool._in_order = lambda *args, convert=convert, calls=calls: calls.append(1) or convert(*args)
            outs = llm.generate(prompts, params, use_tqdm=False)
            found[name] = [(out.prompt, out.prompt_token_ids, out.outputs[0].token_ids) for out in outs]
            assert bool(calls) == (name == "threads")
            with pytest.raises(RequestError, match="without lone surrogates"):
                llm.generate(["a", "\ud800", "b"], params, use_tqdm=False)
    assert found["threads"] == found["none"]
    assert found["none"][0][0] == prompts[0] and found["none"][1][1] == [5, 6, 7]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ray", "name='ray': Ray actors cannot convert text in this engine; use threads or process"),
        ("fork", "name='fork': expected auto, none, threads, process"),
        ({"name": "threads", "size": 0}, "size=0: expected a whole number from 1 to 256"),
        ({"name": "threads", "size": True}, "size=True: expected a whole number"),
        ({"name": "threads", "extra": 1}, "expected a name, or a table with name and size"),
        (3, "3: expected a name, or a table with name and size"),
    ],
)
def test_options_that_are_not_served_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(tokenizer_pool=value)


def test_a_pool_is_a_name_or_a_table():
    assert EngineConfig().tokenizer_pool == {"name": "auto"}
    assert EngineConfig(tokenizer_pool="process").tokenizer_pool == {"name": "process"}
    assert EngineConfig(tokenizer_pool={"size": 3}).tokenizer_pool == {"name": "auto", "size": 3}
