"""The kernels of quantized weights on a GPU, and the engine with them; under the interpreter the kernels are tested by
``test_kernels.py``, and here that they compile."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import quant_kernels as checks
import rounded_rows

from minivllm import LLM, SamplingParams
from minivllm.device.kernels import eight_bits, quant, quant_gemv, quant_large_m, scaled
from minivllm.testing.tiny import tiny_dir

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# small relatives of an 8B model's: outputs beyond a tile, inputs beyond a step, one that no step divides
WIDE = [
    ("int8", 1536, 1024, 0, False),
    ("int8", 256, 3584, 0, False),
    ("int8", 256, 5120, 0, False),
    ("fp8", 256, 5120, 0, False),
    ("int4", 256, 5120, 128, True),
    ("fp8", 1536, 1024, 0, False),
    ("int4", 1536, 1024, 32, False),
    ("int4", 256, 3584, 128, False),
    ("int4", 520, 1056, 32, True),
    ("nf4", 256, 5120, 64, False),
    ("nf4", 520, 1152, 32, False),
]
FORMS = {
    "int8": "int8",
    "int8 with the head": {"name": "int8", "options": {"lm_head": True}},
    "fp8-weight with the head": {"name": "fp8-weight", "options": {"lm_head": True}},
    "fp8": "fp8",
    "int8-w8a8": "int8-w8a8",
    "llm-int8": "llm-int8",
    "nf4": "nf4",
    "int4": "int4",
    "int4 asymmetric": {"name": "int4", "options": {"symmetric": False, "group_size": 64, "lm_head": True}},
    "int4 and 8 bits": {"name": "int4", "options": {"bits": {"*.down": 8, "layers.1.*.qkv": 16}}},
}
ROUNDING = ("fp8", "int8-w8a8", "llm-int8")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


@on_gpu
@pytest.mark.parametrize("shape", [*checks.SHAPES, *WIDE], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_weight_that_is_held(dtype, shape):
    few_rows = (0, 1, 2, 3, 7, 8, 16, 17)
    checks.check_products("cuda", dtype, shape, few_rows if dtype == torch.float32 else (*few_rows, 33, 64, 130, 300))


@on_gpu
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("shape", [*checks.SMALL, *(s for s in WIDE if s[0] in checks.EIGHT)], ids=str)
def test_few_rows_with_what_comes_before_and_behind_a_product(shape, rounded):
    checks.check_small("cuda", torch.bfloat16, shape, None, rounded)


@on_gpu
@pytest.mark.parametrize(
    "shape", [*checks.SMALL_FOUR, *(s for s in WIDE if s[0] == "int4" and s[2] % 64 == 0)], ids=str
)
def test_few_rows_of_four_bits_with_what_comes_before_and_behind_a_product(shape):
    checks.check_small_four("cuda", torch.bfloat16, shape, None)
    tile = dict(BN=16, EACH=1, SK=3, STAGES=3, num_warps=4)
    checks.check_small_four("cuda", torch.bfloat16, shape, tile)


@on_gpu
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("shape", [*checks.ONE_ROW, *checks.SMALL, *WIDE], ids=str)
def test_one_row_with_what_comes_before_and_behind_a_product(shape, rounded):
    if not (rounded and shape[0] in ("int4", "nf4")):
        checks.check_vector("cuda", torch.bfloat16, shape, None, rounded)
        for stages in (0, 3):
            second = {"EACH": 1} if shape[2] <= quant_gemv.SHORT else {"BK": 512}
            tile = dict(BN=2, STAGES=stages, num_warps=4, **second)
            checks.check_vector("cuda", torch.bfloat16, shape, tile, rounded)


@on_gpu
@pytest.mark.parametrize("shape", [*checks.TILES, *WIDE], ids=str)
def test_many_rows_by_tiles(shape):
    tile = dict(BM=64, BN=128, BK=128, STAGES=2, num_warps=8)
    checks.check_tiles("cuda", torch.bfloat16, shape, (9, 130), tile)
    checks.check_tiles("cuda", torch.bfloat16, shape, (17, 32, 33, 64, 65, 200), None)


@on_gpu
@pytest.mark.parametrize("shape", [(28672, 4096), (4096, 14336)], ids=str)
@pytest.mark.parametrize("form", ["int8", "fp8", "int4 in groups of 32", "int4 in groups of 128"])
def test_products_that_fill_the_device_are_right_and_the_same_however_often(form, shape):
    n, k = shape
    draw = lambda *size: torch.rand(*size, device="cuda")  # noqa: E731
    if form.startswith("int4"):
        group = int(form.split()[-1])
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        kernels = quant.Quantized(codes, draw(n, k // group) / 256 + 1e-3, None, group)
    else:
        codes = torch.randint(-127, 128, (n, k), device="cuda").to(checks.EIGHT[form])
        kernels = quant.Quantized(codes, draw(n) / 4096 + 1e-4)
    held = kernels.numbers(slice(0, n), torch.float32)
    for rows in (16, 32, 64, 128, 256):
        x = torch.randn(rows, k, device="cuda").to(torch.bfloat16)
        want = x.float() @ held.T
        for run in (kernels, *(partial(quant_large_m.matmul, kernels, tma=tma) for tma in (False, True))):
            first = run(x)
            assert float((first.float() - want).norm() / want.norm()) < 5e-3, f"{rows} rows"
            assert all(torch.equal(run(x), first) for _ in range(10)), f"{rows} rows"


@pytest.mark.slow
def test_no_product_with_a_side_in_registers_is_in_flight_at_the_end_of_a_loop():
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compiled_loops.py"))
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 74, done.stderr[-3000:]
    for line in lines:
        counts = re.findall(r"\((\d+), (\d+)\)", line)
        assert counts and all(int(found) > 0 and int(behind) == 0 for found, behind in counts), line


@on_gpu
def test_many_rows_of_an_int8_weight_by_whole_numbers_of_15_bits():
    checks.check_fixed("cuda", torch.bfloat16, (9, 130, 300), None)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_rows_are_taken_and_what_is_given_is_filled(dtype):
    checks.check_calls("cuda", dtype)
    checks.check_calls("cuda", dtype, "int4", 32)


@on_gpu
@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "int4, zero points in whole"])
def test_every_number_of_a_form_becomes_the_same_bfloat16_by_pairs(form):
    """All values of a byte, among weights of which the product with an identity shows each."""
    form, _, zeros = form.partition(", zero points in ")  # "", or "whole"
    kernels, held = checks.make(form, 512, 256, 32 if form == "int4" else 0, zeros, "cuda")
    if form != "int4":
        values = torch.arange(256).to(torch.uint8).view(checks.EIGHT[form])
        values = torch.where(values.float().isfinite(), values.float(), 0).to(values.dtype)
        kernels.weight.copy_(values.expand(512, 256))
        held = values.double() * kernels.scale.double().cpu()[:, None]
    eye = torch.eye(256, dtype=torch.bfloat16, device="cuda")
    for rows in (16, 64, 256):
        got = torch.cat([quant_large_m.matmul(kernels, part) for part in eye.split(rows)]).T.float()
        want = held.bfloat16().float().cuda() if form == "int4" else held.float().bfloat16().float().cuda()
        assert ((got - want).abs() <= 2.0**-7 * want.abs()).all()
        assert (got == want).float().mean() > 0.98  # the rest lie between two numbers


@on_gpu
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_give_the_tokens_of_steps_that_are_not(tmp_path, form, dtype):
    tiny_dir(tmp_path, "llama", **SIZES)
    prompts = [{"prompt_token_ids": [(7 * i * i + 3 * i + n) % 61 for i in range(n)]} for n in (24, 7, 40, 1, 5)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    got = {}
    for graph in ("off", "auto"):
        options = dict(device="cuda", dtype=dtype, graph=graph, max_num_seqs=8, num_kvcache_blocks=200)
        options |= dict(skip_tokenizer_init=True, enable_prefix_caching=False)
        with LLM(model=str(tmp_path), quantizer=form, **options) as llm:
            got[graph] = [[o.outputs[0].token_ids for o in llm.generate(prompts, params, False)] for _ in range(2)]
            assert got[graph][0] == got[graph][1], f"graph={graph}: other tokens the second time"
    same = [a == b for x, y in zip(*(g[0] for g in got.values()), strict=True) for a, b in zip(x, y, strict=True)]
    if form in ROUNDING:  # a last bit that differs with the number of rows becomes a step
        assert sum(same) > 0.3 * len(same)
    elif dtype == "float32":
        assert all(same)
    else:  # other numbers of rows are other sums, which rounding may part
        assert sum(same) > 0.5 * len(same)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("form", DTYPES, ids=str)
def test_rows_are_rounded_as_torch_rounds_them_and_their_products_scaled(form, dtype):
    sizes = [(9, 48, 64), (33, 1536, 1024), (300, 520, 3584), (700, 256, 1040)]
    if form == torch.bfloat16:  # as large as those for which the tiles were chosen
        sizes += [(17, 4096, 4096), (64, 28672, 4096), (60, 4096, 14336), (100, 6144, 4096), (256, 4096, 14336)]
        sizes += [(128, 28672, 4096), (200, 6144, 4096)]
    for m, n, k in sizes:
        x = torch.randn(m, k, device="cuda").mul_(torch.logspace(-2, 2, m, device="cuda")[:, None]).to(form)
        x[1] = 0
        q, scale = scaled.rows(x, dtype)
        want = x.float() / scale
        want = want.round() if dtype == torch.int8 else want.clamp(-448, 448).to(dtype).float()
        assert (q.float() == want).float().mean() > 0.999 and not q[1].float().any()
        spread = torch.where(x.float().abs().amax(1) > 0, x.float().abs().amax(1) / eight_bits.TOP[dtype], 1)
        torch.testing.assert_close(scale[:, 0], spread)
        weight = (torch.randn(n, k, device="cuda") * 30).clamp(-127, 127).to(dtype)
        by_column = torch.rand(n, device="cuda") / 100 + 1e-4
        exact = (q.double() * scale.double()) @ (weight.double() * by_column.double()[:, None]).T
        products = [scaled.product(q, scale, weight, by_column, x.new_empty(m, n))]
        arrived = torch.zeros(1024, dtype=torch.int32, device="cuda")
        for parts in (2, 4):
            tile = {**scaled.product_tile(m, n, k, dtype == torch.int8), "SK": parts}
            products.append(scaled.product(q, scale, weight, by_column, x.new_empty(m, n), tile, arrived))
        assert not arrived.any()
        if dtype == torch.float8_e4m3fn and form == torch.bfloat16 and n % 16 == 0:
            products.append(scaled.library(q, scale, weight, by_column, x.new_empty(m, n)))
        for got in products:
            off = (got.double() - exact).norm(dim=1) / (exact.norm(dim=1) + 1e-30)
            sums = 1e-6 if dtype == torch.int8 else 5e-3 if form == torch.bfloat16 else 1e-3
            assert off.max() < torch.finfo(form).eps + sums


@on_gpu
@pytest.mark.parametrize("eight", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("form", DTYPES, ids=str)
def test_rows_that_norms_and_gates_round_are_those_that_products_round_by_themselves(form, eight):
    for m, k in ((1, 64), (9, 1000), (300, 4096), (40, 14336), (5, 33000)):
        rounded_rows.check_rounding("cuda", form, eight, m, k)
    for m, shards in ((9, 1), (20, 2), (300, 1)):
        rounded_rows.check_followed("cuda", form, eight, m, shards)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_products_of_eight_bits_take_any_rows_and_sizes(dtype):
    for n, k in ((48, 64), (33, 40), (1024, 512)):
        weight = (torch.randn(n, k, device="cuda") * 30).clamp(-127, 127).to(dtype)
        kernels = scaled.ScaledProduct(weight, torch.rand(n, device="cuda") / 100 + 1e-4)
        held = weight.double() * kernels.scale.double()[:, None]
        for m in (0, 1, 8, 9, 65, 600):
            x = torch.randn(m, k + 3, device="cuda", dtype=torch.bfloat16)[:, 3:]
            out = torch.full((n, m), torch.nan, dtype=x.dtype, device="cuda").T
            got = kernels(x)
            assert kernels(x, out) is out and torch.equal(out, got)
            if m:
                assert (got.double() - x.double() @ held.T).norm() < 0.05 * (x.double() @ held.T).norm()


@on_gpu
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_step_leaves_no_memory_behind(form):
    kernels, _ = checks.make(form, 1024, 512, 32 if form == "int4" else 0, False, "cuda")
    taken = set()
    for _ in range(4):
        for m in (1, 8, 40, 300):
            kernels(torch.randn(m, 512, device="cuda", dtype=torch.bfloat16))
        gc.collect()
        torch.cuda.synchronize()
        taken.add(torch.cuda.memory_allocated())
    assert len(taken) == 1


COMPILED = """
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minivllm.device.kernels import quant_gemv, quant_large_m
from minivllm.device.kernels.quant_epilogue import Epilogue
from minivllm.device.kernels.quant_formats import Form

