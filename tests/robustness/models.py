"""M1 to M10: models that are missing, broken or hostile.  Each ends with status 3 and one line with the reason."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

from .ground import ROOT
from .lines import line
from .tools import Tools

CONFIG, MODEL, PLUGIN, MACHINE = 2, 3, 4, 5
POCKET = ROOT / "minivllm" / "pocket" / "draft"


def model(tools: Tools, change: Any, *words: str, real: bool = False) -> None:
    """Check that a changed copy of a small model is refused."""
    folder = tools.folder() / "model"
    shutil.copytree(POCKET, folder)
    change(folder)
    argv = (
        ["serve", str(folder), "--port", "0"]
        if real
        else ["generate", "a", "--model", str(folder), "--max-tokens", "1"]
    )
    (tools.really if real else tools.run)(*argv).ended(MODEL, *words)


def changed(**more: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))

    return change


def write(name: str, data: str | bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def cut(name: str, keep: Any) -> Any:
    """Return a change that cuts a file to ``keep`` bytes; a negative number is the number of bytes to remove."""

    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:keep])

    return change


def header(edit: Any) -> Any:
    """Return a change that edits the header of the weights as a dict, and keeps the data."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        head = json.loads(data[8 : 8 + size])
        edit(head)
        text = json.dumps(head).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return change


def weights_of(head: dict[str, Any]) -> list[str]:
    return sorted(name for name in head if name != "__metadata__")


@line("M1", "no such model", "tools")
def m1(tools: Tools, rng: random.Random) -> Any:
    for name in (
        "/no/such/model",
        "./nothing",
        "~nobody/x",
        "../" * rng.randrange(1, 20) + "nothing",
        "a b",
        "/etc/passwd",
        "\u202e",
        "a/b/c",
    ):
        yield name[:20], lambda name=name: tools.run("generate", "a", "--model", name).ended(MODEL)
    yield "serve", lambda: tools.really("serve", "/no/such/model", "--port", "0").ended(MODEL, "no such directory")


@line("M2", "no config.json", "tools")
def m2(tools: Tools, rng: random.Random) -> Any:
    def folder(path: Path) -> None:
        (path / "config.json").unlink()
        (path / "config.json").mkdir()

    yield "none", lambda: model(tools, lambda path: (path / "config.json").unlink(), "config.json")
    yield "a folder", lambda: model(tools, folder, "config.json")


@line("M3", "a config.json that is broken", "tools")
def m3(tools: Tools, rng: random.Random) -> Any:
    size = (POCKET / "config.json").stat().st_size
    for data in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"{" * 10_000, b'{"a": 1} x', b"\x00" * 99):
        yield repr(data[:9]), lambda data=data: model(tools, write("config.json", data), "config.json")
    for keep in rng.sample(range(1, size - 1), 2):
        yield f"{keep} bytes of it", lambda keep=keep: model(tools, cut("config.json", keep), "config.json")
    nan, inf = float("nan"), float("inf")
    for more in (
        {"vocab_size": 0},
        {"vocab_size": -5},
        {"hidden_size": "256"},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 2**32},
        {"vocab_size": True},
        {"hidden_size": 128.0},
        {"hidden_size": inf},
        {"intermediate_size": 2**31},
        {"intermediate_size": nan},
        {"head_dim": 1 << 20},
        {"head_dim": 4096},
        {"text_config": 5},
        {"text_config": {"head_dim": 0}},
        {"quantization_config": "fp8"},
        {"max_position_embeddings": 10**30},
        {"max_position_embeddings": 0},
        {"sliding_window": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": 4},
        {"num_attention_heads": -inf},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 0},
        {"head_dim": -1},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": 0},
        {"rms_norm_eps": nan},
        {"rms_norm_eps": 1e300},
        {"intermediate_size": None},
        {"rope_theta": "a"},
        {"rope_theta": inf},
        {"rope_theta": -1},
        {"rope_theta": 0},
        {"rope_theta": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"rope_scaling": {"rope_type": "linear", "factor": inf}},
        {"torch_dtype": "float7"},
        {"torch_dtype": 5},
        {"num_hidden_layers": 1.5},
        {"max_position_embeddings": -1},
        {"eos_token_id": "a"},
        {"eos_token_id": -3},
        {"eos_token_id": [1, 2.5]},
        {"bos_token_id": True},
    ):
        key = next(iter(more))
        yield str(more), lambda more=more, key=key: model(tools, changed(**more), "config.json", key)
    # the value is read before its key
    long = changed(max_position_embeddings=10**300)
    yield "301 digits", lambda: model(tools, long, "config.json", "has 301 digits; expected at most 40")


