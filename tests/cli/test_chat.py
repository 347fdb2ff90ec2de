"""``minivllm chat``: its commands, messages of several lines, interrupts, and answers of a server."""

import argparse
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from minivllm.cli import chat, main
from minivllm.cli.answer_views import PlainView
from minivllm.cli.chat_input import InputLines, make_reader
from minivllm.cli.chat_sources import Facts, Server
from minivllm.errors import ConfigError, RequestError, ResourceError


class FakeSource:
    """Repeats the question; ``interrupted`` stops the answer in the middle."""

    def __init__(self, sampling=None):
        self.sampling, self.last, self.partial, self.seen, self.interrupted = dict(sampling or {}), None, "", [], False

    def check(self, sampling):
        from minivllm.core.interfaces.params import SamplingParams

        SamplingParams.make(**sampling)

    def answer(self, messages):
        self.seen.append([*messages])
        self.partial = "half of"
        if self.interrupted:
            raise KeyboardInterrupt
        self.last = Facts(prompt=20, cached=16, tokens=11, waited=0.002, first=0.1, seconds=1.1, reason="stop")
        return f"answer to {messages[-1]['content']}"

    def stats(self):
        return {"running": 0, "waiting": 0, "seam_ms": {}}


def talking(monkeypatch, text, source, terminal=False, system=None):
    stdin = io.StringIO(text)
    stdin.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(chat, "make_reader", lambda terminal, commands: InputLines(terminal).read)
    chat.talk(argparse.Namespace(system=system), source)


def test_a_message_may_have_several_lines(monkeypatch):
    source = FakeSource()
    talking(monkeypatch, '"""\none\n\n  two\n"""\nthree\\\nfour\nfive\n', source)
    questions = [messages[-1]["content"] for messages in source.seen]
    assert questions == ["one\n\n  two", "three\nfour", "five"]


def test_sampling_parameters_are_set_shown_and_checked(monkeypatch, capsys):
    source = FakeSource({"temperature": 0.5})
    lines = "/set top_k 5\n/set temperature default\n/set\n/set heat 3\n/set seed x\n/set temperature -1\n"
    talking(monkeypatch, lines, source)
    output = capsys.readouterr().err
    assert source.sampling == {"top_k": 5}, "a refused value changes nothing"
    assert "top_k               5" in output and "temperature         default" in output
    assert "/set 'heat': expected one of max_tokens, temperature" in output
    assert "/set seed 'x': expected a whole number, or default" in output and output.count("error") == 3


def test_a_conversation_is_saved_and_loaded(monkeypatch, capsys, tmp_path):
    path, source = tmp_path / "talk.json", FakeSource()
    talking(
        monkeypatch, f"one\n/save {path}\n/save {path}\n/clear\ntwo\n/load {path}\nthree\n", source, system="Be brief."
    )
    output = capsys.readouterr().err
    assert [len(messages) for messages in source.seen] == [2, 2, 4]
    assert source.seen[2][0] == {"role": "system", "content": "Be brief."}
    assert source.seen[2][2] == {"role": "assistant", "content": "answer to one"}
    assert "2 messages are in" in output and "choose another name" in output
    assert json.loads(path.read_text())["messages"][0] == {"role": "user", "content": "one"}


@pytest.mark.parametrize("text", ["{", "[]", '{"messages": [{"role": "system", "content": "x"}]}', '{"messages": [1]}'])
def test_a_file_that_is_no_conversation_is_refused(text, monkeypatch, capsys, tmp_path):
    path, source = tmp_path / "talk.json", FakeSource()
    path.write_text(text)
    talking(monkeypatch, f"/load {path}\n/load\n/load {tmp_path}/none\nhello\n", source)
    output = capsys.readouterr().err
    assert output.count("minivllm: error") == 3 and "expected" in output and source.seen[0][0]["content"] == "hello"


def test_why_explains_the_last_answer(monkeypatch, capsys):
    talking(monkeypatch, "/why\none\n/why\n/stats\n", FakeSource())
    output = capsys.readouterr().err
    assert "There is no answer yet." in output and "20 tokens, of which 16 were a prefix hit" in output
    assert "waited     2.0 ms" in output and "11 tokens in 1.10 s, 10.0 tok/s" in output
    assert "the model ended it" in output
    assert "running  0" in output and "seam_ms" not in output


def test_an_interrupt_stops_the_answer_only_on_a_terminal(monkeypatch, capsys):
    source = FakeSource()
    source.interrupted = True
    talking(monkeypatch, "one\ntwo\n", source, terminal=True)
    assert [len(messages) for messages in source.seen] == [1, 3] and source.seen[1][1]["content"] == "half of"
    assert capsys.readouterr().err.count(chat.STOPPED) == 2
    with pytest.raises(KeyboardInterrupt):
        talking(monkeypatch, "one\n", source)


def test_a_conversation_that_fills_the_context_can_be_continued_after_a_reset(monkeypatch, capsys):
    class Full(FakeSource):
        def answer(self, messages):
            answer = super().answer(messages)
            if sum(len(message["content"]) for message in messages) > 30:
                raise RequestError("the prompt has 31 tokens; expected at most 30", "prompt")
            return answer

    source = Full()
    talking(monkeypatch, f"{'x' * 40}\nhello\nhello again\n/reset\nhello\n", source, terminal=True)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert ["/reset" in line for line in errors] == [False, True]
    assert [len(messages) for messages in source.seen] == [1, 1, 3, 1]


