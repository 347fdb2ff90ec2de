"""Adapters (LoRA) over HTTP: names of models in every protocol, loads and unloads by operators."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from http_helpers import Running
from safetensors.torch import load_file, save_file

from minivllm.config import load_config
from minivllm.errors import ConfigError
from minivllm.server.openai import completions

LAYERS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
SIZES = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (256, 128), "mlp.up_proj": (256, 512)}  # of pocket
GREEDY = {"temperature": 0, "max_tokens": 8}


def write(folder, seed):
    """Write an adapter for pocket in the form of PEFT."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(8):
        for name in LAYERS:
            inputs, outputs = SIZES[name]
            base = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.4
            tensors[f"{base}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.4
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        write(place / name, seed)
    write(place.parent / "outside", 9)
    return place


@pytest.fixture(scope="module")
def server(folder):
    engine = {"enable_lora": True, "max_loras": 2, "device": "cpu", "dtype": "float32"}
    modules = [f"one={folder / 'one'}"]
    made = Running(["user", "other"], engine, admin=True, lora_dir=str(folder), lora_modules=modules)
    made.client.headers["Authorization"] = f"Bearer {made.app.admin_token}"
    yield made
    made.close()


def text(server, model, **more):
    body = {"model": model, "prompt": "Once upon a time", **GREEDY, **more}
    answer = server.client.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def test_the_name_of_an_adapter_selects_it_in_every_protocol(server):
    assert text(server, "pocket") != text(server, "one")
    messages = [{"role": "user", "content": "Hello"}]
    asks = {
        "/v1/chat/completions": ({"messages": messages, **GREEDY}, lambda a: a["choices"][0]["message"]["content"]),
        "/v1/messages": (
            {"messages": messages, **GREEDY},
            lambda a: "".join(block.get("text", "") for block in a["content"]),
        ),
        "/v1/responses": (
            {"input": "Hello", "temperature": 0, "max_output_tokens": 8},
            lambda a: a["output"][-1]["content"][0]["text"],
        ),
        "/api/chat": (
            {"messages": messages, "stream": False, "options": {"temperature": 0, "num_predict": 8}},
            lambda a: a["message"]["content"],
        ),
    }
    for path, (body, read) in asks.items():
        found = {}
        for model in ("pocket", "one"):
            answer = server.client.post(f"{server.url}{path}", json={"model": model, **body})
            assert answer.status_code == 200, (path, answer.text)
            found[model] = read(answer.json())
        assert found["pocket"] != found["one"], path


def test_models_lists_adapters_with_their_parent(server):
    cards = {card["id"]: card for card in server.client.get(f"{server.url}/v1/models").json()["data"]}
    assert cards["one"]["parent"] == "pocket" and cards["pocket"]["parent"] is None
    assert server.client.get(f"{server.url}/v1/models/one").json()["root"] == "one"


def test_an_operator_loads_and_unloads_adapters(server):
    post = lambda path, **body: server.client.post(f"{server.url}/v1/{path}", json=body)  # noqa: E731
    answer = post("load_lora_adapter", lora_name="two", lora_path="two")
    assert answer.status_code == 200 and "'two' added" in answer.text, answer.text
    assert text(server, "two") not in (text(server, "one"), text(server, "pocket"))
    again = post("load_lora_adapter", lora_name="two", lora_path="two")
    assert again.status_code == 400 and "in use" in again.json()["error"]["message"]
    assert post("unload_lora_adapter", lora_name="two").status_code == 200
    assert post("unload_lora_adapter", lora_name="two").status_code == 404
    body = {"model": "two", "prompt": "x", **GREEDY}
    assert server.client.post(f"{server.url}/v1/completions", json=body).status_code == 404
    assert post("load_lora_adapter", lora_name="two", lora_path="three", load_inplace=True).status_code == 400
    assert post("load_lora_adapter", lora_name="two", lora_path="three", load_inplace=False).status_code == 200
    assert text(server, "two")
    assert post("unload_lora_adapter", lora_name="two", lora_int_id=3).status_code == 200


@pytest.mark.parametrize("stop, go, why", [("/pause", "/resume", "is paused"), ("/sleep", "/wake_up", "sleeps")])
def test_an_engine_that_runs_no_steps_refuses_to_load_an_adapter(server, stop, go, why):
    """The load would wait for a step."""
    load = lambda: server.client.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=20)  # noqa: E731
    body = {"lora_name": "later", "lora_path": "three"}
    assert server.client.post(f"{server.url}{stop}").status_code == 200
    try:
        answer = load()
        assert answer.status_code == 400 and f"{why}, and loads no adapter" in answer.json()["error"]["message"]
    finally:
        assert server.client.post(f"{server.url}{go}").status_code == 200
    assert load().status_code == 200
    assert server.client.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "later"}).status_code == 200


