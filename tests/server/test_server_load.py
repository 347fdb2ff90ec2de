"""Many clients at once, through a server in a process of its own: nobody's answer changes, nobody is cut off."""

import asyncio
import json
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

OPTIONS = ("batch_invariant=true", "max_model_len=512", "max_num_seqs=256", "server.max_queue=128")


@pytest.fixture(scope="module")
def address():
    more = [part for one in OPTIONS for part in ("--set", one)]
    argv = [sys.executable, "-m", "minivllm", "serve", "pocket", "--port", "0", *more]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        url = next(json.loads(line)["url"] for line in process.stderr if '"url"' in line)
        host, _, port = url.removeprefix("http://").partition(":")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield host, int(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


async def ask(address, body):
    """Return (status, bytes of the answer), status 0 if the connection ended without an answer."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    )
    try:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + data)
        answer = await reader.read()
        writer.close()
    except OSError:
        return 0, b""
    return int(answer.split(b" ", 2)[1] or 0) if answer else 0, answer


def text_of(answer):
    """The text of a stream, which ended as it should."""
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1].strip() == b"[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    return "".join(choice["text"] for choice in choices)


@pytest.mark.slow
def test_256_concurrent_streams_of_64_tokens_all_end_and_each_has_the_text_of_its_solo_run(address):
    bodies = [
        {
            "prompt": f"Once upon a time there {words}",
            "max_tokens": 64,
            "ignore_eos": True,
            "stream": True,
            "seed": i,
            "temperature": 0 if i % 4 == 0 else 0.9,
            "top_p": 0.9 if i % 3 else 1.0,
        }
        for i, words in enumerate(("was a fox", "were two bears", "lived a king", "is") * 4)
    ]

    async def main():
        solo = [await ask(address, body) for body in bodies]
        return solo, await asyncio.gather(*(ask(address, bodies[i % 16]) for i in range(256)))

    solo, together = asyncio.run(main())
    want = [text_of(answer) for _, answer in solo]
    assert len(set(want)) > 8
    assert [status for status, _ in together] == [200] * 256
    for i, (_, answer) in enumerate(together):
        assert text_of(answer) == want[i % 16]


@pytest.mark.slow
def test_1000_connections_at_once_each_get_200_or_429_and_none_is_reset(address):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}

    async def main():
        return await asyncio.gather(*(ask(address, {**body, "stream": i % 2 == 0}) for i in range(1000)))

    found = [status for status, _ in asyncio.run(main())]
    assert set(found) <= {200, 429} and len(found) == 1000, {status: found.count(status) for status in set(found)}
    assert found.count(200) >= 384  # all that there is room for
    assert asyncio.run(ask(address, body))[0] == 200


class Echo:
    """A protocol whose choices are the pieces."""

    def opening(self, answer):
        return [{"index": 0, "text": ""}]

    def choices(self, answer, number, piece):
        return [{"index": number, "text": piece.text, "ids": piece.token_ids, "reason": piece.finish_reason}]


def answer_of(streams, **more):
    from minivllm.server.openai.answers import Slices
    from minivllm.server.openai.generate import Answer

    return Answer(
        SimpleNamespace(slices=Slices()), "cmpl-1", "text_completion", "m\ud800", streams, 1, created=1, **more
    )


def stream_of(number=0):
    from minivllm import SamplingParams
    from minivllm.server.link.streams import Stream

    def ignore(*_):
        pass

    return Stream(number, f"r{number}", 3, SamplingParams(max_tokens=8), None, ignore, ignore, set())


@pytest.mark.parametrize("warned", [False, True])
@pytest.mark.parametrize("usage", [(False, False), (True, False), (True, True)])
def test_the_events_of_a_stream_hold_what_its_chunks_hold(usage, warned):
    async def read(kind):
        streams = [stream_of(0), stream_of(1)]
        warnings = [{"field": "user", "message": "no effect"}] if warned else []
        answer = answer_of(streams, include_usage=usage[0], continuous=usage[1], warnings=warnings)
        found = []

        async def reader():
            async for one in getattr(answer, kind)(Echo()):
                found.append(one)

        task = asyncio.create_task(reader())
        for step in range(3):
            for stream in streams:
                stream.feed(0, [step], "length" if step == 2 else None)
                if step == 2:
                    stream.finished(0.0)
            await asyncio.sleep(0.01)
        await asyncio.wait_for(task, 5)
        return found

    async def main():
        return await read("events"), await read("chunks")

    events, chunks = asyncio.run(main())
    lines = b"".join(events).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    received = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert received == json.loads(json.dumps(chunks).replace("\\ud800", "?"))
    assert [chunk.get("warnings") is not None for chunk in received] == [warned] + [False] * (len(received) - 1)


def test_what_waits_of_a_stream_is_one_event_and_no_token_of_it_is_lost():
    async def main():
        stream = stream_of()
        for token in range(5):
            stream.feed(0, [token], "length" if token == 4 else None)
        stream.finished(0.0)
        return [event async for event in answer_of([stream]).events(Echo())]

    _, event, _ = asyncio.run(main())
    assert json.loads(event[6:])["choices"][0]["ids"] == [0, 1, 2, 3, 4] and event.count(b"data: ") == 1


class Words:
    """A protocol whose choices are texts.  With ``empty``, pieces without a text give an event too."""

    def __init__(self, empty):
        self.sends_empty = empty

    def opening(self, answer):
        return []

    def choices(self, answer, number, piece):
        if piece.text or piece.finish_reason or self.sends_empty:
            yield {"index": number, "text": piece.text, "reason": piece.finish_reason}

    def text_choice(self, number):
        from minivllm.server.openai.generate import TEXT

        return {"index": number, "text": TEXT, "reason": None}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("taken", ["never", "always", "now and then"])
def test_text_that_is_told_at_once_is_in_its_order_and_none_is_lost(empty, taken):
    """A connection accepts text at once or refuses it.  Refused text is sent by the stream's own task."""
    from minivllm import SamplingParams
    from minivllm.pocket import checkpoint
    from minivllm.runtime.text.tokenizer import load_tokenizer
    from minivllm.server.link.streams import Stream

    tokenizer = load_tokenizer(str(Path(checkpoint.__file__).parent / "model"))
    text = "Zwölf Boxkämpfer jagen Viktor 🐎 quer über den großen Sylter Deich"
    ids = tokenizer.encode(text)  # characters of several tokens: some tokens bring no text
    usage, offered, direct = {"include_usage": True}, [], []

    async def main():
        def ignore(*_):
            pass

        streams = [
            Stream(n, f"r{n}", 3, SamplingParams(max_tokens=99), tokenizer, ignore, ignore, set()) for n in (0, 1)
        ]
        answer, found = answer_of(streams, **usage), []

        def write(part):
            offered.append(part)
            if taken == "never" or (taken == "now and then" and len(offered) % 3 == 0):
                return False
            direct.append(part)
            found.append(part)
            return True

        async def reader():
            async for part in answer.events(Words(empty), SimpleNamespace(write=write)):
                found.append(part)

        task = asyncio.create_task(reader())
        for place, token in enumerate(ids):
            for stream in streams:
                stream.feed(0, [token], "length" if place == len(ids) - 1 else None)
                if place == len(ids) - 1:
                    stream.finished(0.0)
            await asyncio.sleep(0)
            if place % 5:
                await asyncio.sleep(0.001)
        await asyncio.wait_for(task, 5)
        return b"".join(found), answer.sent

    found, received = asyncio.run(main())
    lines = found.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    for number in (0, 1):
        mine = [choice for choice in choices if choice["index"] == number]
        assert "".join(choice["text"] for choice in mine) == text
        assert [choice["reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert empty or all(choice["text"] for choice in mine[:-1])
    assert {tuple(event) for event in events} == {("id", "object", "created", "model", "choices", "usage")}
    assert received == 2 * len(ids) == events[-1]["usage"]["completion_tokens"]
    assert bool(direct) == (taken != "never") and len(offered) > len(ids) / 2
