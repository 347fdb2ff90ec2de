"""``minivllm run-batch``: OpenAI's forms, errors of lines, and what an interrupted run leaves behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("fastapi")

from minivllm.cli import main
from minivllm.server import batch
from minivllm.server.app import ROUTES
from minivllm.server.batch import URLS, LineError, lines_of, read_request

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ENGINE = ["--max-model-len", "512", "--num-kvcache-blocks", "256", "--max-num-seqs", "8"]
HI = {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0, "max_tokens": 8}


def line(custom_id, url, body, **more):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more})


def write(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def results(path):
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in found)
    assert len({one["id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found if one["custom_id"]}, found


def test_each_url_is_a_route():
    assert set(URLS) <= {path for path, _, method, *_ in ROUTES if method == "POST"}


def test_results_of_all_kinds_and_errors_of_their_lines(tmp_path, capsys):
    lines = [
        line("chat", CHAT, HI),
        line("text", COMPLETION, {"prompt": ["Once", "There"], "max_tokens": 3, "temperature": 0}),
        line("embed", "/v1/embeddings", {"input": "a", "dimensions": 3}),
        line("score", "/v1/score", {"text_1": "a", "text_2": ["a", "b"]}),
        line("rank", "/v1/rerank", {"query": "a", "documents": ["b", "a"]}),
        line("reply", "/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
        "",
        line("wrong", CHAT, {**HI, "max_tokens": -1}),
        "{broken",
        line("chat", CHAT, HI),
        line("stream", CHAT, {**HI, "stream": True}),
    ]
    out = tmp_path / "out.jsonl"
    command = ["run-batch", "pocket", "-i", write(tmp_path / "in.jsonl", lines), "-o", str(out), *ENGINE]
    assert main(command) == 1
    assert "6 answers and 4 errors" in capsys.readouterr().err
    named, found = results(out)
    assert len(found) == 10
    for name in ("chat", "text", "embed", "score", "rank", "reply"):
        response = named[name]["response"]
        assert response["status_code"] == 200 and named[name]["error"] is None, response
        assert named[name]["id"] == f"batch_req_{response['request_id']}"
    body = named["chat"]["response"]["body"]
    assert body["object"] == "chat.completion" and body["choices"][0]["message"]["content"].startswith("12 + 7")
    assert len(named["text"]["response"]["body"]["choices"]) == 2
    assert len(named["embed"]["response"]["body"]["data"][0]["embedding"]) == 3
    assert [one["index"] for one in named["rank"]["response"]["body"]["results"]] == [1, 0]
    assert named["wrong"]["response"]["status_code"] == 400
    assert named["wrong"]["response"]["body"]["error"]["param"] == "max_tokens"
    errors = {one["error"]["line"]: one["error"]["code"] for one in found if one["error"]}
    assert errors == {9: "invalid_json_line", 10: "duplicate_custom_id", 11: "invalid_body"}

    before = out.read_bytes()
    assert main(command) == 2, "results are never overwritten"
    assert "--resume continues them" in capsys.readouterr().err and out.read_bytes() == before
    kept = before.splitlines(keepends=True)
    out.write_bytes(b"".join(kept[:-2]) + kept[-1][:40])  # as after a crash in the middle of a line
    assert main([*command, "--resume", "--concurrency", "2"]) in (0, 1)
    assert "8 lines skipped" in capsys.readouterr().err
    again, found = results(out)
    assert again.keys() == named.keys() and len(found) == 10


def test_each_custom_id_has_one_result_whatever_is_wrong_with_its_lines(tmp_path, capsys):
    """A repeated custom_id is found beside a wrong line, also if that line was finished by an earlier run."""
    score = {"text_1": "a", "text_2": "b"}
    lines = [
        line("a", "/nowhere", {}),
        line("a", "/v1/score", score),
        line("b", "/v1/score", score),
        line("b", "/v1/score", {**score, "stream": True}),
    ]
    out = tmp_path / "out.jsonl"
    parser = "minivllm.plugins.parser.hermes"
    chosen = ["--allow-target", parser, "--set", f'server.tool_parser="{parser}:Hermes"']
    command = ["run-batch", "-i", write(tmp_path / "in.jsonl", [*lines, line("c", CHAT, HI)]), "-o", str(out)]
    command += [*ENGINE, *chosen]

    def codes():
        named, found = results(out)
        assert len(found) == 5 and named.keys() == {"a", "b", "c"}
        assert named["a"]["error"]["code"] == "invalid_url"
        assert named["b"]["response"]["status_code"] == 200
        assert named["c"]["response"]["status_code"] == 200, "a parser of --allow-target serves chats"
        return {one["error"]["line"]: one["error"]["code"] for one in found if one["error"]}

    assert main(command) == 1
    assert codes() == {1: "invalid_url", 2: "duplicate_custom_id", 4: "duplicate_custom_id"}
    done = out.read_bytes().splitlines(keepends=True)
    kept = [text for text in done if b'"a"' in text or b'"line": 4' in text]
    assert len(kept) == 2
    out.write_bytes(b"".join(kept))
    assert main([*command, "--resume"]) == 1
    assert "2 answers and 1 errors, 2 lines skipped" in capsys.readouterr().err
    assert codes() == {1: "invalid_url", 2: "duplicate_custom_id", 4: "duplicate_custom_id"}


@pytest.mark.parametrize(
    "values, text",
    [
        (['server.tool_parser="nope"'], "server.tool_parser='nope': there are"),
        (['server.reasoning_parser="nope"'], "server.reasoning_parser='nope': there are"),
        (['server.steering_dir="/missing"', "server.admin=true"], "server.steering_dir='/missing': no such folder"),
        (['chat_template="missing.jinja"'], "missing.jinja"),
    ],
)
def test_a_wrong_configuration_is_found_before_the_engine_starts(tmp_path, monkeypatch, capsys, values, text):
    monkeypatch.setattr("minivllm.server.batch.make_client", None)
    source = write(tmp_path / "in.jsonl", [line("a", CHAT, HI)])
    flags = [part for value in values for part in ("--set", value)]
    assert main(["run-batch", "-i", source, "-o", str(tmp_path / "out.jsonl"), *flags]) == 2
    assert text in capsys.readouterr().err


def test_an_interrupted_run_keeps_its_results_and_resumes(tmp_path):
    long = {"prompt": "Once", "max_tokens": 490, "ignore_eos": True, "temperature": 0}
    lines = [line(f"short {i}", COMPLETION, {"prompt": "Once", "max_tokens": 1}) for i in range(4)]
    lines += [line(f"long {i}", COMPLETION, long) for i in range(60)]
    out = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", lines)
    argv = [sys.executable, "-m", "minivllm", "run-batch", "-i", source, "-o", str(out), *ENGINE]
    child = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        end = time.monotonic() + 90
        while not out.exists() or out.read_text().count("\n") < 4:
            assert child.poll() is None and time.monotonic() < end, child.stderr.read()
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130 and "interrupted; --resume continues" in err
    named, found = results(out)
    assert {f"short {i}" for i in range(4)} <= named.keys() and len(found) < 64
    rest = [one for one in lines if json.loads(one)["custom_id"] not in named][:2]
    few = [one for one in lines if json.loads(one)["custom_id"] in named] + rest
    write(tmp_path / "in.jsonl", few)
    done = subprocess.run([*argv, "--resume"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    again, found = results(out)
    assert len(found) == len(few) and again.keys() == {json.loads(one)["custom_id"] for one in few}


@pytest.mark.parametrize(
    "text, code",
    [
        ("[]", "invalid_line"),
        ("nope", "invalid_json_line"),
        ("[" * 10**5, "invalid_json_line"),
        (line("", CHAT, {}), "invalid_custom_id"),
        (line(5, CHAT, {}), "invalid_custom_id"),
        (line("a" * 513, CHAT, {}), "invalid_custom_id"),
        (line("a", CHAT, {}, method="GET"), "invalid_method"),
        (line("a", "/metrics", {}), "invalid_url"),
        (line("a", ["x"], {}), "invalid_url"),
        (line("a", CHAT, []), "invalid_body"),
        (line("a", "/v1/responses", {"background": True}), "invalid_body"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(text, code):
    with pytest.raises(LineError, match="line 7") as refused:
        read_request(text.encode(), 7, {})
    assert refused.value.code == code and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "text, why",
    [
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "has 5000 digits; expected at most 40"),
        (b"[" * 100_000, "nested deeper than Python can parse; use fewer levels"),
        ('{"custom_id": "a"}'.encode("utf-16"), "not UTF-8; save the file as UTF-8"),
        (b'{"custom_id": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_line_that_is_no_json_is_refused_in_words_of_the_format(text, why):
    with pytest.raises(LineError, match=f"^line 7: .*{why}") as refused:
        read_request(text, 7, {})
    assert refused.value.code == "invalid_json_line" and "Python" not in str(refused.value).replace(why, "")


def test_a_long_line_costs_no_more_than_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("minivllm.server.batch.LONGEST", 100)
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"x" * 1000 + b"\n" + b"short\n" + b"y" * 101)
    with open(path, "rb") as source:
        found = list(lines_of(source))
    assert [(number, len(text)) for number, text in found] == [(1, 101), (2, 6), (3, 101)]
    with pytest.raises(LineError, match="more than 100 bytes"):
        read_request(found[0][1], 1, {})


@pytest.mark.parametrize(
    "flags, text",
    [
        (["-i", "missing.jsonl", "-o", "o.jsonl"], "there is no such file"),
        (["-i", "in.jsonl", "-o", "in.jsonl"], "is the input"),
        (["-i", "in.jsonl", "-o", "o.jsonl", "--concurrency", "0"], "expected a positive number"),
        (["-i", "in.jsonl", "-o", "other.jsonl", "--resume"], "not the output of a batch"),
        (["-i", "in.jsonl", "-o", "list.jsonl", "--resume"], "list.jsonl: not the output of a batch"),
        (["-i", "in.jsonl", "-o", "deep.jsonl", "--resume"], "deep.jsonl: not the output of a batch"),
    ],
)
def test_wrong_flags(tmp_path, monkeypatch, capsys, flags, text):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [line("a", CHAT, HI)])
    write(tmp_path / "other.jsonl", ['{"a": 1}'])
    write(tmp_path / "list.jsonl", ['{"custom_id": [], "error": null}'])
    write(tmp_path / "deep.jsonl", ["[" * 100_000])
    assert main(["run-batch", *flags]) == 2
    assert text in capsys.readouterr().err
    assert (tmp_path / "other.jsonl").read_text() == '{"a": 1}\n'


class FullDisk:
    """A file that takes a number of bytes and then as much of a line as there is room for, like a full disk."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, line):
        wrote = self._file.write(line[: self.room])
        if not wrote:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= wrote
        return wrote


@pytest.mark.parametrize("room", [1000, 0])
def test_a_result_that_the_disk_cannot_hold_ends_the_batch_and_resume_continues_it(tmp_path, monkeypatch, capfd, room):
    out = tmp_path / "out.jsonl"
    source = write(
        tmp_path / "in.jsonl", [line(str(i), COMPLETION, {"prompt": "a", "max_tokens": 1}) for i in range(12)]
    )
    command = ["run-batch", "pocket", "-i", source, "-o", str(out), *ENGINE]
    real = open
    with monkeypatch.context() as patched:
        patched.setattr(
            batch,
            "open",
            lambda *args, **more: FullDisk(real(*args, **more), room) if "ab" in args else real(*args, **more),
            raising=False,
        )
        assert main(command) == 5
    reported = capfd.readouterr().err
    assert f"{out}: a result cannot be written" in reported and "--resume" in reported and "Traceback" not in reported
    some = results(out)[1]
    assert len(some) < 12 and bool(some) == bool(room)
    assert main([*command, "--resume"]) == 0
    assert set(results(out)[0]) == {str(i) for i in range(12)}
