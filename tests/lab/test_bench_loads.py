"""Loads that do what they say, the knee between its two ends, and a client that reads any server's answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time

import pytest

from minivllm.errors import ConfigError, ResourceError
from minivllm.lab.bench import direct, serving, state, workload
from minivllm.lab.bench.answers import TimedAnswer, figures
from minivllm.lab.bench.client import HttpServer
from minivllm.lab.bench.loads import Bench, OfferedLoad
from minivllm.lab.bench.workload import BenchAsk, Generated

# ---------------------------------------------------------------- loads


class Gathering:
    """Answers nobody before ``n`` are there."""

    def __init__(self, n):
        self.n, self.all, self.now, self.most = n, asyncio.Event(), 0, 0

    async def ask(self, ask, seed):
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == self.n:
            self.all.set()
        await self.all.wait()
        self.now -= 1
        return TimedAnswer(0.0, 0.001, 0.001, [], 1, 1)


def test_a_closed_loop_never_has_more_requests_than_its_streams_and_an_open_one_does_not_wait():
    asks = [BenchAsk((1,), 1)] * 12
    closed, opened = Gathering(3), Gathering(12)
    asyncio.run(serving.run(closed, asks, 3, 0))
    assert closed.most == 3
    arriving = workload.poisson(asks, 400.0, 0)
    answers, seconds = asyncio.run(asyncio.wait_for(serving.run(opened, arriving, None, 0), 60))
    assert opened.most == 12
    for ask, one in zip(arriving, answers, strict=True):
        assert one.start >= ask.at - 0.001 and one.late == pytest.approx(one.start - ask.at)
    assert seconds >= arriving[-1].at


def test_no_two_runs_of_a_call_send_the_same_prompts_whatever_their_load():
    prompts = []

    class Heard:
        async def ask(self, ask, seed):
            prompts.append(ask.prompt)
            return TimedAnswer(0.0, 0.001, 0.001, [], 1, 1)

    async def measure():
        bench = Bench(Heard(), Generated(3, 8, 1).asks, lambda: state.MachineWatch(None))
        await bench.warm(3, None)
        for streams in (1, 3):
            await bench.row(OfferedLoad(None, streams), 2)
        await bench.knee(1e5, None, 0.9, 2)

    asyncio.run(measure())
    assert len(set(prompts)) == len(prompts) >= 3 * 7


def test_the_knee_of_a_target_that_answers_so_many_a_second_is_found():
    """A queue with one server in virtual time: request i arrives at i / rate and takes 10 ms."""

    async def measure(rate, seconds=0.01, n=64):
        free, answers = 0.0, []
        for i in range(n):
            free = max(free, i / rate) + seconds
            answers.append(TimedAnswer(i / rate, free - i / rate, free - i / rate, [], 1, 1))
        found = figures(answers, free)
        return [found], found

    for start in (3.0, 2000.0):
        knee, over, rows = asyncio.run(serving.find_knee(measure, start, 0.9, rounds=12))
        assert 85 < knee < over < 130  # 100 a second
        assert serving.knee_text(knee, over) == f"between {knee:.2f} and {over:.2f} requests/s"
        assert [row["beyond"] for row in rows] == sorted(row["beyond"] for row in rows)


def test_a_search_that_ends_before_a_rate_is_too_much_has_no_upper_end_and_runs_are_judged_one_by_one():
    kept = {"failed": 0, "request_goodput": None, "duration": 1.0, "last_arrival": 1.0, "early_e2el_ms": 1.0}
    lagged = {**kept, "duration": 9.0}

    def search(*runs):
        async def measure(rate):
            return [dict(run) for run in runs], {}

        return asyncio.run(serving.find_knee(measure, 1.0, 0.9, rounds=3))

    assert search(kept, kept, lagged)[:2] == (4.0, None)  # most kept up
    assert serving.knee_text(4.0, None).startswith("above 4.00 requests/s")
    for runs in ((kept, lagged, lagged), (kept, kept, {**kept, "failed": 1})):
        good, over, rows = search(*runs)
        assert (good, over) == (0.0, 0.25) and serving.knee_text(good, over) == "below 0.25 requests/s"
        assert len(rows) == 3


def test_failed_requests_of_a_load_are_those_of_all_its_runs():
    class Once:
        failed = False

        async def ask(self, ask, seed):
            error, self.failed = "" if self.failed else "gone", True
            return TimedAnswer(0.0, 0.001, 0.001, [], 1, 1, error=error)

    bench = Bench(Once(), Generated(2, 4, 1).asks, lambda: state.MachineWatch(None))
    row = asyncio.run(bench.row(OfferedLoad(None, 1), 3))
    assert row["failed"] == 1 and [run["failed"] for run in row["repeats"]] == [1, 0, 0]


def test_with_targets_the_knee_is_where_too_few_requests_meet_them():
    good = {"failed": 0, "request_goodput": 9.5, "duration": 1.0, "completed": 10}
    assert not serving.beyond(good, 0.9) and serving.beyond({**good, "request_goodput": 8.5}, 0.9)
    assert serving.beyond({**good, "failed": 1}, 0.9)


@pytest.mark.parametrize("at", ["in a loop", "alone"])
def test_sigterm_ends_what_was_started(at):
    """The process takes no notice of it and has to be killed."""
    process = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; exec sleep 60"], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()

    async def serve():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(9)
        finally:
            direct.end(process, 0.01)

    def alone():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(9)
        finally:
            direct.end(process, 0.01)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"), direct.terminable():
        alone() if at == "alone" else asyncio.run(serve())
    assert process.returncode == -signal.SIGKILL and signal.getsignal(signal.SIGTERM) is before
    process.stdout.close()


# ---------------------------------------------------------------- the client


def event(text, **more):
    return b"data: " + json.dumps({"choices": [{"text": text}] if text is not None else [], **more}).encode() + b"\n\n"


PIECES = [
    event("a"),
    event(""),
    event("b"),
    event(None, usage={"prompt_tokens": 5, "completion_tokens": 4}),
    b"data: [DONE]\n\n",
]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def answered(respond, timeout=60.0):
    """Return the client's results of a server whose connections are handled by ``respond(reader, writer)``."""
    heard = []

    async def handle(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length")), 0)
        heard.append((head, json.loads(await reader.readexactly(length)) if length else None))
        await respond(writer)
        await writer.drain()
        writer.close()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            target = HttpServer(f"http://127.0.0.1:{port}/v1", "m", "secret", {"temperature": 0.5}, timeout)
            return await target.ask(BenchAsk("hi", 4), 7)

    return asyncio.run(run()), heard


@pytest.mark.parametrize("how", ["chunks", "split chunks", "to the end"])
def test_the_client_times_all_pieces_of_an_answer_as_vllm_s_does_and_counts_tokens_by_the_usage(how):
    async def respond(writer):
        writer.write(HEAD + (b"\r\n" if how == "to the end" else b"Transfer-Encoding: chunked\r\n\r\n"))
        for piece in PIECES:
            await asyncio.sleep(0.01)
            if how == "to the end":
                writer.write(piece)
            elif how == "chunks":
                writer.write(chunked(piece))
            else:
                writer.write(chunked(piece[:9]) + chunked(piece[9:]))
            await writer.drain()
        if how != "to the end":
            writer.write(b"0\r\n\r\n")

    answer, heard = answered(respond)
    assert not answer.error and (answer.prompt_tokens, answer.output_tokens) == (5, 4)
    # a piece without text is one too: it stands for a token whose text waits for the next one's
    assert answer.ttft >= 0.009 and len(answer.itls) == 2 and min(answer.itls) > 0
    assert answer.latency == pytest.approx(answer.ttft + sum(answer.itls))
    assert answer.tpot == pytest.approx(sum(answer.itls) / 3)
    head, body = heard[0]
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n") and "Authorization: Bearer secret" in head
    assert body["stream_options"] == {"include_usage": True} and body["ignore_eos"] and body["temperature"] == 0.5
    assert (body["model"], body["prompt"], body["max_tokens"], body["seed"]) == ("m", "hi", 4, 7)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy", "status 503: busy"),
        (b"SSH-2.0-x\r\n\r\n", "the response is not HTTP"),
        (b"", "the response is not HTTP"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\nda", "IncompleteReadError"),
        (HEAD + b'\r\ndata: {"error": {"message": "no room"}}\n\n', "no room"),
        (HEAD + b"\r\ndata: [DONE]\n\n", "the answer has no tokens"),
        (HEAD + b"\r\ndata: {oops\n\n", "JSONDecodeError"),
        (HEAD + b"\r\ndata: 3\n\n", "an event is not a JSON object: 3"),
        (HEAD + b'\r\ndata: {"choices": 3}\n\n', "TypeError"),
        (HEAD + b'\r\ndata: {"choices": ["a"]}\n\n', "AttributeError"),
        (HEAD + b'\r\ndata: {"choices": [], "usage": [1]}\n\n', "TypeError"),
    ],
)
def test_an_answer_that_is_none_is_an_error_of_its_request_and_raises_nothing(data, error):
    async def respond(writer):
        writer.write(data)

    answer, _ = answered(respond)
    assert error in answer.error


def test_an_answer_that_does_not_come_fails_when_its_time_is_over():
    async def respond(writer):
        writer.write(HEAD + b"\r\n" + PIECES[0])
        await writer.drain()
        await asyncio.sleep(30)

    answer, _ = answered(respond, 0.05)
    assert answer.error == "no whole answer within 0.05 s (--timeout)"


def test_where_no_server_is_that_is_said():
    with pytest.raises(ResourceError, match=r"names no model .* is a server there"):
        asyncio.run(HttpServer("http://127.0.0.1:9").find_model())
    for url in ("ftp://x", "http://", "http://a:b", "nonsense"):
        with pytest.raises(ConfigError, match="expected http"):
            HttpServer(url)
