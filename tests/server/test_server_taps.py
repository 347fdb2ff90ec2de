"""The field ``taps``: operators read values of the model and add to them over HTTP; all other clients are refused."""

from __future__ import annotations

import io
import json
import random

import numpy as np
import pytest

pytest.importorskip("fastapi")

from http_helpers import Running

from minivllm import LLM, SamplingParams, Tap
from minivllm.cli import main
from minivllm.config import load_config
from minivllm.errors import ConfigError
from minivllm.server.openai.generate import numbers
from minivllm.server.openai.taps import read_npy

TALE = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 4, "temperature": 0}
POINT = "layers.3.residual"
MEAN, LAST = {"point": POINT, "read": "mean"}, {"point": "layers.0.q", "read": "last"}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A folder of vectors, right and wrong."""
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    with LLM("pocket", dtype="float32", num_kvcache_blocks=64, max_num_seqs=2) as llm:
        width = llm.tap_points()[POINT]
    np.save(folder / "calm.npy", rng.normal(size=width).astype(np.float32))
    np.save(folder / "narrow.npy", np.ones(3))
    np.save(folder / "square.npy", np.ones((4, 4)))
    np.save(folder / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    np.save(folder / "nan.npy", np.full(width, np.nan))
    np.save(folder / "huge.npy", np.full(width, 1e39))
    np.save(folder / "bytes.npy", np.ones((1 << 20) - 128, np.int8))
    np.save(folder / "large.npy", np.zeros(1 << 18))
    (folder / "text.npy").write_text("no array")
    np.save(folder.parent / "outside.npy", np.ones(width))
    return folder


@pytest.fixture(scope="module")
def running(vectors):
    made = Running(["user", "other"], admin=True, steering_dir=str(vectors), max_body_bytes=1 << 20)
    yield made
    made.at_rest()
    made.close()


@pytest.fixture
def operator(running):
    """Return ``ask(path, body)`` and ``events(path, body)``, which send the operator's key."""
    key = {"Authorization": f"Bearer {running.app.admin_token}"}

    class Asking:
        def ask(self, body, path="/v1/completions"):
            return running.client.post(path, json=body, headers=key)

        def events(self, body, path="/v1/completions"):
            answer = self.ask({**body, "stream": True}, path)
            assert answer.status_code == 200, answer.text
            found = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
            assert found.pop() == "[DONE]"
            return [json.loads(one) for one in found]

    return Asking()


@pytest.fixture(scope="module")
def llm():
    with LLM(
        "pocket", dtype="float32", batch_invariant=True, max_num_seqs=64, num_kvcache_blocks=512, max_model_len=1024
    ) as made:
        yield made


def values(choice):
    return [np.array(one["values"]) for one in choice["taps"]]


# ---- what operators get ----------------------------------------------------------------------------------------------


