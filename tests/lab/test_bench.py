"""``minivllm bench``: each seam's share is measured where its work is done, and the labels go when the profile ends."""

from __future__ import annotations

import json

import pytest
import torch
from plugin_helpers import write_package
from torch.autograd import DeviceType

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.core.interfaces.quantizer import WeightScheme
from minivllm.errors import RequestError
from minivllm.plugins.executor.seam_profile import device_shares, schemes

package = pytest.fixture(write_package)


@pytest.fixture(autouse=True)
def _one_thread():
    """Limit torch to one thread, because the models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = ["--set", "max_num_seqs=4", "--set", "max_num_batched_tokens=256", "--set", "max_model_len=96"]
BURNS = """
import torch
from minivllm.core.interfaces.sampling import Processor, Row
class Burns(Processor):
    def bind(self, params, prompt_len):
        return Row()
    def apply(self, logits, rows, state):
        x = torch.ones(400, 400)
        for _ in range(20):
            x = torch.mm(x, x).clamp_(-1, 1)
"""


def test_a_profile_gives_each_seam_its_share_and_a_processor_that_computes_the_most(package, capsys, tmp_path):
    package("acme_burns", BURNS)
    trace = tmp_path / "trace.json"
    options = ["--batch-size", "2", "--input-len", "20", "--steps", "2", "--trace", str(trace), "--json"]
    own = ["--set", 'processors=["acme_burns:Burns"]', "--allow-target", "acme_burns"]
    assert main(["bench", "profile", *SMALL, *own, *options]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["batch_size"], figures["input_len"]) == (2, 20)
    for phase, steps in (("prefill", 1), ("decode", 2)):
        spent = figures[phase]["ms"]
        assert figures[phase]["steps"] == steps
        burns = "processor:local/acme_burns:Burns"
        assert set(spent) == {"attention", "engine", "kvformat", "model", "quantizer", "sampler", burns}
        assert all(ms > 0 for ms in spent.values())
    spent = figures["decode"]["ms"]
    assert max(spent, key=spent.get) == burns and spent[burns] > 0.4 * sum(spent.values())
    assert figures["host_ms"][burns] > 0
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"seam attention", "seam " + burns} <= names


def test_the_table_adds_up_to_all(capsys):
    assert main(["bench", "profile", *SMALL, "--batch-size", "2", "--input-len", "8", "--steps", "2"]) == 0
    head, columns, *rows, whole, _ = capsys.readouterr().out.splitlines()
    assert "2 requests of 8 tokens; eager steps, CPU ms a step" in head and "decode, 2 steps" in columns
    cells = [row.split()[-6:] for row in rows]
    for at in (0, 3):
        assert sum(float(c[at]) for c in cells) == pytest.approx(float(whole.split()[1 + at]), abs=0.01)
        assert sum(float(c[at + 1]) for c in cells) == pytest.approx(100, abs=1)
    assert any(row.startswith("attention  minivllm/sdpa ") for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "5"], "--batch-size 5 is more than max_num_seqs=4; lower it"),
        (
            ["--input-len", "95"],
            "--input-len 95 and --steps 1 need",
        ),
        (["--steps", "0"], "0: expected a whole number of at least 1"),
        (["--trace", "/no/folder/t.json"], "/no/folder/t.json: No such file or directory"),
    ],
)
def test_what_cannot_be_profiled_is_refused(options, message, capsys):
    try:
        code = main(["bench", "profile", *SMALL, "--batch-size", "2", *options])
    except SystemExit as end:
        code = end.code
    assert code == 2 and message in capsys.readouterr().err


def test_the_labels_are_there_while_a_profile_runs_and_at_no_other_time():
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64}
    with LLM("pocket", graph="off", **sizes) as llm:  # captured steps are the model's as a whole
        runner = llm.engine.executor.runner
        parts = [runner, runner.backend, runner.backend.ctx.kv_format, *runner.processors, *schemes(runner.model)]
        before = [dict(vars(part)) for part in parts]
        want = llm.generate("One day", greedy, use_tqdm=False)[0].tokens
        with pytest.raises(RequestError, match="no profile of seams is running"):
            llm.engine.call("seams_stop")
        llm.engine.call("seams_start")
        assert "forward" in vars(runner.backend)
        with pytest.raises(RequestError, match="a profile of seams is running already"):
            llm.engine.call("seams_start")
        assert llm.generate("One day", greedy, use_tqdm=False)[0].tokens == want
        assert llm.engine.call("seams_stop")["attention"] > 0
        for part, had in zip(parts, before, strict=True):
            assert set(vars(part)) == set(had), type(part)
        assert all(isinstance(scheme, WeightScheme) for scheme in schemes(runner.model))
        assert type(runner.model) is type(before[0]["model"]) and "forward" not in vars(runner.backend)


def test_every_weight_of_a_model_is_found_once():
    with LLM("pocket", max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64) as llm:
        model = llm.engine.executor.runner.model
        found = list(schemes(model))
        layers = llm.resolved.hf_config.num_hidden_layers
        assert len(found) == len({id(s) for s in found}) >= 4 * layers  # qkv, o, gate and up, down
        assert all(isinstance(s.tensors["weight"], torch.Tensor) for s in found)


class _Event:
    """As Kineto's events answer."""

    def __init__(self, name, start, us, correlation=0, device=DeviceType.CPU, annotation=False):
        self.name, self.start_ns, self.duration_ns = (lambda: name), (lambda: start * 1000), (lambda: us * 1000)
        self.correlation_id, self.device_type = (lambda: correlation), (lambda: device)
        self.is_user_annotation = lambda: annotation


def test_a_kernel_counts_for_the_innermost_label_at_its_launch_whoever_launched_it():
    gpu = dict(device=DeviceType.CUDA)
    events = [
        _Event("seam model", 0, 100),
        _Event("seam attention", 20, 30),
        _Event("aten::mm", 5, 3, correlation=2),  # operators are numbered too, from one on
        _Event("cudaLaunchKernel", 6, 1, correlation=1),
        _Event("cuLaunchKernelEx", 25, 1, correlation=2),
        _Event("cudaLaunchKernelExC", 60, 1, correlation=3),
        _Event("cudaMemcpyAsync", 110, 1, correlation=4),
        _Event("gemm", 200, 1000, correlation=1, **gpu),
        _Event("_decode", 1300, 2000, correlation=2, **gpu),
        _Event("_gate_mul", 3300, 4000, correlation=3, **gpu),
        _Event("Memcpy HtoD", 7300, 8000, correlation=4, **gpu),
        _Event("lost", 16000, 16000, correlation=9, **gpu),
        _Event("seam model", 200, 9000, annotation=True, **gpu),
    ]
    assert device_shares(events) == {"model": 5.0, "attention": 2.0, "engine": 8.0, "unknown": 16.0}
