"""Images over HTTP: OpenAI's, Anthropic's and Ollama's forms, limits, and refusals that leave other requests alone."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import zlib

import numpy as np
import pytest
from http_helpers import Running
from image_models import make, picture, write_tokenizer
from PIL import Image

from minivllm import LLM, SamplingParams
from minivllm.errors import RequestError
from minivllm.runtime.images import decode

ENGINE = {"device": "cpu", "dtype": "float32", "max_model_len": 400, "num_kvcache_blocks": 200, "max_num_seqs": 8}
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    make(path, "qwen2_5_vl")
    write_tokenizer(path, "qwen2_5_vl")
    return path


@pytest.fixture(scope="module")
def server(folder):
    made = Running(engine={**ENGINE, "model": str(folder)}, max_body_bytes=64 << 20)
    yield made
    made.close()


def file_of(pixels, kind="PNG", **more):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **more)
    return out.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data, kind="image/png"):
    return {"type": "image_url", "image_url": {"url": data_url(data, kind)}}


FIRST, SECOND = picture(1, 90, 90), picture(2, 60, 120)


def chat(server, content, **more):
    body = {"model": "x", "messages": [{"role": "user", "content": content}], **GREEDY, **more}
    body["model"] = server.app.service.names[0]
    return server.client.post("/v1/chat/completions", json=body)


@pytest.fixture(scope="module")
def expected(folder):
    """The answer of ``LLM.chat`` to two images, and the tokens of its prompt."""
    content = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": Image.fromarray(FIRST)},
        {"type": "text", "text": "b"},
        {"type": "image", "image": SECOND},
    ]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(model=str(folder), **ENGINE) as llm:
        messages = [{"role": "user", "content": content}]
        output = llm.chat(messages, params, use_tqdm=False)[0]
        streamed = list(llm.chat_stream(messages, params))[-1].output
        assert streamed.outputs[0].text == output.outputs[0].text
    return output.outputs[0].text, len(output.prompt_token_ids)


def contents():
    first, second = file_of(FIRST), file_of(SECOND, "WEBP", lossless=True)
    return [{"type": "text", "text": "a"}, part(first), {"type": "text", "text": "b"}, part(second, "image/webp")]


def sum_of(usage):
    """The tokens of the prompt in Anthropic's form, which counts cached ones apart."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_openai_anthropic_and_ollama_read_the_same_images_as_python(server, expected):
    answer = chat(server, contents()).json()
    assert answer["choices"][0]["message"]["content"] == expected[0]
    assert answer["usage"]["prompt_tokens"] == expected[1] > 30

    def block(data, kind):
        source = {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
        return {"type": "image", "source": source}

    text_a, text_b = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    second = block(file_of(SECOND, "BMP"), "image/bmp")
    blocks = [text_a, block(file_of(FIRST), "image/png"), text_b, second]
    body = {"model": server.app.service.names[0], "messages": [{"role": "user", "content": blocks}], **GREEDY}
    answer = server.client.post("/v1/messages", json=body).json()
    assert answer["content"][0]["text"] == expected[0] and sum_of(answer["usage"]) == expected[1]

    images = [base64.b64encode(file_of(one)).decode() for one in (FIRST, SECOND)]
    same = chat(server, [part(file_of(FIRST)), part(file_of(SECOND)), {"type": "text", "text": "c"}]).json()
    message = {"role": "user", "content": "c", "images": images}
    body = {"model": server.app.service.names[0], "messages": [message], "stream": False, "options": GREEDY}
    body["options"] = {"temperature": 0, "num_predict": 8}
    found = server.client.post("/api/chat", json=body).json()
    assert found["message"]["content"] == same["choices"][0]["message"]["content"]
    del body["messages"]
    found = server.client.post("/api/generate", json={**body, "prompt": "c", "images": images}).json()
    assert found["response"] == same["choices"][0]["message"]["content"]
    assert found["prompt_eval_count"] == same["usage"]["prompt_tokens"]


def test_answers_to_images_have_the_asked_structure(server):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["cat", "dog"]}}}
    answer = chat(server, contents(), response_format=form, max_tokens=40)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) in ("cat", "dog")