def test_without_a_terminal_the_input_is_plain(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    read = make_reader(False, ())
    assert read() == "one" and read() is None


# ---- a server ------------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply(200, "application/json", json.dumps({"data": [{"id": "some-model"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        if body["messages"][-1]["content"] == "refuse":
            self.reply(400, "application/json", json.dumps({"error": {"message": "no such thing"}}))
            return
        thoughts = [{"choices": [{"delta": {name: "Hm. "}}]} for name in ("reasoning", "reasoning_content")]
        thoughts = thoughts if body["messages"][-1]["content"] == "think" else []
        chunks = [*thoughts]
        chunks += [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in ("Hel", "lo")]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
        chunks.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.reply(200, "text/event-stream", ": hi\n\n" + "".join(lines) + "data: [DONE]\n\n")

    def reply(self, status, kind, text):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def openai_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def test_a_server_answers(openai_server, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n/set temperature 0\ntwo\n/why\n"))
    code = main(["chat", "--url", openai_server.url, "--api-key", "sk-1", "--max-tokens", "5", "--system", "Brief."])
    output = capsys.readouterr()
    assert code == 0 and output.out == "Hello\nHello\n" and "9 tokens, of which 8 were a prefix hit" in output.err
    path, key, body = openai_server.seen[1]
    assert path == "/v1/chat/completions" and key == "Bearer sk-1"
    assert body["model"] == "some-model" and body["max_tokens"] == 5 and body["temperature"] == 0
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]


def test_the_reasoning_of_a_server_is_apart_from_the_answer(openai_server, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/thought\nthink\n/thought\none\n/thought\n"))
    assert main(["chat", "--url", openai_server.url]) == 0
    output = capsys.readouterr()
    assert (
        output.out == "Hello\nHello\n"
        and output.err.count("Hm. Hm.") == 1
        and output.err.count("There is no reasoning") == 2
    )
    assert openai_server.seen[1][2]["messages"][1] == {"role": "assistant", "content": "Hello"}


def test_the_error_of_a_server_is_shown(openai_server, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("refuse\n"))
    assert main(["chat", "--url", f"{openai_server.url}/v1/"]) == ResourceError.exit_code
    assert "status 400: no such thing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--url", "ftp://x"], ["--url", "localhost:8000"], ["--url", "http://x", "--set", "seed=1"], ["--api-key", "x"],
     ["--url", "http://x", "--regex", "a"]],
    ids=" ".join,
)  # fmt: skip
def test_flags_that_do_not_fit_are_refused(flags, capsys):
    assert main(["chat", *flags]) == ConfigError.exit_code
    assert (
        "expected" in (output := capsys.readouterr().err)
        or "leave one of them out" in output
        or "needs no key" in output
    )


def test_a_server_that_is_not_there_is_named(capsys):
    with pytest.raises(ResourceError, match=r"127\.0\.0\.1:9/v1/models cannot be reached"):
        Server("http://127.0.0.1:9", "", None, {}, PlainView())


# ---- a real terminal -----------------------------------------------------------------------------------------------


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *arguments, **environ):
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "minivllm", *arguments]
        env = {**os.environ, "TERM": "xterm", **environ}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.text, self.at = "", 0

    def until(self, word, seconds=120):
        """Read until the output has a word, after the last word that was waited for."""
        end = time.monotonic() + seconds
        while (found := self.text.find(word, self.at)) < 0:
            assert time.monotonic() < end, self.text[-2000:]
            if select.select([self.master], [], [], 0.5)[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")
        self.at = found + len(word)

    def type(self, text):
        os.write(self.master, text.encode())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "prompt_toolkit"])
def test_a_real_terminal_streams_stops_and_goes_on(plain, tmp_path):
    if not plain:
        pytest.importorskip("prompt_toolkit", reason='pip install "minivllm[chat]"')
    hidden = "import sys; sys.modules['prompt_toolkit'] = None\n" if plain else ""
    (tmp_path / "sitecustomize.py").write_text(hidden)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    small = ["--set", "max_num_seqs=2", "--set", "num_kvcache_blocks=64", "--max-tokens", "400"]
    small += ["--set", "sampling.ignore_eos=true"]
    state = {"XDG_STATE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1"}
    terminal = Terminal("chat", *small, PYTHONPATH=path, **state)
    prompt = "> " if plain else "\x1b[?2004h"  # the latter switches bracketed paste on
    try:
        terminal.until("/help shows the commands")
        for _ in range(2):
            terminal.until(prompt)
            terminal.type("Tell me a story about a fox.\r")
            terminal.until(" was ")  # a word of the answer
            os.killpg(terminal.process.pid, signal.SIGINT)
            terminal.until(chat.STOPPED[:24])
        terminal.until(prompt)
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0, terminal.text[-1000:]
        if not plain:
            assert "+Tell me a story about a fox." in (tmp_path / "minivllm" / "chat_history").read_text()
    finally:
        terminal.close()


def test_the_address_of_a_server_in_place_of_a_model_is_refused_with_the_flag_to_use(capsys):
    assert main(["chat", "http://localhost:8000"]) == ConfigError.exit_code
    assert capsys.readouterr().err.endswith("the address of a server is --url http://localhost:8000\n")
