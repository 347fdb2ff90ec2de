"""``minivllm quantize``: what is written is read, computes what its numbers say, and loses less than rounding does."""

from __future__ import annotations

import errno
import json
import shutil
from random import Random

import pytest
import torch
from packed_checkpoints import LLM_SIZES, PROMPT, SIZES
from safetensors.torch import load_file

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.errors import ConfigError, ModelError, ResourceError
from minivllm.lab.quantize import run as run_module
from minivllm.lab.quantize import work as work_module
from minivllm.lab.quantize.awq import find_scales
from minivllm.lab.quantize.folding import Fold, find_fold, find_uses, fold_in
from minivllm.lab.quantize.gptq import solve
from minivllm.lab.quantize.grid import Grid
from minivllm.lab.quantize.layers import LayerModel, LayerWeights, watch
from minivllm.lab.quantize.layouts import PackedFormat
from minivllm.lab.quantize.options import QuantizeOptions
from minivllm.lab.quantize.run import Quantizing, quantize
from minivllm.plugins.quantizer.compressed import CompressedTensors
from minivllm.plugins.quantizer.gptq import Gptq
from minivllm.pocket import tasks
from minivllm.pocket.evaluate import Minivllm, default_cases, evaluate
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import ARCHS, save, tiny_config, tiny_dir, tiny_model

