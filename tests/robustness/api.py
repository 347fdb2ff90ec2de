"""Fields of requests with wrong values (A6 to A43).

The fixed cases are the cases of ``bad_requests``.  The others are drawn: wrong values of every kind for every field, so
that a check must refuse the whole class and not only the example.
"""

from __future__ import annotations

import math
import random
import threading
import time
from typing import Any

from .bad_requests import BAD, BODIES, CHAT, COMPLETIONS, HI
from .ground import Ground, refused
from .lines import line

JSON_TYPE = {"Content-Type": "application/json"}
SECOND = 1.5  # the most seconds of a refusal, on a machine with other load


def fixed(ground: Ground, prefix: str) -> Any:
    """Yield the cases of the tables whose name begins with the id of a line."""
    for name, ((path, body), status, *words) in BAD.items():
        if name.split(" ")[0] == prefix:
            yield (
                name,
                lambda path=path, body=body, status=status, words=words: quick(ground, path, body, status, *words),
            )
    for name, (data, status, word) in BODIES.items():
        if name.split(" ")[0] == prefix:
            yield (
                name,
                lambda data=data, status=status, word=word: refused(
                    ground.post(COMPLETIONS, content=data, headers=JSON_TYPE), status, word
                ),
            )


def quick(ground: Ground, path: str, body: Any, status: int, *words: str) -> None:
    start = time.monotonic()
    answer = ground.post(path, body)
    assert time.monotonic() - start < SECOND, "a refusal took long"
    refused(answer, status, *words)


def either(rng: random.Random, **more: Any) -> tuple[str, dict[str, Any]]:
    """Draw a request that is valid except for these fields."""
    head = {"max_tokens": 4, **rng.choice([{}, {"stream": True}])}  # the default of a chat would not fit in the cache
    path, body = rng.choice([(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})])
    return path, {**body, **head, **more}


WRONG_TYPES = ("7", "", [1], {}, {"a": 1}, [[]], "NaN", "1e3")


def number(low: float, high: float, whole: bool = False, top: int = 10**9) -> Any:
    """Return a function that draws wrong values for a number from ``low`` to ``high``: other types and sizes."""

    def draw(rng: random.Random) -> Any:
        below, above = low - rng.choice([1, 1e-3, 7, 1e6]), high + rng.choice([1, 1e-3, 100, float(top)])
        found: list[Any] = [rng.choice(WRONG_TYPES), below, above, float("nan"), float("inf"), -float("inf"), 10**39]
        if whole:
            found = [int(v) if isinstance(v, float) and abs(v) < 1e300 and v == v else v for v in found]
            found += [low + 0.5, True]
        fits = [v for v in found if type(v) is int or (type(v) is float and math.isfinite(v) and not whole)]
        fits = [v for v in fits if low <= v <= high]
        found = [v for v in found if not any(v is f for f in fits)]
        return rng.choice(found)

    return draw