def test_what_is_read_over_http_is_what_an_llm_reads_pooled(operator, llm):
    (choice,) = operator.ask({**TALE, "taps": [MEAN, LAST, {**MEAN, "read": "last"}]}).json()["choices"]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    taps = [Tap(POINT, read=True), Tap("layers.0.q", read=True)]
    (want,) = llm.generate(TALE["prompt"], params, use_tqdm=False, taps=taps)
    assert choice["text"] == want.text
    assert [(one["point"], one["read"]) for one in choice["taps"]] == [
        (POINT, "mean"),
        ("layers.0.q", "last"),
        (POINT, "last"),
    ]
    mean, last, end = values(choice)
    np.testing.assert_allclose(mean, want.taps[POINT].mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(last, want.taps["layers.0.q"][-1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(end, want.taps[POINT][-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TALE), ("/v1/chat/completions", CHAT)])
def test_a_stream_reads_what_the_whole_answer_reads_for_each_choice(path, body, operator):
    requested = {**body, "n": 2, "temperature": 1, "seed": 3, "taps": [MEAN, LAST]}
    whole = operator.ask(requested, path).json()["choices"]
    assert [choice["index"] for choice in whole] == [0, 1]
    chunks = [c for event in operator.events(requested, path) for c in event["choices"] if "taps" in c]
    assert [c["index"] for c in chunks] == [0, 1] and all(c["finish_reason"] is None for c in chunks)
    for got, want in zip(chunks, whole, strict=True):
        for a, b in zip(values(got), values(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    if path.endswith("chat/completions"):
        assert all(c["delta"] == {} for c in chunks)
    else:
        assert all(c["text"] == "" for c in chunks)
        assert not np.allclose(values(whole[0])[0], values(whole[1])[0])  # two texts


def test_logits_of_a_scored_prompt_are_pooled_for_each_branch_with_its_own(operator, llm):
    both = [{"point": "logits", "read": how} for how in ("mean", "last")]
    requested = {**TALE, "n": 2, "temperature": 1, "seed": 3, "prompt_logprobs": 0, "taps": both}
    params = SamplingParams(max_tokens=5, temperature=1, seed=3, ignore_eos=True, n=2, prompt_logprobs=0)
    (want,) = llm.generate(TALE["prompt"], params, use_tqdm=False, taps=[Tap("logits", read=True)])
    for choice, output in zip(operator.ask(requested).json()["choices"], want.outputs, strict=True):
        mean, last = values(choice)
        assert len(output.taps["logits"]) == len(want.prompt_token_ids) + 4
        np.testing.assert_allclose(mean, output.taps["logits"].mean(0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(last, output.taps["logits"][-1], rtol=1e-4, atol=1e-4)


def test_each_prompt_of_a_batch_has_its_own_values(operator):
    both = operator.ask({**TALE, "prompt": ["A cat", "Two dogs went"], "taps": [MEAN]}).json()["choices"]
    for choice, prompt in zip(both, ["A cat", "Two dogs went"], strict=True):
        (alone,) = operator.ask({**TALE, "prompt": prompt, "taps": [MEAN]}).json()["choices"]
        np.testing.assert_allclose(values(choice)[0], values(alone)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_vector_steers_as_the_vector_itself_does_in_an_llm(stream, operator, llm, vectors):
    add = {"point": POINT, "add": "calm", "scale": 30.0}
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    taps = [Tap(POINT, add=np.load(vectors / "calm.npy"), scale=30.0)]
    (want,) = llm.generate(TALE["prompt"], params, use_tqdm=False, taps=taps)
    requested = {**TALE, "taps": [add]}
    if stream:
        text = "".join(c["text"] for event in operator.events(requested) for c in event["choices"])
    else:
        (choice,) = operator.ask(requested).json()["choices"]
        assert "taps" not in choice  # nothing was read
        text = choice["text"]
    assert text == want.text != operator.ask(TALE).json()["choices"][0]["text"]


def test_an_operator_is_told_the_points_of_the_model(running, llm):
    key = {"Authorization": f"Bearer {running.app.admin_token}"}
    assert running.client.get("/debug/state", headers=key).json()["engine"]["tap_points"] == llm.tap_points()


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_who_is_no_operator_is_refused_and_may_ask_without(running):
    for body, path in ((TALE, "/v1/completions"), (CHAT, "/v1/chat/completions")):
        answer = running.post(path, {**body, "taps": [MEAN]})
        assert answer.status_code == 403 and answer.json()["error"]["param"] == "taps"
        assert answer.json()["error"]["type"] == "PermissionDeniedError"
        for nothing in (None, []):
            assert running.post(path, {**body, "taps": nothing}).status_code == 200


def test_a_server_without_admin_serves_no_taps_and_one_with_a_single_key_serves_its_owner():
    for more, status in (({}, 403), ({"admin": True}, 200)):
        one = Running(["only"], **more)
        try:
            assert one.post("/v1/completions", {**TALE, "taps": [MEAN]}).status_code == status
        finally:
            one.close()


@pytest.mark.parametrize(
    ("taps", "status", "words"),
    [
        ({}, 400, "a list of at most 16"),
        ([MEAN] * 17, 400, "a list of at most 16"),
        (["layers.0.q"], 400, "taps[0]: expected an object"),
        ([{"read": "mean"}], 400, "taps[0].point: expected the name of a point"),
        ([{"point": POINT}], 400, 'expected "read" or "add"'),
        ([{"point": POINT, "read": "max"}], 400, "taps[0].read: expected mean or last"),
        ([{"point": POINT, "read": ["mean"]}], 400, "taps[0].read: expected mean or last"),
        ([MEAN, LAST, MEAN], 400, "taps[2]: layers.3.residual is read twice by mean"),
        ([MEAN, {"point": POINT, "reed": "mean"}], 400, "taps[1]: unknown key 'reed'. Did you mean 'read'?"),
        ([{"point": "layers.3.residul", "read": "mean"}], 400, "Did you mean 'layers.3.residual'?"),
        ([{**MEAN, "scale": 2}], 400, 'taps[0].scale: expected only with "add"'),
        ([{"point": POINT, "add": "calm", "scale": True}], 400, "taps[0].scale: expected a finite number"),
        ([{"point": POINT, "add": "calm", "scale": 10**400}], 400, ""),
        ([{"point": POINT, "add": "calm", "scale": 1e300}], 400, "out of the range"),
        ([{"point": POINT, "add": "clam"}], 404, "there is no vector clam; the vectors are bytes, calm, huge, large"),
        ([{"point": POINT, "add": "narrow"}], 400, "a vector of 3 numbers"),
        ([{"point": POINT, "add": "square"}], 400, "square.npy: expected one list of numbers"),
        ([{"point": POINT, "add": "objects"}], 400, "objects.npy: expected one list of numbers"),
        ([{"point": POINT, "add": "text"}], 400, "text.npy: not an array"),
        ([{"point": POINT, "add": "large"}], 400, "at most 1 MiB"),
        ([MEAN, {"point": POINT, "add": "nan"}], 400, "taps[1].add: nan.npy: expected finite numbers"),
        ([{"point": POINT, "add": "huge"}], 400, "taps[0].add: huge.npy: expected finite numbers"),
        ([{"point": POINT, "add": "bytes"}] * 16, 400, "at most 16777216: add fewer vectors, each as wide"),
        ([{"point": POINT, "add": "../outside"}], 400, "the name of a vector"),
        ([{"point": POINT, "add": "/etc/passwd"}], 400, "the name of a vector"),
        ([{"point": POINT, "add": "calm.npy"}], 404, "there is no vector calm.npy"),
        ([{"point": POINT, "add": ["calm"]}], 400, "the name of a vector"),
        ([{"point": "logits", "add": "calm"}], 400, "logit_bias"),
    ],
)
def test_a_wrong_tap_is_refused_by_its_place_and_nothing_else_is_touched(
    taps, status, words, operator, running, vectors
):
    answer = operator.ask({**TALE, "taps": taps})
    error = answer.json()["error"]
    assert answer.status_code == status and words in error["message"], error
    assert str(vectors) not in error["message"]  # an answer names no path
    assert running.post("/v1/completions", TALE).status_code == 200


def test_values_are_not_read_beside_what_ends_elsewhere(operator):
    """A stop string is found where text is made, beams are chosen after every step."""
    for more in ({"stop": "a"}, {"beam_width": 2}):
        answer = operator.ask({**TALE, **more, "taps": [MEAN]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "taps", answer.text


def test_vectors_for_each_prompt_of_a_batch_are_bounded_together(operator):
    """16 vectors of 1 KiB for each of 256 prompts are 4 MiB."""
    answer = operator.ask({**TALE, "prompt": ["a"] * 256, "taps": [{"point": POINT, "add": "calm"}] * 16})
    assert answer.status_code == 400 and "for each of 256 prompts" in answer.json()["error"]["message"]


def test_values_of_all_branches_are_bounded_together(operator):
    """17 KiB for each of 256 prompts are 4.25 MiB."""
    taps = [MEAN, {"point": "logits", "read": "mean"}, {"point": "logits", "read": "last"}]
    answer = operator.ask({**TALE, "prompt": ["a"] * 256, "taps": taps})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "taps", answer.text
    assert "17408 bytes as float32 for each of 256 branches" in answer.json()["error"]["message"]


def test_who_reads_more_than_allowed_is_told_what_to_do_and_nobody_else_ends():
    one = Running(["only"], engine={"max_tap_bytes": 20 * 1024}, admin=True)
    try:
        for path, body in (("/v1/completions", TALE), ("/v1/chat/completions", {**CHAT, "ignore_eos": True})):
            much = {**body, "max_tokens": 60, "taps": [{"point": POINT, "read": "mean"}]}
            answer = one.post(path, much)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "taps", answer.text
            assert "raise the engine's max_tap_bytes" in answer.json()["error"]["message"]
            streamed = one.post(path, {**much, "stream": True}).text
            assert "raise the engine's max_tap_bytes" in streamed and '"code":400' in streamed.replace(" ", "")
        assert one.post("/v1/completions", {**TALE, "taps": [MEAN]}).status_code == 200
        one.at_rest()
    finally:
        one.close()


def test_numbers_that_are_not_finite_are_null():
    assert numbers(np.array([1.5, np.nan, -np.inf], "f4")) == [1.5, None, None]
    assert numbers(np.array([1.5, 2], "f4")) == [1.5, 2.0] and numbers(np.empty(0, "f4")) == []


def test_a_socket_serves_no_taps(running):
    connect = pytest.importorskip("websockets.sync.client").connect
    address = running.url.replace("http", "ws") + "/v1/ws"
    key = {"Authorization": f"Bearer {running.app.admin_token}"}
    with connect(address, additional_headers=key) as socket:
        socket.send(json.dumps({"type": "completions", "id": "a", "body": {**TALE, "taps": [MEAN]}}))
        assert json.loads(socket.recv())["error"]["code"] == 403


def test_a_server_without_a_folder_says_how_to_give_one(tmp_path):
    one = Running(["only"], admin=True)
    try:
        answer = one.post("/v1/completions", {**TALE, "taps": [{"point": POINT, "add": "calm"}]})
        assert answer.status_code == 400 and "--steering-dir" in answer.json()["error"]["message"]
    finally:
        one.close()
    with pytest.raises(ConfigError, match=r"steering_dir without server\.admin"):
        load_config(keywords={"server": {"steering_dir": str(tmp_path)}})


def test_a_folder_is_beside_the_file_that_names_it_and_one_that_is_not_there_is_refused(tmp_path, capsys):
    file = tmp_path / "serve.toml"
    file.write_text('[server]\nadmin = true\nsteering_dir = "vectors"\n')
    assert load_config([file]).server.steering_dir == str(tmp_path / "vectors")
    assert main(["serve", "pocket", "--config", str(file)]) == 2
    assert "vectors': no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["<f4", "<f8", ">f8", "<i2", "<f2"])
def test_a_file_of_numbers_of_any_type_is_read(dtype):
    stream = io.BytesIO()
    np.save(stream, np.array([1, 2, 3], dtype))
    assert read_npy(stream.getvalue()).tolist() == [1, 2, 3]


def test_a_file_takes_no_more_memory_than_it_has():
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": (10**15,)})
    for data in (stream.getvalue(), stream.getvalue() + b"x" * 64, stream.getvalue()[:40], b"", b"PK\x03\x04"):
        with pytest.raises(ValueError, match=r"expected one list|not an array"):
            read_npy(data)


def test_a_file_with_any_header_is_read_or_refused():
    stream = io.BytesIO()
    np.save(stream, np.arange(8, dtype=np.float32))
    content, draw = stream.getvalue(), random.Random(1)
    read = 0
    for _ in range(2000):
        changed = bytearray(content)
        for _ in range(draw.choice([1, 2, 4])):
            changed[draw.randrange(128)] = draw.choice(b"0123456789-{}[](),:'\"\\ aF<>|\n\x00\xff#")
        try:
            read += len(read_npy(bytes(changed))) > 0
        except ValueError as exc:
            assert str(exc) in ("not an array that numpy.save wrote", "expected one list of numbers")
    assert 0 < read < 200