@line("M4", "an architecture that nobody has", "tools")
def m4(tools: Tools, rng: random.Random) -> Any:
    for name in ("NoSuchForCausalLM", "BertModel", "__import__", "a" * 5000):
        for more in ({"architectures": [name]}, {"architectures": [name], "model_type": name}):

            def check(more: dict[str, Any] = more) -> None:
                folder = tools.folder() / "model"
                shutil.copytree(POCKET, folder)
                changed(**more)(folder)
                done = tools.run("generate", "a", "--model", str(folder))
                assert done.code in (MODEL, PLUGIN), done
                done.ended(done.code)

            yield f"{name[:20]} {len(more)}", check
    for value in ([], None, 5, "Qwen3ForCausalLM", [5], {}):
        yield f"architectures {value}", lambda value=value: not_a_bug(tools, changed(architectures=value))


def not_a_bug(tools: Tools, change: Any) -> None:
    """Check that a model is served, or refused with a reason."""
    folder = tools.folder() / "model"
    shutil.copytree(POCKET, folder)
    change(folder)
    done = tools.run("generate", "a", "--model", str(folder), "--max-tokens", "1")
    if done.code:
        assert done.code in (CONFIG, MODEL, PLUGIN), done
        done.ended(done.code)


@line("M5", "weights that are truncated", "tools")
def m5(tools: Tools, rng: random.Random) -> Any:
    size = (POCKET / "model.safetensors").stat().st_size
    for keep in (-8, -1, 0, 7, 8, 9, rng.randrange(100, 5000), rng.randrange(10_000, size - 1)):
        yield f"{keep}", lambda keep=keep: model(tools, cut("model.safetensors", keep), "model.safetensors")
    data = (POCKET / "model.safetensors").read_bytes()
    for name, bad in (
        ("bytes behind", data + b"x" * rng.randrange(1, 99)),
        ("a header of 2^63", struct.pack("<Q", 2**63) + data[8:]),
        ("a header of 0", struct.pack("<Q", 0) + data[8:]),
        ("noise", os.urandom(5000)),
        ("zeros", bytes(5000)),
    ):
        yield name, lambda bad=bad: model(tools, write("model.safetensors", bad), "model.safetensors")
    yield "serve", lambda: model(tools, cut("model.safetensors", -8), "model.safetensors", real=True)


