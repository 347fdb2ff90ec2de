"""``bench kernels``: the operations of an engine, their floors, and torch's own beside them."""

from __future__ import annotations

import json

import pytest
import torch

from minivllm import LLM
from minivllm.cli import main
from minivllm.device.layers.fused import Normed
from minivllm.lab.bench.floors import MachinePeaks, OperationClock, machine_peaks
from minivllm.lab.bench.kernels import KernelBench, LoadOperations
from minivllm.lab.bench.textbook import copies

SMALL = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_kvcache_blocks": 64,
    "max_model_len": 128,
}


@pytest.fixture(scope="module")
def bench():
    with LLM("pocket", **SMALL) as llm:
        yield KernelBench(llm)


def tensors(value):
    """Return the tensor on which a call works."""
    if isinstance(value, tuple) and not isinstance(value, Normed):
        value = value[0]
    return value.x if isinstance(value, Normed) else value


@pytest.mark.parametrize(("rows", "tokens", "context"), [(1, 1, 40), (3, 1, 40), (1, 40, 40)])
def test_each_operation_has_one_call_a_layer_and_gives_what_torchs_own_gives(bench, rows, tokens, context):
    with torch.inference_mode():
        found = {one.name: one for one in bench.operations(rows, tokens, context)}
        layers = len(bench.model.blocks)
        assert {len(one.calls) for one in found.values() if one.of_step and one.name != "embedding"} == {layers}
        for name in ("embedding", "qkv", "attention out + norm", "gate and up + gate", "head", "norm + add", "gate"):
            own, other = tensors(found[name].calls[0]()), found[name].torch[0]()
            assert tensors(own).shape == other.shape, name
        for name in ("embedding", "norm + add", "gate", "draw, temperature 0"):
            own = found[name].calls[0]()
            if name.startswith("draw"):
                own = found[name].calls[0].args[3].tokens
            torch.testing.assert_close(tensors(own), found[name].torch[0]())
        bench.clear()


def test_rotary_embedding_and_its_torch_counterpart_turn_queries_alike(bench):
    with torch.inference_mode():
        found = {one.name: one for one in bench.operations(3, 1, 40)}
        one = found["rotary and write"]
        torch.testing.assert_close(one.calls[0](), one.torch[0](), atol=1e-4, rtol=1e-4)
        bench.clear()


def test_a_step_moves_all_weights_but_the_heads_and_all_keys_once(bench):
    with torch.inference_mode():
        found = bench.operations(2, 1, 40)
    whole = found[-1]
    weights = sum(t.numel() * t.element_size() for m in bench.parts.modules.values() for t in m.tensors.values())
    embedding = bench.model.embed.weight.numel() * 4
    layer = bench.model.blocks[0].attn.layer
    token = sum(t[0].numel() * t.element_size() for t in layer.cache.values()) / bench.wiring.block
    keys = 2 * 40 * token * len(bench.model.blocks)
    assert weights - embedding + keys < whole.size < 1.05 * (weights - embedding + keys)
    assert whole.flops > 2 * 2 * (weights - embedding) / 4 * 0.95
    bench.clear()


def test_no_row_reads_a_block_of_another(bench):
    plan = bench.plan(3, 1, 40)
    table = bench.state.table[0, : len(plan.slots), : -(-40 // bench.wiring.block)]
    assert len(table.unique()) == table.numel() and int(table.min()) >= 1
    bench.clear()
    assert bench.state.stopped.all() and not bench.state.table.any()


def test_keys_that_a_window_hides_are_not_counted():
    class Spec:
        window = 10

    load = LoadOperations.__new__(LoadOperations)
    load.rows, load.tokens, load.context = 2, 1, 100
    assert load._visible(Spec) == (20.0, 20.0)
    load.rows, load.tokens, load.context = 1, 4, 4
    assert load._visible(Spec) == (10.0, 4.0)


def test_a_floor_is_the_longer_of_the_two():
    peaks = MachinePeaks(100.0, 10.0)
    assert peaks.floor(200, 10) == (2.0, "memory") and peaks.floor(100, 50) == (5.0, "arithmetic")


def test_roofs_are_what_the_machine_does_and_rounds_are_counted():
    peaks = machine_peaks("cpu", torch.float32)
    assert 1e8 < peaks.bytes_per_s < 1e13 and 1e8 < peaks.flops_per_s < 1e16
    seen = []
    prepared = OperationClock("cpu").prepare([lambda: seen.append(0), lambda: seen.append(1)])
    before = len(seen)
    assert prepared.seconds() > 0 and len(seen) - before == 2 * prepared.rounds


def test_operands_are_copied_until_no_cache_holds_them_and_no_more_than_there_are_calls():
    assert copies(1 << 20, 8) == 8 and copies(1 << 30, 8) == 1 and copies(0, 100) == 64


def test_the_command_says_the_same_in_its_table_and_its_json(tmp_path, capsys):
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    out = tmp_path / "k.json"
    flags = ["--batch-size", "2", "--context-len", "32", "--input-len", "16", "--repeats", "2", "--warmups", "0"]
    assert main(["bench", "kernels", *sets, *flags, "--output-json", str(out)]) == 0
    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    assert found["kind"] == "kernels" and found["memory_bytes_per_s"] > 0 and len(found["machine_states"]) == 4
    for row in found["rows"]:
        assert row["us"] > 0 and row["share_of_floor"] == pytest.approx(row["floor_us"] / row["us"])
        assert row["operation"] in printed
    assert {row["tokens"] for row in found["rows"]} == {2, 16}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size", "9"], "--batch-size 9 is more than max_num_seqs=4"),
        (["--input-len", "100", "--context-len", "16", "--batch-size", "1"], "max_num_batched_tokens=64"),
        (["--context-len", "300", "--batch-size", "1", "--input-len", "16"], "more than max_model_len=128"),
        (["--context-len", "128", "--batch-size", "4", "--set", "num_kvcache_blocks=9", "--input-len", "16"], "blocks"),
        (["--set", "executor=process"], "use executor=local"),
    ],
)
def test_loads_that_the_engine_has_no_room_for_are_refused(capsys, flags, message):
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    assert main(["bench", "kernels", *sets, *flags]) == 2
    assert message in capsys.readouterr().err
