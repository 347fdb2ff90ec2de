"""Models of several kinds that are quantized: windows, tied heads, merged parts, norms around."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minivllm import LLM, SamplingParams
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.errors import ResourceError
from minivllm.lab.quantize import work
from minivllm.lab.quantize.layers import LayerModel
from minivllm.lab.quantize.layouts import PackedFormat
from minivllm.lab.quantize.options import QuantizeOptions
from minivllm.lab.quantize.run import quantize
from minivllm.testing.tiny import tiny_dir

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
WINDOW = 6
KINDS = {
    "gemma3": {
        "sliding_window": WINDOW, "tie_word_embeddings": True, "layer_types": ["sliding_attention", "full_attention"]
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    "phi3": {"sliding_window": WINDOW},
    "qwen3": {"tie_word_embeddings": True},
}  # fmt: skip
PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 40, 8, 2, 19]


@pytest.mark.parametrize("kind", list(KINDS))
def test_hidden_states_of_calibration_are_those_of_the_whole_model(tmp_path, kind):
    """Of samples longer than the window, each layer with the mask and the rotary embedding of its own."""
    path, _, hf = tiny_dir(tmp_path, kind, **SIZES, **KINDS[kind])
    model = LayerModel(open_checkpoint(str(path)), "cpu", torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        want = hf(ids, output_hidden_states=True).hidden_states
    x = model.embedded(ids)[0]
    for number in range(len(model.layers) - 1):  # transformers normalises the last one
        with model.filled(number):
            x = model.run(number, x)
        torch.testing.assert_close(x, want[number + 1], rtol=1e-4, atol=1e-4)
    plain = model._calls[0][1].get("attention_mask")
    assert "sliding_window" not in KINDS[kind] or (plain is not None and not bool(plain[0, 0, -1, 0]))


def calibration(folder):
    ids = torch.randint(3, 61, (4, 32), generator=torch.Generator().manual_seed(2)).tolist()
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"ids": one}) for one in ids))
    return str(folder / "text.jsonl")


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_interrupted_anywhere_the_same_command_writes_the_same_bytes(tmp_path, method):
    """At every other turn of the progress bar."""
    path, _, _ = tiny_dir(tmp_path / "plain", "qwen3", **SIZES, tie_word_embeddings=True)
    chosen, text = QuantizeOptions(method, group=32, samples=4, length=32), calibration(tmp_path)
    turns: list[str] = []
    quantize(str(path), tmp_path / "whole", chosen, text, "cpu", lambda done, what: turns.append(what))
    want, begun = bytes_of(tmp_path / "whole"), 0
    for last in range(0, len(turns), 2):
        left = [last]

        def stop(done, what, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            quantize(str(path), tmp_path / "out", chosen, text, "cpu", stop)
        assert not (tmp_path / "out").exists()
        assert not list((tmp_path / "out.partial").glob("*.tmp")), "half of a file"
        begun += quantize(str(path), tmp_path / "out", chosen, text, "cpu").resumed > 0
        assert bytes_of(tmp_path / "out") == want, f"interrupted at turn {last} of {turns}"
        shutil.rmtree(tmp_path / "out")
    assert len(turns) > 8 and begun > 0


@pytest.mark.parametrize("at", ["plan.json", "index", "config.json", "tokenizer_config.json", "rename"])
def test_a_disk_that_is_full_at_the_end_leaves_layers_that_the_same_command_finishes(tmp_path, monkeypatch, at):
    path, _, _ = tiny_dir(tmp_path / "plain", "llama", **SIZES)
    (path / "tokenizer_config.json").write_text("{}")
    chosen = QuantizeOptions("rtn", group=32)
    quantize(str(path), tmp_path / "whole", chosen, None, "cpu")

    def full(plain, fails):
        def call(*args, **more):
            if fails(str(args[0] if args else "")) or fails(str(args[1] if len(args) > 1 else "")):
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(*args, **more)

        return call

    with monkeypatch.context() as m:
        if at == "rename":
            m.setattr(work.os, "rename", full(work.os.rename, lambda name: name.endswith("out")))
        elif at == "plan.json":
            m.setattr(work.json, "dumps", full(work.json.dumps, lambda name: "bits" in name))
        elif at == "tokenizer_config.json":
            m.setattr(work.shutil, "copyfile", full(work.shutil.copyfile, lambda name: name.endswith(at)))
        else:
            m.setattr(Path, "write_text", full(Path.write_text, lambda name: at in name))
        with pytest.raises(ResourceError, match="No space left on device"):
            quantize(str(path), tmp_path / "out", chosen, None, "cpu")
    assert not (tmp_path / "out").exists()
    report = quantize(str(path), tmp_path / "out", chosen, None, "cpu")
    assert report.resumed == (0 if at == "plan.json" else 2)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole") and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_written_of_each_kind_answers_as_transformers_does_with_its_numbers(tmp_path, kind, method):
    path, _, hf = tiny_dir(tmp_path / "plain", kind, **SIZES, **KINDS[kind])
    text = calibration(tmp_path)
    read = {} if method == "rtn" else {"samples": 4, "length": 32}
    chosen = QuantizeOptions(method, group=32, format="gptq_v2", symmetric=False, **read)
    quantize(str(path), tmp_path / "out", chosen, None if method == "rtn" else text, "cpu")
    tensors = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    layout, packed = PackedFormat.of(chosen, torch.float32), 0
    for stem in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        own = {
            name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{stem}.") and name != f"{stem}.bias"
        }
        tensors[f"{stem}.weight"] = layout.coded({n.removeprefix(f"{stem}."): t for n, t in own.items()}).weight()
        packed += 1
    assert packed == sum(1 for n in hf.state_dict() if n.endswith("_proj.weight"))
    missing, unexpected = hf.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, "that of a tied head"
    with torch.inference_mode():
        want = hf.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    sizes = {"num_kvcache_blocks": 20, "max_num_seqs": 2, "skip_tokenizer_init": True, "device": "cpu"}
    with LLM(model=str(tmp_path / "out"), dtype="float32", **sizes) as llm:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        (out,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    assert list(out.outputs[0].token_ids) == want[len(PROMPT) :].tolist()
