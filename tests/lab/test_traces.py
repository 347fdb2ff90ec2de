"""Traces: each published format is read as it was written, samples are what their script makes, presets are like what
they are named after."""

from __future__ import annotations

import json

import numpy as np
import pytest

from minivllm.core.engine.sessions import number_of
from minivllm.errors import ConfigError
from minivllm.lab.replay.serve import ServeSizes, serve
from minivllm.lab.simulate.drive import _Record
from minivllm.lab.traces import write
from minivllm.lab.traces.presets import PRESETS
from minivllm.lab.traces.read import FOLDER, SAMPLES, read_trace
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.scheduler.fcfs import Fcfs

BURSTGPT = "Timestamp,Request tokens,Response tokens"
GENERATED = "synthetic:like=chat,requests=30,seed=4,node=40,longest=2000,rate=9"


@pytest.mark.parametrize(("name", "suffix"), [("azure", ".csv"), ("burstgpt", ".csv"), ("bailian", ".jsonl")])
def test_a_trace_that_was_written_is_read_with_its_times_and_lengths(tmp_path, name, suffix):
    trace, file = read_trace(GENERATED), tmp_path / f"x{suffix}"
    file.write_text("\n".join(getattr(write, name)(trace)))
    found = read_trace(str(file))
    assert found.arrival == pytest.approx(trace.arrival, abs=1e-3)
    assert np.array_equal(found.prompt, trace.prompt) and np.array_equal(found.output, trace.output)


@pytest.mark.parametrize(("name", "block"), [("bailian", 16), ("mooncake", 512)])
def test_prefixes_that_a_trace_shares_are_shared_after_it_was_written_and_read(tmp_path, name, block):
    trace, file = read_trace(GENERATED), tmp_path / "x.jsonl"
    file.write_text("\n".join(getattr(write, name)(trace)))
    found = read_trace(str(file))
    assert found.unit == block
    for i in range(len(trace)):
        for j in range(i):
            both = list(zip(trace.keys(i, block), trace.keys(j, block), strict=False))
            again = list(zip(found.keys(i, block), found.keys(j, block), strict=False))
            assert [a == b for a, b in both] == [a == b for a, b in again]


def test_failures_of_the_service_that_burstgpt_watched_are_left_out(tmp_path):
    file = tmp_path / "b.csv"
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    file.write_text(head + "5,,1,ChatGPT,40,0,40,API log\n6.5,,1,GPT-4,30,20,50,API log\n8,,1,GPT-4,3,2,5,API log\n")
    found = read_trace(str(file))
    assert (found.arrival.tolist(), found.prompt.tolist(), found.output.tolist()) == ([0, 1.5], [30, 3], [20, 2])


def test_times_of_2024_with_an_offset_are_read(tmp_path):
    file = tmp_path / "a.csv"
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.259930+00:00,7,6\n"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert read_trace(str(file)).arrival.tolist() == pytest.approx([0, 1.25])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("b.csv", "Timestamp,Request tokens\n", "no column Response tokens"),
        ("b.csv", "Timestamp,Request tokens,Response tokens\nx,1,1\n", "b.csv:2: "),
        (
            "q.jsonl",
            '{"chat_id":0,"timestamp":0,"input_length":17,"output_length":1,"hash_ids":[1]}\n',
            "each 16 tokens",
        ),
        (
            "q.jsonl",
            '{"chat_id":0,"timestamp":0,"input_length":17}\n',
            "the field hash_ids is missing; a line has timestamp (s), input_length",
        ),
        ("b.csv", f"{BURSTGPT}\n1,1,1\nnan,1,1\n", "b.csv:3: 'nan' is no number of seconds"),
        ("b.csv", f"{BURSTGPT}\n1,2147483648,1\n", "b.csv:2: lengths of 2147483648 and 1 tokens"),
        ("m.jsonl", '{"timestamp":Infinity,"input_length":1,"output_length":1,"hash_ids":[1]}\n', "m.jsonl:1: "),
        ("m.jsonl", '{"timestamp":0,"input_length":1,"output_length":2147483648,"hash_ids":[1]}\n', "m.jsonl:1: "),
        (
            "m.jsonl",
            '{"timestamp":0,"input_length":1.0,"output_length":1,"hash_ids":[1]}\n',
            "input_length=1.0: expected a",
        ),
        (
            "m.jsonl",
            '{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":"1"}\n',
            "hash_ids='1': expected a list",
        ),
        (
            "m.jsonl",
            '{"timestamp":true,"input_length":1,"output_length":1,"hash_ids":[1]}\n',
            "timestamp=True: expected",
        ),
        ("b.csv", f"{BURSTGPT}\n1,1_0,1\n", "b.csv:2: '1_0' is no whole number of tokens"),
        ("b.csv", f"{BURSTGPT}\n1,1\n", "b.csv:2: the row has fewer cells than the header"),
        (
            "m.jsonl",
            "[" * 100_000 + "\n",
            "m.jsonl:1: lists or objects are nested deeper than Python can parse; use fewer levels",
        ),
    ],
)
def test_what_is_no_trace_of_these_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(str(tmp_path / name))
    assert message in str(caught.value)