@line("M6", "shards that are missing or empty", "tools")
def m6(tools: Tools, rng: random.Random) -> Any:
    def shards(index: Any) -> Any:
        def change(folder: Path) -> None:
            path = folder / "model.safetensors"
            data = path.read_bytes()
            (size,) = struct.unpack("<Q", data[:8])
            names = weights_of(json.loads(data[8 : 8 + size]))
            path.rename(folder / "model-00001-of-00002.safetensors")
            index(folder, names)

        return change

    def index(second: str, empty: bool = False) -> Any:
        def make(folder: Path, names: list[str]) -> None:
            at = rng.randrange(1, len(names))
            table = {name: second if i >= at else "model-00001-of-00002.safetensors" for i, name in enumerate(names)}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
            if empty:
                (folder / second).write_bytes(b"")

        return make

    yield "missing", lambda: model(tools, shards(index("model-00002-of-00002.safetensors")))
    yield "empty", lambda: model(tools, shards(index("model-00002-of-00002.safetensors", True)))
    yield "outside", lambda: model(tools, shards(index("../model.safetensors")))
    yield "no weights", lambda: model(tools, lambda folder: (folder / "model.safetensors").unlink())
    for text in ("", "{", "[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "{}"):

        def change(folder: Path, text: str = text) -> None:
            (folder / "model.safetensors.index.json").write_text(text)
            (folder / "model.safetensors").unlink()

        yield f"index {text}", lambda change=change: model(tools, change)


@line("M7", "tensors that are not what the configuration says", "tools")
def m7(tools: Tools, rng: random.Random) -> Any:
    def shape(head: dict[str, Any]) -> None:
        one = head[rng.choice([n for n in weights_of(head) if len(head[n]["shape"]) == 2])]
        one["shape"] = (
            one["shape"][::-1] if one["shape"][0] != one["shape"][1] else [one["shape"][0] * 2, one["shape"][1] // 2]
        )

    def missing(head: dict[str, Any]) -> None:
        name = rng.choice(weights_of(head))
        head["__metadata__"] = {"was": name}
        head[name + ".other"] = head.pop(name)

    def dtype(head: dict[str, Any]) -> None:
        head[rng.choice(weights_of(head))]["dtype"] = rng.choice(["I16", "U16", "F99", "", "BOOL"])

    def offsets(head: dict[str, Any]) -> None:
        one = head[rng.choice(weights_of(head))]
        one["data_offsets"] = rng.choice([[0, 2**63], [-1, 5], [10, 5], [0, 1], ["a", 1]])

    for name, edit in (("shape", shape), ("name", missing), ("dtype", dtype), ("offsets", offsets)):
        yield name, lambda edit=edit: model(tools, header(edit), "model")
    for more in (
        {"hidden_size": 256},
        {"vocab_size": 4096},
        {"num_hidden_layers": 9},
        {"num_hidden_layers": 2},
        {"intermediate_size": 16},
    ):
        yield str(more), lambda more=more: model(tools, changed(**more))


@line("M8", "pickles are never opened", "tools")
def m8(tools: Tools, rng: random.Random) -> Any:
    pickle = f"cos\nsystem\n(S'touch {tools.canary}'\ntR.".encode()
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "weights.pkl"):

        def change(folder: Path, name: str = name) -> None:
            (folder / "model.safetensors").unlink()
            (folder / name).write_bytes(pickle)

        yield name, lambda change=change: model(tools, change)
    yield "as safetensors", lambda: model(tools, write("model.safetensors", pickle), "model.safetensors")


@line("M9", "code in a model's folder is never run", "tools")
def m9(tools: Tools, rng: random.Random) -> Any:
    code = f"open({str(tools.canary)!r}, 'w')\n"
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}

    def change(folder: Path) -> None:
        for name in ("evil.py", "modeling_qwen3.py", "configuration_qwen3.py", "__init__.py", "tokenization.py"):
            (folder / name).write_text(code)
        for name in ("config.json", "tokenizer_config.json"):
            path = folder / name
            path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": names, "trust_remote_code": True}))

    yield "auto_map beside a known type", lambda: not_a_bug(tools, change)
    for kind in ("evil", "llama", "no-such-type"):

        def other(folder: Path, kind: str = kind) -> None:
            change(folder)
            changed(model_type=kind, architectures=rng.choice([["EvilForCausalLM"], ["Qwen3ForCausalLM"]]))(folder)

        yield f"type {kind}", lambda other=other: not_a_bug(tools, other)

    def template(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for x in range(10**9) %}a{% endfor %}"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": evil}))

    yield "a template of code", lambda: not_a_bug(tools, template)


@line("M10", "tokenizers that are broken", "tools")
def m10(tools: Tools, rng: random.Random) -> Any:
    for data in (
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b'{"model": 5}',
        b'{"version": "1.0", "model": {"type": "No"}}',
        b"{" * 9999,
    ):
        yield repr(data[:12]), lambda data=data: model(tools, write("tokenizer.json", data), "tokenizer")
    size = (POCKET / "tokenizer.json").stat().st_size
    keep = rng.randrange(100, size - 2)
    yield f"{keep} bytes of it", lambda: model(tools, cut("tokenizer.json", keep), "tokenizer")
    for data in (b"", b"{", b"[]", b'{"chat_template": 5}', b"\xff"):
        yield (
            f"its configuration {data!r}",
            lambda data=data: model(tools, write("tokenizer_config.json", data)),
        )
    yield "serve", lambda: model(tools, write("tokenizer.json", b"{"), "tokenizer", real=True)