def test_wrong_loads_are_refused_and_change_nothing(server, folder):
    broken = folder / "broken"
    shutil.copytree(folder / "two", broken, dirs_exist_ok=True)
    (broken / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 8}))
    for name, value in (("nan", float("nan")), ("large", 1e38)):
        shutil.copytree(folder / "two", folder / name, dirs_exist_ok=True)
        tensors = load_file(folder / name / "adapter_model.safetensors")
        next(tensor for key, tensor in tensors.items() if "lora_B" in key)[0, 0] = value
        save_file(tensors, folder / name / "adapter_model.safetensors")
    settings = json.loads((folder / "large" / "adapter_config.json").read_text())
    (folder / "large" / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 1e4}))
    shutil.copytree(folder / "two", folder / "slow", dirs_exist_ok=True)
    (folder / "slow" / "adapter_config.json").write_text(json.dumps({**settings, "rank_pattern": {"(.+)+#": 2}}))
    (folder / "link").unlink(missing_ok=True)
    (folder / "link").symlink_to(folder.parent / "outside")
    before = server.client.get(f"{server.url}/v1/models").json()
    for body, message in (
        ({"lora_name": "x", "lora_path": "../outside"}, "within the server's lora_dir"),
        ({"lora_name": "x", "lora_path": str(folder.parent / "outside")}, "within the server's lora_dir"),
        ({"lora_name": "x", "lora_path": "link"}, "within the server's lora_dir"),
        ({"lora_name": "x", "lora_path": "."}, "within the server's lora_dir"),
        ({"lora_name": "x", "lora_path": "none"}, "no such folder"),
        ({"lora_name": "x", "lora_path": "broken"}, "has shape [4, 256], expected [3, 256]"),
        ({"lora_name": "x", "lora_path": "nan"}, "not all finite numbers in float32"),
        ({"lora_name": "x", "lora_path": "large"}, "not all finite numbers in float32"),
        ({"lora_name": "x", "lora_path": "slow"}, "without repeated groups"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "without zero bytes"),
        ({"lora_name": "x", "lora_path": "a" * 5000}, "at most 1024 characters"),
        ({"lora_name": "pocket", "lora_path": "two"}, "in use"),
        ({"lora_path": "two"}, "lora_name: expected text"),
        ({"lora_name": "x"}, "lora_path: expected text"),
    ):
        answer = server.client.post(f"{server.url}/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], (body, answer.text)
    assert server.client.get(f"{server.url}/v1/models").json() == before


def test_an_adapter_that_is_unloaded_while_its_request_is_prepared_is_not_replaced_by_the_model(server, monkeypatch):
    adapters = server.app.service.adapters
    post = lambda path, **body: server.client.post(f"{server.url}/v1/{path}", json=body)  # noqa: E731
    assert post("load_lora_adapter", lora_name="two", lora_path="two").status_code == 200
    known = adapters.by_name["two"]
    real = completions.open_streams

    async def late(*args, **more):
        await adapters.unload(server.app.service.client, "two")
        return await real(*args, **more)

    monkeypatch.setattr(completions, "open_streams", late)
    answer = post("completions", model="two", prompt="x", **GREEDY)
    assert answer.status_code == 404, answer.text
    adapters.by_name["two"] = known  # a request that was sent before the unloading arrives after it
    adapters.names.append("two")
    monkeypatch.setattr(completions, "open_streams", real)
    answer = post("completions", model="two", prompt="x", **GREEDY)
    assert answer.status_code == 400 and "was unloaded" in answer.json()["error"]["message"], answer.text
    del adapters.by_name["two"]
    adapters.names.remove("two")
    for path, name in (("load", {"lora_path": "two"}), ("unload", {})):
        assert post(f"{path}_lora_adapter", lora_name="two", **name).status_code == 200


def test_only_an_operator_may_load(server):
    for path in ("load_lora_adapter", "unload_lora_adapter"):
        body = {"lora_name": "three", "lora_path": "three"}
        headers = {"Authorization": "Bearer user"}
        assert server.client.post(f"{server.url}/v1/{path}", json=body, headers=headers).status_code == 401


def test_embeddings_with_an_adapter_are_refused(server):
    answer = server.client.post(f"{server.url}/v1/embeddings", json={"model": "one", "input": "x"})
    assert answer.status_code == 400 and "is an adapter" in answer.json()["error"]["message"]


def test_settings_of_adapters_are_checked(tmp_path):
    for server, message in (
        ({"lora_dir": str(tmp_path)}, "lora_dir without server.admin"),
        ({"lora_modules": ["a"]}, "expected NAME=FOLDER"),
        ({"lora_modules": ["a=x", "a=y"]}, "is there twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(keywords={"server": server})
    file = tmp_path / "serve.toml"
    file.write_text('[server]\nadmin = true\nlora_dir = "adapters"\nlora_modules = ["a=one"]\n')
    loaded = load_config([file]).server
    assert loaded.lora_dir == str(tmp_path / "adapters") and loaded.lora_modules == [f"a={tmp_path / 'one'}"]