for bits, dtype, zeros, table in (
    (8, "i8", 0, False), (8, "fp8e4nv", 0, False), (4, "u8", 0, False), (4, "u8", 2, False), (4, "u8", 0, True)
):
    form = Form(4096, 4096, bits, 32 if bits == 4 else 4096, 128, 1, zeros, table, dtype == "fp8e4nv")
    words = not table and not form.float8
    unit = 32 // bits if words else 8 // bits
    one_row = dict(E=quant_gemv.Elements(unit, 0.0, 0, 1), P=Epilogue(0, False, 0, False, 0, 1), PROGRAMS=0, ROWS=1)
    for kernel, tile, more in (
        (quant_gemv._gemv, dict(BN=8, BK=1024, STAGES=3, num_warps=4), one_row),
        (quant_large_m._matmul, quant_large_m.matmul_tile(form, 16, False), dict(ASM=True, TMA=False)),
    ):
        options = {"num_warps": tile["num_warps"]}
        constants = {"F": form, "PDL": True, **more, **{k: v for k, v in tile.items() if k != "num_warps"}}
        names = ("x", "wide_x", "y", "bias", "residual", "norm")
        types = dict.fromkeys(names, "*bf16") | dict(weight="*" + dtype, arrived="*i32", tops="*i32", M="i32")
        types["eps"] = "fp32"
        types.update(dict.fromkeys(("scale", "zero", "scratch", "table", "by_row", "in_squares", "out"), "*fp32"))
        if kernel is quant_gemv._gemv and words:
            types.update(wide_x="*i64", weight="*i32")
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t[0] == "*"}
        indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, indexed, aligned)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = made.asm["ptx"]
        assert "cp.async.cg.shared.global" in ptx, "weights do not come by 16 bytes"
        assert ("wgmma" in ptx) == (kernel is quant_large_m._matmul)
        assert ".local" not in ptx
        if kernel is quant_large_m._matmul and bits == 4 and not table:
            assert "sub.rn.bf16x2" in ptx, "numbers are not made two at a time"
print("compiled")
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_without_one():
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr[-3000:]