def test_samples_are_what_their_script_writes_and_read_by_their_names(tmp_path):
    write.write_samples(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in FOLDER.iterdir()} == set(SAMPLES.values())
    for name, file in SAMPLES.items():
        written, kept = (
            (folder / file).read_text().splitlines() for folder in (tmp_path, FOLDER)
        )  # numbers are numpy's
        fields = (lambda line: line) if file.endswith(".csv") else (lambda line: list(json.loads(line)))
        assert len(written) == len(kept) and fields(written[0]) == fields(kept[0])
        assert 40 <= len(read_trace(f"sample:{name}")) <= 60
    with pytest.raises(ConfigError, match="no such sample; there are azure"):
        read_trace("sample:sharegpt")


def test_presets_have_the_lengths_that_are_published_and_own_values_win():
    lengths = {}
    for name in PRESETS:
        t = read_trace(f"synthetic:requests=300,seed=1,like={name}")
        lengths[name] = [float(f(x)) for f in (np.median, np.mean) for x in (t.prompt, t.output)]
    assert lengths["azure-conversation"][:2] == pytest.approx([1020, 129], rel=0.15)
    assert lengths["azure-code"][:2] == pytest.approx([1500, 13], rel=0.15)
    assert lengths["mooncake-conversation"][2:] == pytest.approx([12_035, 343], rel=0.2)
    assert 12_000 < lengths["agent"][0] < 80_000
    assert len(read_trace("synthetic:requests=7,like=chat,longest=900")) == 7
    assert read_trace("synthetic:question=5,like=pocket,requests=50,turns=1").prompt.max() < 300
    with pytest.raises(ConfigError, match="Did you mean 'agent'"):
        read_trace("synthetic:like=agents")


def test_times_are_those_of_their_offsets_and_a_byte_order_mark_is_no_column(tmp_path):
    path = tmp_path / "a.csv"
    stamps = ["2024-03-10 01:59:59.5000000", "2024-03-10 02:00:00Z", "2024-03-09 19:00:01.25-07:00"]
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{stamp},5,6\n" for stamp in stamps)
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert read_trace(str(path)).arrival.tolist() == pytest.approx([0.0, 0.5, 1.75])
    path.write_text(text.replace(stamps[1], "noon"))
    with pytest.raises(ConfigError, match=r"a.csv:3: 'noon' is no time; expected a time and two numbers"):
        read_trace(str(path))


def test_sessions_of_a_generated_trace_know_their_pauses_as_well_as_it_is_told():
    text = "synthetic:requests=3000,seed=3,turns=8,think=5,think_spread=1,rate=4"
    plain = read_trace(text)
    for known in (0.0, 0.5, 1.0):
        trace = read_trace(f"{text},known={known}")
        for name in ("arrival", "prompt", "output", "runs", "session"):
            assert (getattr(trace, name) == getattr(plain, name)).all(), "known changes no request"
        real, expected = [], []
        for number in np.unique(trace.session):
            of_session = np.flatnonzero(trace.session == number)
            real += np.diff(trace.arrival[of_session]).tolist()
            expected += trace.next_s[of_session[:-1]].tolist()
        if known in (0.0, 1.0):
            assert np.allclose(expected, 5.0 if known == 0 else real)
        else:  # the correlation of the logarithms is the square root of the known share of the variance
            assert abs(np.corrcoef(np.log(real), np.log(expected))[0, 1] - known**0.5) < 0.05


def test_single_requests_have_no_session_and_parts_keep_the_columns():
    trace = read_trace("synthetic:requests=2000,seed=3,turns=10,think=0.5,single=0.9,single_question=900,depth=0")
    single = trace.session < 0
    assert trace.session_of(int(np.flatnonzero(single)[0])) is None
    assert 0.35 < single.mean() < 0.6  # 9 of 10 conversations, each with a tenth of the requests
    assert 800 < np.median(trace.prompt[single]) < 1000
    half = trace.part(500, 900)
    i = int(np.flatnonzero(half.session >= 0)[0])
    facts = half.session_of(i)
    assert facts.id == str(trace.session[500 + i]) and facts.next_s == trace.next_s[500 + i]
    for problem in ("known=1.5", "single=2"):
        with pytest.raises(ConfigError, match="expected a share from 0 to 1"):
            read_trace(f"synthetic:{problem}")


def test_a_replay_and_a_simulation_send_the_sessions_of_a_trace():
    trace = read_trace("synthetic:requests=40,turns=4,question=40,answer=8,node=30")
    seen = []

    class Reads(Lru):
        def ended(self, keys, turn):
            seen.append((turn.session, turn.next_s))

    sizes = ServeSizes(4, 512, 4096, 16, 400)
    serve(trace, sizes, lambda ctx: Fcfs(None, ctx), lambda ctx: Reads(None, ctx))
    numbers = [number_of(("", ""), str(n)) for n in trace.session.tolist()]
    assert sorted(seen) == sorted(zip(numbers, trace.next_s.tolist(), strict=True))
    record = _Record(trace, 0.0)
    sent = [record.request(i, trace.tokens(i), 0.0, False).params.session for i in range(len(trace))]
    assert sent == [trace.session_of(i) for i in range(len(trace))]
