"""The kernel that moves blocks between the tensors of the KV cache and pages; a CPU runs Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

GPU = torch.cuda.is_available()
SHAPES = {
    "kv": [((9, 2, 16, 64), torch.bfloat16)] * 3,
    "unequal": [((9, 5, 24), torch.float32), ((9, 3000), torch.float64), ((9, 16), torch.int32)],
    "odd": [((9, 3), torch.uint8), ((9, 7, 5), torch.bfloat16), ((9,), torch.bool)],
}


def made(name: str, device: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [(100 * torch.randn(shape, device=device)).to(dtype) for shape, dtype in SHAPES[name]]


def row_bytes(t: torch.Tensor, block: int) -> torch.Tensor:
    return t[block].reshape(-1).view(torch.uint8)


def check(name: str, device: str) -> None:
    """Move blocks to pages and back, and compare the bytes with those of torch's indexing."""
    from minivllm.device.kernels.pages import PageTable

    tensors = made(name, device)
    table = PageTable(tensors)
    blocks = [7, 0, 3, 8]
    pages = torch.zeros(len(blocks), -(-table.page_bytes // 8) * 8, dtype=torch.uint8, device=device)
    addresses = [page.data_ptr() for page in pages]
    table.move(blocks, addresses, pack=True)
    want = torch.stack([torch.cat([row_bytes(t, block) for t in tensors]) for block in blocks])
    assert torch.equal(pages[:, : table.page_bytes], want)
    assert not pages[:, table.page_bytes :].any(), "bytes behind a page changed"
    others = [t.clone() for t in tensors]
    targets = [2, 8, 0, 4]
    for target, block in zip(targets, blocks, strict=True):
        for t, before in zip(others, [t.clone() for t in tensors], strict=True):
            t[target] = before[block]
    table.move(targets, addresses, pack=False)
    for got, expected in zip(tensors, others, strict=True):
        assert torch.equal(row_bytes(got, slice(None)), row_bytes(expected, slice(None)))


def check_fetched(device: str) -> None:
    """Copy pages of several sizes, some of them longer than what all programs have in flight."""
    from minivllm.device.kernels.pages import FETCHED, FETCHERS, copy_pages

    for size in (8, 8 * FETCHED, 8 * FETCHED + 8, 8 * FETCHED * (FETCHERS + 1) + 24):
        given = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(3)]
        if device == "cuda":
            given = [page.pin_memory() for page in given]
        whole = torch.zeros(5, size, dtype=torch.uint8, device=device)
        copy_pages(given, [whole[3], whole[0], whole[2]])
        assert torch.equal(whole[[3, 0, 2]].cpu(), torch.stack(given))
        assert not whole[[1, 4]].any(), "bytes beside the pages changed"


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
def test_fetched_pages_have_the_bytes_of_their_sources_on_a_gpu():
    check_fetched("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("name", SHAPES)
def test_pages_have_the_bytes_of_their_blocks_on_a_gpu(name):
    check(name, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("size", [4096 + 8, 1 << 20])
@pytest.mark.parametrize("pinned", [True, False])
def test_staged_pages_are_the_pages_of_the_store(size, pinned):
    from minivllm.device.worker.pages import DevicePages

    memory = DevicePages([[{"k": torch.zeros(12, size, dtype=torch.uint8, device="cuda")}]], None, torch.device("cuda"))
    given = [memory.empty(size) if pinned else torch.empty(size, dtype=torch.uint8).numpy() for _ in range(9)]
    for i, page in enumerate(given):
        page[:] = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(i)).numpy()
    for way in (True, False):
        memory.by_kernel[0] = way
        staged = memory.stage(0, given)
        while not all(memory.arrived(page) for page in staged):
            pass
        memory.write(0, list(range(3, 12)), [*staged[:5], *given[5:]])
        memory.empty(size)  # leaves a slab with pieces at hand
        batch = memory.read(0, list(range(3, 12)))
        assert all((batch.page(i, True) == want).all() for i, want in enumerate(given))
        memory.groups[0][0].zero_()


@pytest.mark.parametrize("call", [*(f"check({name!r}, 'cpu')" for name in SHAPES), "check_fetched('cpu')"])
def test_pages_have_the_bytes_of_their_blocks(call):
    """In a process of its own, because the interpreter is chosen when kernels are imported."""
    script = f"import test_page_kernels as t; t.{call}"
    folder = os.path.dirname(__file__)
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_tensors_with_gaps_are_refused():
    from minivllm.device.kernels.pages import PageTable

    with pytest.raises(ValueError, match="contiguous"):
        PageTable([torch.zeros(4, 8)[:, :4]])
