"""Weights of adapters read straight into memory: the numbers, memory with old content, and faults of files."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minivllm.device.loading import file_ranges
from minivllm.device.loading.file_ranges import FileRange, header_of, memory_of, read_ranges
from minivllm.errors import RequestError
from minivllm.plugins.adapter import lora_memory
from minivllm.plugins.adapter.lora import LoRA
from minivllm.testing.adapter_folders import PREFIX, save
from minivllm.testing.adapter_model import LAYERS, ModelProcess

RANK = 16


def write(folder, rank, dtype=torch.float32, alpha=2 * RANK, layers=LAYERS):
    """Write a LoRA in which every weight has its own numbers, and return them by name."""
    generator, tensors = torch.Generator().manual_seed(7), {}
    for name in layers:
        outputs, inputs = LAYERS[name]
        for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator).to(dtype)
            tensors[f"{PREFIX}{name}.lora_{which}.weight"] = values
    save(folder, {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}, tensors)
    return tensors


def process(rank=0, size=1):
    return ModelProcess(LoRA(None, SimpleNamespace(places=2, max_rank=RANK)), "cpu", rank, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [RANK, 5])
@pytest.mark.parametrize("shard", [(0, 1), (1, 2)], ids=str)
def test_a_row_has_the_numbers_of_the_file_and_zeros_elsewhere(tmp_path, dtype, rank, shard):
    made = process(*shard)
    tensors = write(tmp_path, rank, dtype)
    loaded = made.read(tmp_path)  # into memory full of NaN
    scale = 2 * RANK / rank
    for source, target in made.targets.items():
        place = made.memory.places[target.layer]
        a, b = place.views(loaded.weights)
        given_a, given_b = (tensors[f"{PREFIX}{source}.lora_{which}.weight"].float() for which in "AB")
        names = [part for part, _ in target.info.parts]
        for part, rows, share in target.rows(given_b * scale):
            assert torch.equal(a[names.index(part), :rank], target.columns(given_a))
            assert torch.equal(b[rows, :rank], share)
            assert not a[names.index(part), rank:].any() and not b[rows, rank:].any()
        assert loaded.ranks[place.number] == rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_of_any_size_have_the_scale_and_the_check_of_the_whole(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(lora_memory.torch, "get_num_threads", lambda: 1)
    made = process()
    tensors = write(tmp_path, RANK, dtype)
    whole = made.read(tmp_path).weights
    for piece in (64, 1000, 4096):
        monkeypatch.setattr(lora_memory, "PIECE", piece)
        assert torch.equal(made.read(tmp_path).weights, whole)
    for name in (min(tensors), max(tensors)):
        wrong = {**tensors, name: tensors[name].clone()}
        wrong[name][-1, -1] = torch.inf
        (tmp_path / name).mkdir()
        save(tmp_path / name, {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}, wrong)
        with pytest.raises(RequestError, match="not all finite"):
            made.read(tmp_path / name)


def test_folders_of_one_layout_share_a_plan_and_others_do_not(tmp_path):
    made = process()
    write(tmp_path / "first", RANK)
    write(tmp_path / "equal", RANK)
    write(tmp_path / "scaled", RANK, alpha=RANK)
    write(tmp_path / "part", RANK, layers=list(LAYERS)[:2])
    rows = {path.name: made.read(path).weights for path in sorted(tmp_path.iterdir())}
    assert len(made.memory._plans) == 3
    assert torch.equal(rows["first"], rows["equal"])
    for place in made.memory.places.values():
        assert torch.equal(place.views(rows["first"])[1], 2 * place.views(rows["scaled"])[1])
    assert rows["part"].count_nonzero() < rows["first"].count_nonzero()


def test_ranges_in_any_order_fill_their_memory_over_several_calls(tmp_path, monkeypatch):
    bytes_ = torch.arange(251, dtype=torch.uint8).repeat(40)
    (tmp_path / "file").write_bytes(b"head" + bytes(bytes_.tolist()))
    whole, twice = torch.zeros(len(bytes_), dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    ranges = [FileRange(i, min(i + 3, len(bytes_)), memory_of(whole[i : i + 3])) for i in range(0, len(bytes_), 3)]
    ranges = [*ranges[::-1], FileRange(900, 1000, memory_of(twice))]
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: len(parts[0]) and short(file, parts, at))
    read_ranges(tmp_path / "file", 4, ranges)
    assert torch.equal(whole, bytes_) and torch.equal(twice, bytes_[900:1000])


def test_pieces_of_any_size_fill_the_memory_of_the_ranges(tmp_path, monkeypatch):
    bytes_ = torch.arange(251, dtype=torch.uint8).repeat(40)
    (tmp_path / "file").write_bytes(bytes(bytes_.tolist()))
    for piece in (1, 7, 64, 1000, len(bytes_), 1 << 20):
        monkeypatch.setattr(file_ranges, "PIECE", piece)
        monkeypatch.setattr(file_ranges, "MOST_PARTS", max(2, piece % 50))
        whole = torch.zeros(600, dtype=torch.uint8)
        places = [(5, 12), (12, 13), (13, 300), (301, 301), (320, 600), (100, 150)]
        ranges = [FileRange(a, b, memory_of(torch.zeros(b - a, dtype=torch.uint8))) for a, b in places]
        read_ranges(tmp_path / "file", 0, [*ranges, FileRange(0, 600, memory_of(whole))])
        assert torch.equal(whole, bytes_[:600])
        for (a, b), one in zip(places, ranges, strict=True):
            assert bytes(one.memory) == bytes(bytes_[a:b].tolist())


def test_an_error_of_a_piece_is_raised_when_all_pieces_have_ended(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(1000))
    monkeypatch.setattr(file_ranges, "PIECE", 100)
    ended, read, barrier = [], os.preadv, threading.Event()

    def slow(file, parts, at):
        if at == 0:
            barrier.wait(5)  # the first piece ends after the piece that fails
        else:
            barrier.set()
        ended.append(at)
        return read(file, parts, at)

    monkeypatch.setattr(os, "preadv", slow)
    memory = torch.zeros(1050, dtype=torch.uint8)
    with pytest.raises(OSError, match="ends within a tensor"):
        read_ranges(tmp_path / "file", 0, [FileRange(0, 1050, memory_of(memory))])
    assert set(range(0, 1001, 100)) <= {*ended}


def short(file, parts, at):
    """Read at most 1,000 bytes, as a call of the system may."""
    data, count = os.pread(file, 1000, at), 0
    for part in parts:
        share = data[count : count + len(part)]
        part[: len(share)] = share
        count += len(share)
    return count


def test_a_file_that_was_cut_after_its_check_is_refused(tmp_path):
    made = process()
    write(tmp_path, RANK)
    path = tmp_path / "adapter_model.safetensors"
    made.read(tmp_path)
    header = header_of(path)
    empty = made.model.empty

    def cut(size, dtype):
        os.truncate(path, 8 + len(header) + 100)
        return empty(size, dtype)

    made.memory.model = replace(made.model, empty=cut)
    with pytest.raises(RequestError, match="ends within a tensor"):
        made.read(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_places_get_their_adapters_whether_a_staged_row_still_has_them_or_not(tmp_path):
    """More adapters are read than rows are staged, and one is stored twice."""
    made = ModelProcess(LoRA(None, SimpleNamespace(places=4, max_rank=RANK)), "cuda")
    pinned = lambda size, dtype: torch.full((size,), torch.nan, dtype=dtype).pin_memory()  # noqa: E731
    made.memory.model = replace(made.model, empty=pinned)
    for alpha in range(1, 5):
        write(tmp_path / str(alpha), RANK, alpha=alpha)
    loaded = [made.read(tmp_path / str(alpha)) for alpha in range(1, 5)]
    for place, one in enumerate((*loaded[:3], loaded[3])):
        made.memory.store(place, one)
    made.memory.store(0, loaded[3])
    torch.cuda.synchronize()
    for place, one in enumerate((loaded[3], *loaded[1:])):
        assert torch.equal(made.memory.arena[place].cpu(), one.weights)
    assert len({one.weights.sum().item() for one in loaded}) == 4