# line -> field -> function that draws a wrong value of it
FIELDS: dict[str, dict[str, Any]] = {
    "A13": {"max_tokens": number(1, 10**6, whole=True)},
    "A18": {"n": number(1, 128, whole=True)},
    "A20": {
        "temperature": number(0, 2), "top_p": number(1e-9, 1), "min_p": number(0, 1),
        "presence_penalty": number(-2, 2), "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(1e-9, math.inf), "top_k": number(-1, math.inf, whole=True),
    },
    "A22": {"seed": number(-(2**63), 2**63 - 1, whole=True, top=2**66)},
    "A23": {"logprobs": lambda rng: rng.choice([-1, 10**6, "7", [1], {}, 1.5, 21 + rng.randrange(999)])},
    "A24": {"logit_bias": lambda rng: rng.choice([
        {str(rng.randrange(4096, 2**31)): 1}, {rng.choice(["a", "1.5", "-1", " 1", "1_0", "٣", "0x1", ""]): 1},
        {"1": rng.choice([101, -101, float("nan"), "5", None, [], True])}, [1], "a", 5,
        {str(i): 1 for i in range(4000, 9000)},
    ])},
    "A25": {
        "prompt": lambda rng: rng.choice([
            [2**63], [-1], [rng.randrange(10**5, 2**64)], [1, 2, -rng.randrange(1, 2**40)], [[1], [10**6]], [2**31],
        ]),
        "stop_token_ids": lambda rng: rng.choice([[-1], [10**6], [2**63], ["a"], [1.5], [True], "1", 1, {}]),
        "allowed_token_ids": lambda rng: rng.choice([[-1], [10**6], [2**63], ["a"], [1.5], {}, "a"]),
    },
    "A28": {"stop": lambda rng: rng.choice([
        ["x"] * rng.randrange(17, 10**4), "x" * rng.randrange(300, 10**6), rng.randrange(10**6), [1], [["a"]], {},
        [None],
        "",
    ])},
    "A29": {"prompt": lambda rng: rng.choice([
        [1, "a"], ["a", 1], [1, None], [[1], "a", None], {"a": 1}, [{}], [[[1]]], 5, True, [1.0], [1, True],
    ])},
    "A32": {"messages": lambda rng: rng.choice([
        "a", 5, [], {}, [5], ["a"], [[]], [{}], [{"role": "user"}], [{"content": "a"}],
        [{"role": rng.choice(["root", "", 5, None, ["user"]]), "content": "a"}],
        [{"role": "user", "content": rng.choice([None, 5, {}, [5], [{}], [{"type": "text"}], [{"type": "magic"}]])}],
        [{"role": "user", "content": [{"type": "text", "text": rng.choice([5, None, []])}]}],
        [{"role": "tool", "content": "a", "tool_call_id": rng.choice([5, [], {}])}],
        [{"role": "assistant", "tool_calls": rng.choice([5, "a", [5], [{}], [{"function": 5}]])}],
    ])},
    "A34": {"chat_template_kwargs": lambda rng: rng.choice([
        {rng.choice(["tokenize", "chat_template", "messages", "tools", "documents", "add_generation_prompt"]): True},
        [1], 5, "a",
    ])},
    "A36": {"messages": lambda rng: [{"role": "user", "content": [{
        "type": rng.choice(["image_url", "input_audio", "video_url", "file", "image"]),
        "image_url": {"url": rng.choice(["http://127.0.0.1:9/x", "file:///etc/passwd", "data:image/png;base64,AA=="])},
    }]}]},
    "A41": {"cache_salt": lambda rng: rng.choice(["x" * rng.randrange(257, 10**5), "é" * 200, 5, {}, [], True, ""])},
    "A43": {"stream_options": lambda rng: rng.choice([{"include_use": True}, 5, "a", [1], {"include_usage": "maybe"}])},
}  # fmt: skip
MANY = 6  # number of drawn cases of a line
IN_CHAT, IN_TEXT = {"messages", "chat_template_kwargs"}, {"prompt"}


def drawn(ground: Ground, rng: random.Random, id: str) -> Any:
    for number_ in range(MANY if id in FIELDS else 0):
        field = rng.choice(sorted(FIELDS[id]))
        value = FIELDS[id][field](rng)
        path, body = either(rng, **{field: value})
        if field in IN_CHAT:
            path, body = CHAT, {"messages": HI, field: value}
        elif field in IN_TEXT:
            path, body = COMPLETIONS, {field: value}
        elif path == CHAT and field == "logprobs":
            path, body = CHAT, {"messages": HI, "logprobs": True, "top_logprobs": value}
        if field == "stream_options":
            body["stream"] = True

        def check(path: str = path, body: Any = body, field: str = field) -> None:
            answer = ground.post(path, body)
            refused(answer, 400)
            reported = answer.json()["error"]
            about = f"{reported['param']} {reported['message']}"
            finite = any(word in about for word in ("NaN", "Infinity", "out of range", "deep"))
            assert field in about or finite or field in ("prompt", "messages", "stop"), reported

        yield f"{number_}: {field}={str(value)[:60]}", check