READERS = {"gptq": Gptq, "compressed-tensors": CompressedTensors}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return (directory of a model, its config, transformers' model)."""
    return tiny_dir(tmp_path_factory.mktemp("plain") / "model", "llama", **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "ids.jsonl"
    torch.manual_seed(3)
    path.write_text("\n".join(json.dumps({"ids": torch.randint(0, 64, (50,)).tolist()}) for _ in range(4)))
    return str(path)


def options(method="gptq", **more):
    read = {} if method == "rtn" else {"samples": 4, "length": 48}
    return QuantizeOptions(method, **{"group": 32, **read, **more})


def made(plain, out, text, **more):
    chosen = options(**more)
    return quantize(str(plain[0]), out, chosen, text if chosen.calibrated else None, "cpu"), chosen


def unpacked(out, chosen):
    """Return the float32 weights of a written checkpoint by name."""
    tensors = {name: t for path in out.glob("*.safetensors") for name, t in load_file(path).items()}
    layout = PackedFormat.of(chosen, torch.float32)
    mark = ".qweight" if chosen.format != "compressed-tensors" else ".weight_packed"
    for stem in [name.removesuffix(mark) for name in tensors if name.endswith(mark)]:
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{stem}.")}
        tensors[f"{stem}.weight"] = layout.coded({n.removeprefix(f"{stem}."): t for n, t in own.items()}).weight()
    return tensors


@pytest.mark.parametrize(
    "more",
    [
        {"method": "rtn"}, {"method": "rtn", "symmetric": False}, {"method": "rtn", "format": "gptq_v2", "bits": 8},
        {"method": "rtn", "symmetric": False, "format": "compressed-tensors"},
        {"method": "rtn", "format": "compressed-tensors", "group": -1, "bits": 8},
        {}, {"act_order": "groups", "symmetric": False, "format": "gptq_v2"}, {"group": -1, "act_order": "groups"},
        {"act_order": "static", "format": "compressed-tensors"}, {"method": "awq"},
        {"method": "awq", "symmetric": False, "format": "compressed-tensors"},
        {"method": "rtn", "skip": (r".*\.v_proj", "model.layers.1.mlp")},
    ],
)  # fmt: skip
def test_logits_of_what_is_written_are_those_of_its_numbers_in_transformers(more, plain, text, tmp_path):
    _, cfg, hf = plain
    _, chosen = made(plain, tmp_path / "out", text, **more)
    raw = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    harness = Harness(tmp_path / "out", ARCHS["llama"](), cfg, quantizer=READERS[raw["quant_method"]](None, raw))
    known, weights = hf.state_dict(), unpacked(tmp_path / "out", chosen)
    assert weights.keys() == known.keys()
    kept = {name: t.clone() for name, t in known.items()}
    try:
        hf.load_state_dict(weights)
        with torch.inference_mode():
            want = hf(torch.tensor([PROMPT])).logits[0]
            torch.testing.assert_close(harness.step({0: PROMPT})[0], want, rtol=1e-4, atol=1e-4)
    finally:
        hf.load_state_dict(kept)
    packed = [n for n in known if n.endswith("_proj.weight") and not torch.equal(weights[n], known[n])]
    left = [n for n in known if n.endswith("_proj.weight") and chosen.left_out(n.removesuffix(".weight"))]
    assert len(packed) == 14 - len(left)  # of two layers of seven


def by_surgery(w, moments, grid, damping):
    """Quantize by Frantar's equations in float64, with an inverse that loses one row and column at a time."""
    k, size = len(moments), grid.size(len(moments))
    inverse = torch.linalg.inv(moments.double() + damping * moments.double().diagonal().mean() * torch.eye(k))
    w, codes = w.double().clone(), torch.empty(w.shape, dtype=torch.uint8)
    importance = []
    left = inverse.clone()
    for j in range(k):
        importance.append(1 / left[j, j])
        left = left - torch.outer(left[:, j], left[j]) / left[j, j]
    for j in range(k):
        if j % size == 0:
            groups = w[:, None, j : j + size].float()
            scale, zero = grid.fitted(groups, torch.stack(importance[j : j + size])[None].float())
        q = grid.codes(w[:, j : j + 1], scale, zero)
        codes[:, j] = q[:, 0].to(torch.uint8)
        error = (w[:, j] - ((q - zero) * scale)[:, 0]) / inverse[j, j]
        w[:, j + 1 :] -= torch.outer(error, inverse[j, j + 1 :])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes


@pytest.mark.parametrize("group", [32, 64, -1])
def test_codes_of_gptq_are_those_of_its_equations(group):
    torch.manual_seed(0)
    x = torch.randn(300, 192) @ (torch.eye(192) + 0.2 * torch.randn(192, 192))
    w, moments = torch.randn(24, 192), x.T @ x / 300
    grid = Grid(options(group=group), torch.float16)
    found = solve(w, moments, grid, 0.01)
    assert (found.codes != by_surgery(w, moments, grid, 0.01)).float().mean() < 0.01  # ties of rounding
    losses = []
    for coded in (
        found,
        solve(w, moments, grid, 0.01, act_order="groups"),
        solve(w, moments, grid, 0.01, "static"),
        grid.coded(w),
    ):
        losses.append(float(((coded.weight() - w) @ x.T).square().mean()))
    assert max(losses[:3]) < 0.5 * losses[3]


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["no", "static"])
@pytest.mark.parametrize("group", [32, 128, 256, -1])
def test_codes_of_gptq_on_a_gpu_are_those_of_a_cpu(group, order):
    torch.manual_seed(group)
    x = torch.randn(2000, 512) @ (torch.eye(512) + 0.2 * torch.randn(512, 512))
    w, moments = torch.randn(203, 512), x.T @ x / 2000
    grid = Grid(options(group=group, symmetric=group != 128), torch.float16)
    want = solve(w, moments, grid, 0.01, order)
    found = solve(w.cuda(), moments.cuda(), grid, 0.01, order)
    # what is in the middle between two codes may take the other one, and what follows goes by it
    assert (found.codes.cpu() != want.codes).float().mean() < 0.05
    lost = [float(((one.weight().cpu() - w) @ x.T).square().mean()) for one in (found, want)]
    assert lost[0] <= 1.01 * lost[1]


@pytest.mark.gpu
def test_what_is_quantized_on_a_gpu_is_near_what_a_cpu_makes(plain, text, tmp_path):
    errors = {}
    for device in ("cuda", "cpu"):
        report = quantize(str(plain[0]), tmp_path / device, options(), text, device)
        errors[device] = sum(report.errors)
        assert load_file(tmp_path / device / "model-00001-of-00003.safetensors")
    assert abs(errors["cuda"] / errors["cpu"] - 1) < 0.1  # hidden states are bfloat16 there


def test_gptq_takes_inputs_that_are_never_anything_or_always_the_same():
    torch.manual_seed(1)
    x = torch.randn(64, 64)
    x[:, 5], x[:, 9] = 0, x[:, 8]
    grid, w = Grid(options(), torch.float16), torch.randn(8, 64)
    found = solve(w, x.T @ x / 64, grid, 0.01)
    assert torch.isfinite(found.weight()).all()
    assert ((found.weight() - w)[:, 5].abs() <= found.scale[:, 0] * 8).all()
    with pytest.raises(ModelError, match="not finite numbers"):
        solve(w, torch.full((64, 64), float("nan")), grid, 0.01)


def test_less_of_the_outputs_is_lost_than_by_rounding(text, tmp_path):
    model = tiny_model(tiny_config("llama", **SIZES))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "layernorm" in name:
                p[::8] *= 8  # as trained models have inputs that are larger than others
    save(model, tmp_path / "model")
    with open(text) as file:
        ids = torch.tensor([json.loads(line)["ids"][:48] for line in file])
    with torch.inference_mode():
        true, lost = model(ids).logits, {}
    for method in ("rtn", "gptq", "awq"):
        report, chosen = made((tmp_path / "model",), tmp_path / method, text, method=method)
        model.load_state_dict(unpacked(tmp_path / method, chosen))
        with torch.inference_mode():
            lost[method] = float((model(ids).logits - true).square().mean())
        assert not report.unscaled and len(report.errors) == (0 if method == "rtn" else 2)
    assert lost["gptq"] < 0.7 * lost["rtn"] and lost["awq"] < 0.9 * lost["rtn"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_pocket_in_4_bits_loses_at_most_4_points_of_exact_match(method, tmp_path):
    text = tmp_path / "text.jsonl"
    rng = Random("calibration")
    with text.open("w") as file:
        for _ in range(40):
            for task in ("needle", "copy", "sums", "json", "story", "echo"):
                case = tasks.draw(task, rng, **({"pieces": (100, 300), "needles": (4, 8)} if task == "needle" else {}))
                messages = [*case.messages, {"role": "assistant", "content": case.answer}]
                file.write(json.dumps({"messages": messages}) + "\n")
    quantize("pocket", tmp_path / "out", QuantizeOptions(method, samples=16, length=512), str(text), "cpu")
    right = []
    for model in ("pocket", str(tmp_path / "out")):
        with LLM(model=model, device="cpu", dtype="float32") as llm:
            cases = default_cases(100, tasks=("echo", "copy", "sums", "json"))
            right.append({task: share for task, _, share in evaluate(Minivllm(llm).generate, cases)})
    assert all(right[1][task] >= share - 0.04 for task, share in right[0].items()), right


@pytest.mark.parametrize("group", [32, 128, -1])
def test_scales_of_awq_take_the_error_from_inputs_that_are_large(group):
    torch.manual_seed(2)
    x = torch.randn(200, 128)
    x[:, ::32] *= 20
    w, moments, grid = torch.randn(64, 128), x.T @ x / 200, Grid(options("awq", group=group), torch.float16)
    s = find_scales([w[:32], w[32:]], x.abs().mean(0), moments, grid)
    plain, scaled, cut = grid.coded(w), grid.coded(w * s), grid.coded(w * s, moments / (s[:, None] * s), cut=True)
    errors = [float(((c.weight() / by - w) @ x.T).square().sum()) for c, by in ((plain, 1), (scaled, s), (cut, s))]
    assert errors[2] < errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_scales_that_are_folded_in_leave_a_layer_as_it_was(kind, tmp_path):
    path, _, _ = tiny_dir(tmp_path, kind, **SIZES)
    model = LayerModel(open_checkpoint(str(path)), "cpu", torch.float32)
    hidden = model.embedded(torch.arange(40).view(2, 20))
    with model.filled(0) as layer, torch.no_grad():
        weights = LayerWeights(model, 0)
        names = list(model.linears(0))
        found = watch(layer, names, weights.run, hidden, lambda: None)
        assert [" ".join(one.names) for one in found] == [
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj mlp.up_proj",
            "mlp.down_proj",
        ]
        before, uses = weights.run(hidden[0]), find_uses(layer, weights.run, hidden[0])
        for inputs in found:
            fold = find_fold(layer, inputs, 2, uses)
            s = fold.tied(torch.rand(len(inputs.means)) + 0.5)
            assert fold_in(weights, inputs.names, fold, s, hidden[0], before, set(names))
            own = weights.get(f"{inputs.names[0]}.weight")
            torch.testing.assert_close(own, model.tensor(model.name(0, f"{inputs.names[0]}.weight")) * s)
        torch.testing.assert_close(weights.run(hidden[0]), before, rtol=1e-4, atol=1e-4)
        known = dict(weights.changed)
        wrong = Fold("self_attn.k_proj", 2, 2)
        assert not fold_in(weights, ["self_attn.o_proj"], wrong, s[:64] * 2, hidden[0], before, set(names))
        assert weights.changed.keys() == known.keys() and all(weights.changed[n] is known[n] for n in known)
        torch.testing.assert_close(weights.run(hidden[0]), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("residual", [1, 1e4])
def test_a_fold_that_another_module_would_see_is_refused_also_under_a_large_residual(residual, plain, text, tmp_path):
    model = LayerModel(open_checkpoint(str(plain[0])), "cpu", torch.float32)
    hidden = [residual * x for x in model.embedded(torch.arange(20).view(1, 20))]
    with model.filled(0) as layer, torch.no_grad():
        weights, names = LayerWeights(model, 0), [n for n in model.linears(0) if not n.endswith("q_proj")]
        found = watch(layer, names, weights.run, hidden, lambda: None)
        uses, before = find_uses(layer, weights.run, hidden[0]), weights.run(hidden[0])
        assert (before - hidden[0]).norm() < (1e-2 if residual > 1 else 9) * before.norm()
        found_at = {" ".join(inputs.names): find_fold(layer, inputs, 2, uses) for inputs in found}
        assert [at for at, fold in found_at.items() if fold is None] == ["self_attn.k_proj self_attn.v_proj"]
        s = torch.rand(64) + 0.5
        for more, folds in (([], False), (["self_attn.q_proj"], True)):
            taken = ["self_attn.k_proj", "self_attn.v_proj", *more]
            assert fold_in(weights, taken, Fold("input_layernorm", 1, 1), s, hidden[0], before, set(names)) is folds
    report, _ = made(plain, tmp_path / "out", text, method="awq", skip=(r".*q_proj",))
    unscaled = [f"model.layers.{n}.self_attn.{part}_proj" for n in (0, 1) for part in "kv"]
    assert report.unscaled == unscaled


def test_a_run_that_was_broken_off_goes_on_and_writes_what_one_in_one_piece_writes(plain, text, tmp_path):
    def stop(done, what):
        if what == "layer 1":
            raise KeyboardInterrupt

    for method in ("gptq", "awq"):
        chosen, out = options(method), tmp_path / method
        with pytest.raises(KeyboardInterrupt):
            quantize(str(plain[0]), out, chosen, text, "cpu", stop)
        left = sorted(path.name for path in tmp_path.glob(f"{method}.partial/*"))
        assert not out.exists() and left == ["model-00001-of-00003.safetensors", "plan.json"]
        with pytest.raises(ConfigError, match=r"was started with bits=4, and this run has 8; remove it to start again"):
            quantize(str(plain[0]), out, options(method, bits=8), text, "cpu")
        assert quantize(str(plain[0]), out, chosen, text, "cpu").resumed == 1
        quantize(str(plain[0]), tmp_path / "whole", chosen, text, "cpu")
        for path in (tmp_path / "whole").glob("*.safetensors"):
            assert path.read_bytes() == (out / path.name).read_bytes()
            path.unlink()
        (tmp_path / "whole").rename(tmp_path / f"{method} whole")
        assert not list(tmp_path.glob("*.partial"))


def test_layers_are_never_without_the_plan_that_says_what_they_are_of(plain, tmp_path, monkeypatch):
    def fails(old, new):
        raise OSError(errno.EIO, "Input/output error")

    source, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(plain[0], source)
    (source / "plan.json").write_text("{}")  # somebody's own
    with monkeypatch.context() as m, pytest.raises(ResourceError, match="Input/output error"):
        m.setattr(work_module.os, "rename", fails)
        quantize(str(source), out, options("rtn"), None, "cpu")
    with pytest.raises(ConfigError, match="was started with bits=4, and this run has 8"):
        quantize(str(source), out, options("rtn", bits=8), None, "cpu")
    plan = (tmp_path / "out.partial/plan.json").rename(tmp_path / "plan.json")
    with pytest.raises(
        ConfigError, match=r"has layers, and no plan.json with the options of their run; remove it to start again"
    ):
        quantize(str(source), out, options("rtn", bits=8), None, "cpu")
    plan.rename(tmp_path / "out.partial/plan.json")
    assert quantize(str(source), out, options("rtn"), None, "cpu").resumed == 2
    assert (out / "config.json").exists() and not (out / "plan.json").exists()


def test_a_full_device_leaves_what_the_same_command_goes_on_with(plain, text, tmp_path, capsys, monkeypatch):
    full = [True]

    def solved(*args):
        full.append(full[0] and len(full) == 8)  # the second layer
        if full[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return solve(*args)

    monkeypatch.setattr(run_module.gptq, "solve", solved)
    command = ["quantize", str(plain[0]), str(tmp_path / "out"), "--method", "gptq", "--group", "32", "--calibration"]
    command += [text, "--samples", "4", "--length", "48", "--device", "cpu"]
    assert main(command) == 5
    output = capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]
    assert f"Tried to allocate 2 GiB; finished layers are in {tmp_path}/out.partial: run the same command" in output
    assert "start from the first layer with --device cpu or a smaller --length" in output
    full[0] = False
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "1 finished by a run before, outputs of linear modules of this run's layers lose" in output


@pytest.mark.parametrize("group, order", [(-1, None), (32, "weight")])
def test_a_scale_for_a_whole_channel_has_no_order_in_compressed_tensors(group, order):
    chosen = options(group=group, act_order="static", format="compressed-tensors")
    weights = PackedFormat.of(chosen, torch.float32).settings([])["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["actorder"]) == ("channel" if group == -1 else "group", order)


def test_a_full_disk_leaves_nothing_half_written(plain, tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(work_module, "save_file", full)
    with pytest.raises(ResourceError, match=r"model-00001-of-00003.* cannot be written \(No space left on device\)"):
        quantize(str(plain[0]), tmp_path / "out", options("rtn"), None, "cpu")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == ["plan.json"]
    monkeypatch.setattr(work_module.shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(ResourceError, match="takes 0 MiB and 0 MiB are free"):
        quantize(str(plain[0]), tmp_path / "out", options("rtn"), None, "cpu")


def test_the_command_writes_a_directory_that_is_served(plain, text, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["quantize", str(plain[0]), str(out), "--method", "gptq", "--group", "32", "--calibration", text]
    assert main([*command, "--samples", "4", "--length", "40", "--device", "cpu"]) == 0
    assert f"{out}: 0.1 MiB in" in capsys.readouterr().out
    with LLM(model=str(out), **LLM_SIZES) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert len(llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    "given, code, message",
    [
        (["--method", "gptq"], 2, "--method gptq: expected --calibration FILE"),
        (["--method", "rtn", "--calibration", "TEXT"], 2, "--method rtn reads no text"),
        (["--method", "rtn", "--bits", "5"], 2, "argument --bits: invalid choice"),
        (["--method", "rtn", "--group", "12"], 2, "--group 12: expected a multiple of 8, or -1 for all inputs"),
        (["--method", "rtn", "--group", "128"], 2, "which the group size does not divide: use 32 or 16 or 8 or -1"),
        (["--method", "rtn", "--act-order", "static"], 2, "--act-order with --method rtn: only --method gptq"),
        (["--method", "rtn", "--skip", "("], 2, "--skip '(': expected a regular expression"),
        (["--method", "rtn", "--skip", ".*q_proj", "--skip", "q_pro"], 2, "--skip 'q_pro': matches no linear module"),
        (["--method", "rtn", "--samples", "4"], 2, "--samples with --method rtn: only --method gptq and awq"),
        (["--method", "rtn", "--length", "2048"], 2, "--length with --method rtn: only --method gptq and awq"),
        (["--method", "rtn", "--skip", ".*"], 2, "--skip: leaves no linear module to quantize"),
        (["--method", "awq", "--calibration", "no.txt"], 3, "no.txt: no such file"),
        (["--method", "awq", "--calibration", "EMPTY"], 3, "no text to calibrate with; expected at least 192 tokens"),
        (["--method", "gptq", "--calibration", "TEXT", "--samples", "9"], 3, "200 tokens, expected 432 for 9 samples"),
        (["--method", "gptq", "--calibration", "WORDS"], 3, "no tokenizer"),
        (["--method", "gptq", "--calibration", "ODD"], 3, ":1: {'id': 3}: expected {\"text\": \"...\"}"),
        (["--method", "gptq", "--calibration", "FAR"], 3, "token 99 is not in the model's vocabulary, expected 0"),
        (["--method", "gptq", "--calibration", "TEXT", "--length", "999"], 2, "the model reads at most 256 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_written(
    given, code, message, plain, text, tmp_path, capsys
):
    files = {"EMPTY": "", "ODD": '{"id": 3}', "FAR": '{"ids": [99]}\n' * 200, "WORDS": '{"text": "Once"}'}
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    named = {"TEXT": text, **{name: str(tmp_path / f"{name}.jsonl") for name in files}}
    sizes = [] if "--group" in given else ["--group", "32"]
    if "rtn" not in given:
        sizes += [] if "--length" in given else ["--length", "48"]
        sizes += [] if "--samples" in given else ["--samples", "4"]
    words = ["quantize", str(plain[0]), str(tmp_path / "out"), *[named.get(w, w) for w in given], *sizes]
    try:
        assert main([*words, "--device", "cpu"]) == code
    except SystemExit as e:
        assert e.code == code
    output = capsys.readouterr().err
    assert message in output and output.count("minivllm: error:") == 1 and output.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_models_that_cannot_be_quantized_are_refused_in_one_line(plain, tmp_path):
    made(plain, tmp_path / "packed", None, method="rtn")
    mixture, _, _ = tiny_dir(tmp_path / "mixture", "qwen3_moe")
    for model, error, message in (
        (tmp_path / "packed", ModelError, "is quantized already"),
        (mixture, ModelError, "its layers are not plain"),
        (tmp_path / "nowhere", ModelError, "no such directory"),
    ):
        with pytest.raises(error, match=message):
            Quantizing(str(model), tmp_path / "out", options("rtn"), None, "cpu")
    with pytest.raises(ConfigError, match="exists already; expected a directory that does not exist"):
        Quantizing(str(plain[0]), tmp_path / "packed", options("rtn"), None, "cpu")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for path, kind in ((tmp_path / "link", "a symbolic link"), ("/proc", "the mount point of a disk")):
        with pytest.raises(ConfigError, match=f"{path}: is {kind}, which no directory can be renamed to"):
            Quantizing(str(plain[0]), path, options("rtn"), None, "cpu")
    raw = json.loads((plain[0] / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**raw, "model_type": "nobody", "architectures": ["Nobody"]}))
    (other / "model.safetensors").write_bytes((plain[0] / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="transformers makes no model of architecture Nobody"):
        Quantizing(str(other), tmp_path / "out", options("rtn"), None, "cpu")
