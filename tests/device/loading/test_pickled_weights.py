"""Weights of ``torch.save``: ``load_format = "pt"`` gives what safetensors give, and runs nothing of a file."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file

from minivllm.device.loading import shapes, weights
from minivllm.errors import ModelError
from minivllm.plugins.model.llama import Llama
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import read_tensors, tiny_dir

PROMPT = [5, 17, 3, 44, 60, 21, 9]


@pytest.fixture
def made(tmp_path):
    """A directory without its weights, its config, its tensors, and the logits that they give as safetensors."""
    path, cfg, _ = tiny_dir(tmp_path)
    want = Harness(path, Llama(), cfg).step({0: PROMPT})[0]
    tensors = read_tensors(path)
    (path / "model.safetensors").unlink()
    return path, cfg, tensors, want


def load(path, cfg, **more):
    return Harness(path, Llama(), cfg, load_format="pt", **more)


def refuses(path, cfg, *words):
    with pytest.raises(ModelError) as info:
        load(path, cfg)
    assert all(word in str(info.value) for word in words) and "\n" not in str(info.value), str(info.value)


def shards(path, tensors, count, suffix="bin"):
    names = [f"pytorch_model-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1)]
    for i, name in enumerate(names):
        torch.save(dict(list(tensors.items())[i::count]), path / name)
    return names


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
@pytest.mark.parametrize("kind", ["zip", "before 1.6", "parameters"])
def test_one_file_gives_the_logits_of_safetensors(made, name, kind):
    path, cfg, tensors, want = made
    if kind == "parameters":
        tensors = OrderedDict((key, torch.nn.Parameter(x)) for key, x in tensors.items())
    torch.save(tensors, path / name, _use_new_zipfile_serialization=kind != "before 1.6")
    torch.save({"lr": 1.0}, path / "optimizer.pt")
    torch.save({"args": 1}, path / "training_args.bin")
    assert torch.equal(load(path, cfg).step({0: PROMPT})[0], want)


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read_with_an_index_and_without(made, index):
    path, cfg, tensors, want = made
    names = shards(path, tensors, 3)
    if index:
        listed = {key: names[i % 3] for i, key in enumerate(tensors)}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": listed}))
    assert torch.equal(load(path, cfg).step({0: PROMPT})[0], want)
    (path / names[1]).unlink()
    refuses(path, cfg, f"shard {names[1]} is missing")


def test_an_index_that_promises_a_tensor_or_points_elsewhere_is_refused(made):
    path, cfg, tensors, _ = made
    names = shards(path, tensors, 2)
    index = path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, names[0])}))
    refuses(path, cfg, "which the index lists")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../" + names[0]}}))
    refuses(path, cfg, "expected the name of a .bin or .pt or .pth file in the same folder")


def test_tensors_that_share_memory_are_read(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, tie_word_embeddings=True)
    want = Harness(path, Llama(), cfg).step({0: PROMPT})[0]
    tensors = read_tensors(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    whole = torch.cat([tensors.pop(f"model.layers.0.self_attn.{x}_proj.weight") for x in "qkv"])
    for x, part in zip("qkv", whole.split([32, 16, 16]), strict=True):  # views of one storage
        tensors[f"model.layers.0.self_attn.{x}_proj.weight"] = part
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    assert torch.equal(load(path, cfg).step({0: PROMPT})[0], want)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("kind", ["zip", "before 1.6", "plain pickle"])
def test_a_file_that_names_code_is_refused_and_nothing_runs(made, kind):
    path, cfg, tensors, _ = made
    ran, target = path / "ran", path / "pytorch_model.bin"
    content = {**tensors, "x": Evil(ran)}
    if kind == "plain pickle":
        target.write_bytes(pickle.dumps({"x": Evil(ran)}))
    else:
        torch.save(content, target, _use_new_zipfile_serialization=kind == "zip")
    ran.unlink(missing_ok=True)
    named = f"asks to run '{open.__module__}.open'"
    reason = "not written by torch.save with its usual pickle_protocol" if kind == "plain pickle" else named
    refuses(path, cfg, str(target), reason, "or a checkpoint in safetensors")
    assert not ran.exists()


WRONG = {
    "a list": ([torch.zeros(3)], "holds a list; expected a mapping of names to tensors"),
    "nested": ({"state_dict": {"a": torch.zeros(3)}}, "'state_dict' is a dict"),
    "a number": ({"epoch": 3}, "'epoch' is a int"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "'a' is sparse_coo float32; expected a dense tensor"),
    "complex": ({"a": torch.zeros(3, dtype=torch.complex64)}, "'a' is strided complex64; expected a dense tensor"),
    "huge": ({"a": torch.zeros(1).expand(1 << 21, 1 << 21)}, "which exceeds the size of any model"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_content_that_is_no_mapping_of_names_to_plain_tensors_is_refused(made, kind):
    path, cfg, _, _ = made
    content, says = WRONG[kind]
    torch.save(content, path / "pytorch_model.bin")
    refuses(path, cfg, says)


def test_a_file_that_is_broken_anywhere_is_refused_in_one_line(made):
    path, cfg, tensors, _ = made
    buffer = io.BytesIO()
    torch.save({"model.norm.weight": tensors["model.norm.weight"]}, buffer)
    whole, target = buffer.getvalue(), path / "pytorch_model.bin"
    for cut in range(0, len(whole), max(1, len(whole) // 40)):
        target.write_bytes(whole[:cut])
        refuses(path, cfg, str(target))
    for content in (b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", b"\x80\x02]q\x00."):
        target.write_bytes(content)
        refuses(path, cfg, str(target))
    with zipfile.ZipFile(target, "w") as file:
        file.writestr("a.txt", "b")
    refuses(path, cfg, str(target))


def test_what_is_there_decides_and_a_choice_is_never_guessed(made):
    path, cfg, tensors, _ = made
    refuses(path, cfg, "load_format='pt', but there is no file of torch.save; expected *.bin, *.pt or *.pth")
    (path / "model.safetensors").write_bytes(b"")
    refuses(path, cfg, "its weights are safetensors, which load_format='auto' reads")
    torch.save(tensors, path / "one.pt")
    torch.save(tensors, path / "other.bin")
    refuses(path, cfg, "cannot choose which of one.pt, other.bin are the weights")


def test_a_missing_or_unknown_tensor_is_named(made):
    path, cfg, tensors, _ = made
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    torch.save(tensors, path / "pytorch_model.bin")
    refuses(path, cfg, "the checkpoint lacks model.layers.1.mlp.up_proj.weight")
    torch.save({**tensors, "model.layers.1.mlp.up_proj.weight": gone, "model.extra": gone}, path / "pytorch_model.bin")
    refuses(path, cfg, "tensor 'model.extra' has no place")


# ---- before a number is read ---------------------------------------------------------------------------------------


def test_what_a_checkpoint_lacks_is_told_before_any_tensor_is_read(tmp_path, monkeypatch):

    path, cfg, _ = tiny_dir(tmp_path)
    tensors = read_tensors(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    monkeypatch.setattr(weights, "checkpoint_tensors", lambda *_: pytest.fail("a tensor was read"))
    refuses(path, cfg, "the checkpoint lacks model.layers.1.mlp.up_proj.weight")


KV_NAMES = [
    "self_attn.k_scale", "self_attn.v_scale", "self_attn.kv_scale", "self_attn.attn.k_scale", "self_attn.attn.v_scale",
    "self_attn.attn.q_scale", "self_attn.attn.prob_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale",
    "self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale", "self_attn.k_zero_point",
    "self_attn.k_proj.output_zero_point", "self_attn.qkv_proj.k_scale",
]  # fmt: skip


@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_scales_of_a_quantized_cache_are_left_out_and_told(tmp_path, load_format):

    from minivllm.config import EngineConfig
    from minivllm.config.resolve import resolve
    from minivllm.registry import Catalog

    path, cfg, _ = tiny_dir(tmp_path)
    want = Harness(path, Llama(), cfg).step({0: PROMPT})[0]
    tensors = read_tensors(path) | {f"model.layers.{i}.{name}": torch.ones(1) for i in (0, 1) for name in KV_NAMES}
    (path / "model.safetensors").unlink()
    if load_format == "pt":
        (name,) = shards(path, tensors, 1)
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    else:
        save_file(tensors, path / "model.safetensors")
    assert torch.equal(Harness(path, Llama(), cfg, load_format=load_format).step({0: PROMPT})[0], want)
    config = EngineConfig(model=str(path), device="cpu", load_format=load_format, skip_tokenizer_init=True)
    reason = dict(resolve(config, Catalog.discover()).notes)["model.skipped"]
    assert reason.startswith("28 scales of keys and values are not used (model.layers.0.")


# ---- a directory that changes while it is loaded --------------------------------------------------------------------


def write(path, tensors):
    """Replace a file by another of the same name, as a download does."""
    save_file(tensors, path / "other")
    (path / "other").replace(path / "model.safetensors")


CHANGES = {
    "written in place": lambda path, tensors: (path / "model.safetensors").touch(),
    "replaced": lambda path, tensors: write(path, {name: x + 1 for name, x in tensors.items()}),
    "removed": lambda path, tensors: (path / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, kind):
    path, cfg, _ = tiny_dir(tmp_path)
    tensors, read = read_tensors(path), weights.checkpoint_tensors

    def changing(*args):
        for i, found in enumerate(read(*args)):
            if i == 3:
                CHANGES[kind](path, tensors)
            yield found

    monkeypatch.setattr(weights, "checkpoint_tensors", changing)
    with pytest.raises(ModelError, match=r"model\.safetensors: was changed while it was loaded; start again"):
        Harness(path, Llama(), cfg)


BETWEEN = {
    "fewer tensors": (
        lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up" not in k},
        "lacks model.layers.1.mlp.up",
    ),
    "more tensors": (lambda t: {**t, "model.extra": torch.zeros(3)}, "'model.extra' has no place"),
    "other shapes": (
        lambda t: {**t, "model.norm.weight": t["model.norm.weight"][:-1]},
        "has shape .31., expected .32.",
    ),
    "other dtypes": (
        lambda t: {k: v.to(torch.int8) for k, v in t.items()},
        "dtype int8, expected a floating-point weight",
    ),
}


@pytest.mark.parametrize("kind", BETWEEN)
def test_a_directory_that_changes_between_the_headers_and_the_load_is_refused(tmp_path, monkeypatch, kind):
    path, cfg, _ = tiny_dir(tmp_path)
    tensors, check, (change, says) = read_tensors(path), shapes.check, BETWEEN[kind]

    def checking(*args):
        found = check(*args)
        write(path, change(tensors))
        return found

    monkeypatch.setattr(shapes, "check", checking)
    with pytest.raises(ModelError, match=says):
        Harness(path, Llama(), cfg)