def table_line(id: str, what: str) -> None:
    @line(id, what)
    def cases(ground: Ground, rng: random.Random) -> Any:
        yield from fixed(ground, id)
        yield from drawn(ground, rng, id)


for id_, what_ in {
    "A6": "no prompt, no messages",
    "A7": "unknown model",
    "A10": "nearly a field",
    "A13": "max_tokens",
    "A14": "max_tokens far too many",
    "A15": "a prompt that is too long",
    "A16": "prompt and answer too long",
    "A17": "fits the model, not the cache",
    "A18": "n",
    "A19": "best_of",
    "A20": "numbers out of range",
    "A22": "seed",
    "A23": "logprobs",
    "A24": "logit_bias",
    "A25": "token ids",
    "A26": "an empty prompt",
    "A27": "a batch of 100,000",
    "A28": "stop",
    "A29": "a prompt of mixed things",
    "A32": "messages",
    "A33": "a chat template",
    "A34": "variables of the template",
    "A37": "prompt_embeds",
    "A41": "cache_salt",
    "A43": "stream_options",
}.items():
    table_line(id_, what_)


def body_case(ground: Ground, data: bytes, status: int = 400, word: str = "", **headers: str) -> None:
    refused(ground.post(COMPLETIONS, content=data, headers={**JSON_TYPE, **headers}), status, *([word] if word else []))


@line("A24 beside", "ids out of range while others generate: their texts stay")
def beside(ground: Ground, rng: random.Random) -> Any:
    def check() -> None:
        body = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        alone = ground.post(COMPLETIONS, body).json()["choices"][0]["text"]
        texts: list[str] = []
        two = [
            threading.Thread(target=lambda: texts.append(ground.post(COMPLETIONS, body).json()["choices"][0]["text"]))
            for _ in range(2)
        ]
        for thread in two:
            thread.start()
        for _ in range(10):
            id = rng.choice(["A24", "A25"])
            field = rng.choice(sorted(FIELDS[id]))
            answer = ground.post(COMPLETIONS, {"prompt": "a", field: FIELDS[id][field](rng)})
            assert answer.status_code == 400, answer.text[:200]
        for thread in two:
            thread.join()
        assert texts == [alone, alone]

    yield "two streams", check


@line("S1", "fuzz: requests with changed, swapped and nested values harm nobody")
def s1(ground: Ground, rng: random.Random) -> Any:
    values: list[Any] = [
        None,
        True,
        0,
        -1,
        1.5,
        2**31,
        2**63,
        10**30,
        1e308,
        "",
        "a",
        "\x00",
        "\ud83d\ude00",
        "a" * 3000,
        [],
        [1],
        [[1]],
        ["a"],
        {},
        {"a": 1},
        {"type": "json_object"},
        {"type": "function"},
        [{"role": "user", "content": "a"}],
        [{}],
        "auto",
        "required",
    ]
    names = sorted(
        ground.client.get("/openapi.json").json()["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]["properties"]
    )

    def check() -> None:
        for _ in range(8):
            path, body = rng.choice(
                [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI}), ("/tokenize", {"prompt": "a"})]
            )
            body = {
                **body,
                "max_tokens": 3,
                **{rng.choice(names): rng.choice(values) for _ in range(rng.randrange(1, 5))},
            }
            if path != "/tokenize":
                body["timeout_s"] = 5
            answer = ground.post(path, body)
            assert answer.status_code in (200, 400, 404, 408, 413), f"{answer.status_code} {body} {answer.text[:300]}"
            if answer.status_code != 200:
                refused(answer, answer.status_code)

    for number_ in range(6):
        yield str(number_), check
