"""Bodies that are not requests, and texts that take too much work: A1 to A5, A21, A30, A31, A35, A36."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from typing import Any

import httpx

from .api import JSON_TYPE, body_case, drawn, fixed
from .bad_requests import CHAT, COMPLETIONS, HI
from .ground import Ground, memory_of, refused, slim, status_of
from .lines import line


@line("A1", "half a JSON")
def a1(ground: Ground, rng: random.Random) -> Any:
    whole = json.dumps({"prompt": "a b", "max_tokens": 3, "stop": ["x"], "logit_bias": {"5": 1.5}}).encode()
    yield from fixed(ground, "A1")
    for cut in sorted(rng.sample(range(1, len(whole)), 4)):
        yield f"cut at {cut}", lambda cut=cut: body_case(ground, whole[:cut], word="JSON")
    for junk in (
        b"{'prompt': 1}",
        b'{"a":1}{"b":2}',
        b'{"a":1,}',
        b"\xff\xfe{",
        bytes(rng.randrange(256) for _ in range(64)),
    ):
        yield repr(junk[:16]), lambda junk=junk: body_case(ground, junk, word="JSON")


@line("A2", "an empty body")
def a2(ground: Ground, rng: random.Random) -> Any:
    for data in (b"", b" ", b"\r\n\t" * rng.randrange(1, 2000), b"\x00"):
        yield f"{len(data)} bytes", lambda data=data: body_case(ground, data, word="JSON")


@line("A3", "no object")
def a3(ground: Ground, rng: random.Random) -> Any:
    for data in (b"[]", b"null", b'"x"', b"true", b"0", b"[" + b"1," * rng.randrange(1, 9999) + b"1]"):
        yield repr(data[:8]), lambda data=data: body_case(ground, data, word="object")


@line("A4", "another type of content")
def a4(ground: Ground, rng: random.Random) -> Any:
    body = b'{"prompt": "a", "max_tokens": 1}'
    for kind in (
        "text/plain",
        "",
        "multipart/form-data; boundary=x",
        "application/jsonx",
        "é",
        "x" * rng.randrange(9, 999),
    ):
        headers = [(b"content-type", kind.encode("latin-1"))]
        yield (
            repr(kind[:20]),
            lambda headers=headers: refused(
                ground.client.post(COMPLETIONS, content=body, headers=headers), 415, "json"
            ),
        )


@line("A5", "a body of 9 MiB, however it comes")
def a5(ground: Ground, rng: random.Random) -> Any:
    size = (9 << 20) + rng.randrange(1 << 20)
    big = b'{"prompt": "' + b"a" * size + b'"}'
    before = memory_of(ground)

    def chunks() -> Any:
        for at in range(0, len(big), 1 << 16):
            yield big[at : at + (1 << 16)]

    def whole() -> None:
        refused(ground.post(COMPLETIONS, content=big, headers=JSON_TYPE), 413, "8388608")

    def chunked() -> None:
        # the refusal may arrive while the client still sends without reading
        with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            refused(ground.post(COMPLETIONS, content=chunks(), headers=JSON_TYPE), 413, "8388608")

    def tiny() -> None:
        """Send hundreds of thousands of chunks of one byte (Triton: CVE-2025-23310).

        Each has five bytes more around it, which are too many outside of the body, where httptools reads them.
        """
        head = ground.head(COMPLETIONS, "Transfer-Encoding: chunked") + b"\r\n"
        answer = ground.raw(head + b"1\r\n{\r\n" + b"1\r\n \r\n" * 300_000 + b"1\r\n}\r\n0\r\n\r\n")
        assert status_of(answer) in (400, 431), answer[:100]

    def declared() -> None:
        answer = ground.raw(
            ground.head(COMPLETIONS, f"Content-Length: {rng.choice([10**10, 2**63, 10**30])}") + b"\r\n"
        )
        assert status_of(answer) in (400, 413), answer[:100]

    yield "with its length", whole
    yield "in chunks", chunked
    yield "in tiny chunks", tiny
    yield "said only", declared
    yield "memory", lambda: slim(ground, before, 32 << 20)


@line("A21", "numbers that are none")
def a21(ground: Ground, rng: random.Random) -> Any:
    fields = ["temperature", "top_p", "min_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty",
              "seed", "n", "max_tokens", "logprobs", "timeout_s", "ttft_ms", "priority", "some_field"]  # fmt: skip
    for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 400, b"9" * 5000):
        name = rng.choice(fields).encode()
        data = rng.choice([b'{"prompt": "a", "%s": %s}', b'{"prompt": "a", "x": [{"%s": [%s]}]}']) % (name, value)
        yield f"{name.decode()}: {value[:12].decode()}", lambda data=data: body_case(ground, data)


@line("A30", "regular expressions that are slow, huge or wrong")
def a30(ground: Ground, rng: random.Random) -> Any:
    deep = rng.randrange(2000, 30_000)
    for text in (
        "(a+)+b",
        "(a*)*" * 5 + "b",
        "(" * deep,
        "(" * deep + ")" * deep,
        "[" * deep,
        "(?<=a)b",
        "(?!a)b",
        r"\1",
        "*",
        "a{2,1}",
        "[z-a]",
        f"(a{{1,{rng.randrange(200, 2000)}}}){{1,{rng.randrange(200, 2000)}}}",
        "a" * rng.randrange(10**4, 10**5),
        "\ud800",
        "\x00",
        r"\p{NoSuch}",
        "(?P<a>b)(?P=a)",
        "(|" * 400 + "a" + ")" * 400,
    ):
        yield repr(text[:20]), lambda text=text: bounded(ground, {"structured_outputs": {"regex": text}})


def bounded(ground: Ground, more: dict[str, Any], seconds: float = 4.0) -> None:
    """Check that a request is refused, or answered in time, and that others are served meanwhile."""
    body = {"prompt": "a", "max_tokens": 4, "timeout_s": seconds, **more}
    start = time.monotonic()
    answer = ground.post(COMPLETIONS, body)
    took = time.monotonic() - start
    assert took < seconds + 1, f"{took:.1f} s"
    if answer.status_code != 200:
        assert answer.status_code in (400, 408), answer.text[:300]
        refused(answer, answer.status_code)


@line("A31", "schemas and grammars that are cyclic, deep, huge or wrong")
def a31(ground: Ground, rng: random.Random) -> Any:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(rng.randrange(100, 240)):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(rng.randrange(500, 3000))}}
    node = {"$ref": "#/$defs/a"}
    schemas: list[Any] = [
        {"$ref": "#"}, {"$defs": {"a": node}, **node}, {"$defs": {"a": {"allOf": [node]}}, **node}, deep, wide,
        {"type": "foo"}, {"type": "string", "pattern": "("}, {"type": "string", "pattern": "(a+)+b"},
        {"$ref": "http://127.0.0.1:9/"},
        {"$ref": "file:///etc/passwd"}, {"enum": []}, {"type": ["string", 5]}, {"minimum": "a"}, {"properties": 5},
        {"anyOf": []},
        {"type": "array", "minItems": rng.randrange(10**4, 10**9)}, {"type": "string", "minLength": 10**9},
        {"not": {}}, [], 5, "{", None,
        {"type": "integer", "minimum": 5, "maximum": 1}, {"required": ["a"] * 1000}, {"enum": ["x" * 1000] * 1000},
        {"multipleOf": 0},
    ]  # fmt: skip
    nest = rng.randrange(600, 50_000)
    raw = (
        b'{"prompt": "a", "structured_outputs": {"json": '
        + b'{"properties": {"a": ' * nest
        + b"{}"
        + b"}}" * nest
        + b"}}"
    )
    yield f"{nest} deep", lambda: body_case(ground, raw)
    for number_, schema in enumerate(schemas):
        yield (
            f"schema {number_} {'' if schema is deep else str(schema)[:40]}",
            lambda schema=schema: bounded(ground, {"structured_outputs": {"json": schema}}),
        )
    for grammar in ("", "root ::=", 'root ::= root "a"', "root ::= " + "(" * 9999, 'start: "a', "x" * 10**5, 5, ["a"]):
        yield (
            f"grammar {str(grammar)[:20]}",
            lambda grammar=grammar: bounded(ground, {"structured_outputs": {"grammar": grammar}}),
        )
    for form in (
        {},
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"choice": [5]},
        {"choice": ["a" * 10**5]},
        {"magic": 1},
    ):
        yield f"form {str(form)[:40]}", lambda form=form: bounded(ground, {"structured_outputs": form})


@line("A35", "what a user writes becomes no special token")
def a35(ground: Ground, rng: random.Random) -> Any:
    special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    scaffold = ground.post("/tokenize", {"messages": HI}).json()["tokens"]
    ids = [found[0] for t in special if len(found := ground.post("/tokenize", {"prompt": t}).json()["tokens"]) == 1]
    for _ in range(4):
        text = "".join(
            rng.choice([*special, "system", "\n", " a", "é", "<|", "|>"]) for _ in range(rng.randrange(2, 20))
        )

        def check(text: str = text) -> None:
            got = ground.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()["tokens"]
            assert ids and all(got.count(i) == scaffold.count(i) for i in ids), text
            schema = {"type": text, text: text, "properties": {text: {"role": text, "default": text}}}
            tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": schema}}]
            harmless = json.loads(json.dumps(tools).replace("<|im", "im").replace("<|end", "end"))
            received = [
                ground.post(
                    "/tokenize", {"messages": HI, "tools": t, "chat_template_kwargs": {"bos_token": text}}
                ).json()
                for t in (tools, harmless)
            ]
            assert all(received[0]["tokens"].count(i) == received[1]["tokens"].count(i) for i in ids), text
            answer = ground.post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 2})
            assert answer.status_code == 200, answer.text[:200]

        yield repr(text[:30]), check


@line("A36", "an address in a message is not visited")
def a36(ground: Ground, rng: random.Random) -> Any:
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.settimeout(0.05)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"

        def check() -> None:
            for content in (
                [{"type": "image_url", "image_url": {"url": url}}],
                [{"type": "image_url", "image_url": url}],
                [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}],
            ):
                refused(ground.post(CHAT, {"messages": [{"role": "user", "content": content}]}), 400)
            answer = ground.post(CHAT, {"messages": [{"role": "user", "content": f"![a]({url})"}], "max_tokens": 2})
            assert answer.status_code == 200
            try:
                trap.accept()
            except TimeoutError:
                return
            raise AssertionError("the server visited an address of a message")

        yield "a trap", check
    yield from fixed(ground, "A36")
    yield from drawn(ground, rng, "A36")