def test_images_of_earlier_turns_are_read(server):
    turns = [
        {"role": "user", "content": [part(file_of(FIRST)), {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, part(file_of(SECOND))]},
    ]
    body = {"model": server.app.service.names[0], "messages": turns, **GREEDY}
    first = server.client.post("/v1/chat/completions", json=body).json()
    again = server.client.post("/v1/chat/completions", json=body).json()
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 30
    turns[0]["content"][0] = part(file_of(picture(3, 90, 90)))
    other = server.client.post("/v1/chat/completions", json=body).json()
    assert other["choices"][0]["message"]["content"] != first["choices"][0]["message"]["content"]


def bomb():
    """Return a PNG of a few bytes whose header has 40,000 x 40,000 pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def animation():
    out = io.BytesIO()
    frames = [Image.fromarray(picture(i)) for i in range(3)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


def bad_parts():
    good = file_of(FIRST)
    return {
        "remote": ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "are not opened"),
        "path": ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "are not opened"),
        "file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "are not opened"),
        "no_base64": ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "no ;base64"),
        "base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,***"}}, "malformed"),
        "media": (part(good, "image/svg+xml"), "media type"),
        "text": (part(b"hello", "image/png"), "no picture that can be read"),
        "cut": (part(good[: len(good) // 2]), "no picture that can be read"),
        "bomb": (part(bomb()), "more than 16777216 pixels"),
        "animation": (part(animation(), "image/gif"), "an animation"),
        "large": (part(file_of(np.zeros((4200, 4200), np.uint8))), "4200 x 4200 pixels"),
        "narrow": (part(file_of(picture(0, 4, 1000))), "of a ratio below"),
        "missing": ({"type": "image_url"}, "the image is missing"),
        "detail": ({"type": "image_url", "image_url": {"url": data_url(good), "detail": "low"}}, "expected auto"),
        "bytes": (part(b"x" * (decode.MAX_BYTES + 9)), "more than 20 MiB"),
    }


@pytest.mark.parametrize("name", bad_parts())
def test_a_bad_image_is_refused_with_400(server, name):
    wrong, text = bad_parts()[name]
    answer = chat(server, [{"type": "text", "text": "a"}, wrong])
    assert answer.status_code == 400, answer.text
    assert text in answer.json()["error"]["message"]


def test_too_many_images_and_truncation_are_refused(server, monkeypatch):
    answer = chat(server, [part(file_of(picture(i))) for i in range(17)])
    assert answer.status_code == 400 and "17 images; expected at most max_images=16" in answer.text
    answer = chat(server, contents(), truncate_prompt_tokens=20)
    assert answer.status_code == 400 and "truncate_prompt_tokens with images" in answer.text
    answer = chat(server, [part(file_of(picture(i, 168, 112))) for i in range(16)])
    assert answer.status_code == 400 and "the prompt has 435 tokens" in answer.text
    monkeypatch.setattr(server.app.service.images.reader, "max_tokens", 300)
    answer = chat(server, [part(file_of(picture(i, 168, 112))) for i in range(16)])
    assert answer.status_code == 400 and "the images have 312 tokens or more" in answer.text


def test_bad_images_leave_other_requests_unaffected(server):
    alone = chat(server, "hello").json()["choices"]
    seen = []

    def attack():
        for wrong, _ in (bad_parts()["bomb"], bad_parts()["cut"], bad_parts()["animation"]):
            seen.append(chat(server, [wrong]).status_code)

    threads = [threading.Thread(target=attack) for _ in range(3)]
    for thread in threads:
        thread.start()
    answers = [chat(server, "hello").json()["choices"] for _ in range(4)]
    for thread in threads:
        thread.join()
    assert seen == [400] * 9 and answers == [alone] * 4


def test_text_that_spells_the_placeholder_stays_text(server):
    plain = chat(server, "see <image> here")
    assert plain.status_code == 200
    both = chat(server, [{"type": "text", "text": "see <image> here"}, part(file_of(FIRST))])
    assert both.status_code == 200


def test_an_engine_without_images_names_the_reason(folder):
    made = Running(engine={**ENGINE, "model": str(folder), "max_images": 0})
    try:
        answer = chat(made, contents())
        assert answer.status_code == 400
        assert "reads text only (max_images=0)" in answer.json()["error"]["message"]
        assert chat(made, "hello").status_code == 200
    finally:
        made.close()


def test_the_size_of_arrays_and_pil_images_is_checked():
    big = Image.new("1", (decode.MAX_PIXELS // 1000 + 1, 1000))
    with pytest.raises(RequestError, match="in all: send a smaller one"):
        decode.decoded(big)
    with pytest.raises(RequestError, match="expected at least one"):
        decode.decoded(np.zeros((0, 4, 3), np.uint8))
    with pytest.raises(RequestError, match="a int; expected a PIL image"):
        decode.decoded(5)
    assert decode.decoded(np.zeros((4, 5), np.uint8)).size == (5, 4)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(picture(0, 20, 10)).save(turned, "JPEG", exif=exif)
    assert decode.decoded(turned.getvalue()).size == (10, 20)
    both = io.BytesIO()
    views = [Image.fromarray(picture(i, 20, 10)) for i in range(2)]
    views[0].save(both, "MPO", save_all=True, append_images=views[1:])
    assert decode.decoded(both.getvalue()).size == (20, 10)


def test_engines_in_other_processes_read_images(folder, expected):
    made = Running(engine={**ENGINE, "model": str(folder)}, replicas=2)
    try:
        answers = [chat(made, contents()).json() for _ in range(3)]
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == [expected[0]] * 3
        assert chat(made, [bad_parts()["cut"][0]]).status_code == 400
    finally:
        made.close()


def test_places_that_take_no_images_say_where_a_model_reads_them(server):
    name = server.app.service.names[0]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(FIRST)).decode()}
    use = {"type": "tool_use", "id": "a", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "see", "input_schema": {"type": "object"}}]
    seen = {"type": "input_image", "image_url": data_url(file_of(FIRST))}
    for path, body in (
        ("/v1/messages", {"max_tokens": 4, "messages": turns, "tools": tools}),
        ("/v1/responses", {"input": [{"role": "user", "content": [seen]}]}),
    ):
        answer = server.post(path, {"model": name, **body})
        assert answer.status_code == 400, answer.text
        assert "image encoder read images in user messages of chats" in answer.json()["error"]["message"]
