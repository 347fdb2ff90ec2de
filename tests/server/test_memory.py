"""The process's report of its memory, and the release of unused memory by its heap."""

import asyncio
import gc
import mmap
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minivllm.core.interfaces.params import SamplingParams
from minivllm.runtime.processes import memory
from minivllm.runtime.processes.memory import GROWN, LOOK, SETTLE, HeapTrimmer, find_trim, resident_bytes
from minivllm.server.link import state
from minivllm.server.openai import tokens

ROOT = Path(__file__).parents[2]
MIB = 2**20
glibc = pytest.mark.skipif(find_trim() is None, reason="needs glibc")
RSS = "int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20"


def in_python(code):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


# ---------------------------------------------------------------- pages


@pytest.mark.skipif(sys.platform != "linux", reason="asks mincore")
@pytest.mark.parametrize("written", [0, 1, 4096, 5 * MIB, 64 * MIB])
def test_pages_of_an_array_count_once_they_are_written(written):
    array = np.frombuffer(mmap.mmap(-1, 64 * MIB), np.uint8)  # from the heap it might be memory that was used before
    array[:written] = 1
    found = resident_bytes([(array.ctypes.data, array.nbytes)])
    assert written <= found <= min(written + 4 * MIB, array.nbytes + 2 * os.sysconf("SC_PAGE_SIZE"))
    halves = [(array.ctypes.data, array.nbytes // 2), (array.ctypes.data + array.nbytes // 2, array.nbytes // 2)]
    assert abs(resident_bytes(halves) - found) <= 2 * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_resident_of_nothing():
    assert resident_bytes([]) == 0


def test_pages_are_not_told_where_the_system_does_not(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert resident_bytes([(0, 1)]) is None and find_trim() is None
    HeapTrimmer(clock=iter(range(0, 1000, 100)).__next__).look()  # and nothing is trimmed


# ---------------------------------------------------------------- the KV cache's pages, told by the engine


@pytest.fixture(scope="module")
def llm():
    from minivllm import LLM

    with LLM("pocket", num_kvcache_blocks=512, max_num_seqs=8, device="cpu") as made:
        yield made


PAGES = """
from minivllm import LLM, SamplingParams
with LLM("pocket", num_kvcache_blocks=512, max_num_seqs=8, device="cpu") as llm:
    engine = llm.engine
    block = engine.capacity.block_bytes[0]
    print(engine.capacity.blocks[0] * block, 500 * block // engine.wiring.block, engine.call("kv_resident"))
    for first in range(4):
        llm.generate([[first + 1] * 500], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        print(engine.call("kv_resident"))
"""


@pytest.mark.slow
def test_pages_of_the_kv_cache_are_taken_as_tokens_come():
    """In a process of its own: the heap of this one may hold memory that was used before."""
    most, written, *taken = in_python(PAGES)
    assert taken == sorted(taken) and taken[0] < most / 4 and 4 * written <= taken[-1] <= 1.05 * most, (taken, most)


def test_an_executor_that_does_not_know_its_pages_tells_none(llm, monkeypatch):
    def unknown(verb, args=None):
        raise NotImplementedError(verb)

    assert state.engine(llm.engine, {}, 0, False)["memory"]["kv_resident_bytes"] > 0
    monkeypatch.setattr(llm.engine.executor, "call", unknown)
    assert state.engine(llm.engine, {}, 0, False)["memory"]["kv_resident_bytes"] is None


# ---------------------------------------------------------------- ids of texts that the server keeps


class Letters:
    """A tokenizer: a token a character."""

    special_ids = ()

    def token(self, token_id):
        return chr(token_id)

    def encode(self, text, special):
        return [ord(c) for c in text]


@pytest.mark.parametrize("length", [8, 60, 700, 2000])
@pytest.mark.parametrize("letter", ["x", "\u00e9", "\u4e2d", "\U0001f98a"])
def test_ids_of_texts_take_the_memory_that_they_are_counted_as(length, letter, monkeypatch):
    """Short texts take much more memory than their characters, and other scripts up to four bytes for each
    character.
    """
    monkeypatch.setattr(tokens, "CACHED", MIB)
    made = tokens.Tokens(Letters(), 1 << 20)

    async def encode(count):
        for number in range(count):
            await made.encode(f"{number:08d}" + letter * (length - 8), True, ("", ""))

    gc.collect()  # Python keeps small objects for reuse, which would be counted as none
    tracemalloc.start()
    try:
        asyncio.run(encode(2 * MIB // (300 + 2 * length)))  # more than fits
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    size = made._kept.bytes
    assert 0.9 * MIB < size <= MIB, "the cache is not full"
    assert 0.75 * held < size < 1.25 * held, (size, held)
    assert asyncio.run(made.encode("0" * length, True, ("", ""))) == [48] * length


# ---------------------------------------------------------------- the heap


class World:
    """A process whose steps need ``needed`` bytes beside 100 MiB, and whose heap grows between them."""

    def __init__(self):
        self.now, self.needed, self.collected, self.trims, self.seen = 0.0, 50 * MIB, 0, [], []
        self.heap = HeapTrimmer(self.trim, self.rss, lambda: self.now)

    def rss(self):
        return 100 * MIB + self.needed + self.collected

    def trim(self):
        self.trims.append(self.now)
        self.collected = 0

    def run(self, seconds, collects=0):
        """``collects`` bytes a second."""
        for _ in range(round(20 * seconds)):
            self.now += 0.05
            self.collected += collects // 20
            self.heap.look()
            self.seen.append(self.rss())


@pytest.mark.parametrize("mib_a_second", [0.01, 0.1, 1.0, 10.0])
def test_what_collects_in_the_heap_is_bounded_however_fast_it_does(mib_a_second):
    world = World()
    world.run(5000, int(mib_a_second * MIB))
    between = GROWN + (2 * SETTLE + 2 * LOOK) * mib_a_second * MIB
    assert world.trims and max(world.seen) <= 150 * MIB + between
    assert min(np.diff(world.trims), default=SETTLE) >= SETTLE


def test_a_heap_that_stays_as_it_is_is_not_trimmed():
    world = World()
    world.run(500, 0)
    world.needed += GROWN  # a larger step
    world.run(500, 0)
    assert not world.trims
    world.needed += MIB
    world.run(500, 0)
    assert len(world.trims) == 1  # trimming freed nothing, so the needed memory is the new level


def test_the_heap_is_not_trimmed_where_nobody_tells_what_is_resident():
    world = World()
    world.heap = HeapTrimmer(world.trim, lambda: None, lambda: world.now)
    world.run(500, MIB)
    assert not world.trims


def test_steps_on_a_cpu_look_whether_the_heap_is_to_be_trimmed(llm, monkeypatch):
    looks = []
    monkeypatch.setattr(llm.engine.executor._heap, "look", lambda: looks.append(1))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(looks) == 4


@glibc
def test_what_lies_between_live_allocations_is_given_back():
    before, held, after = in_python(
        "import ctypes, os\n"
        "from minivllm.runtime.processes.memory import SETTLE, HeapTrimmer\n"
        f"rss = lambda: {RSS}\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "heap = HeapTrimmer(clock=iter([0.0, SETTLE, 2 * SETTLE]).__next__)\n"
        # fill the free memory that imports have left, where live blocks would pin nothing
        "for _ in range(20_000): libc.malloc(64)\n"
        "heap.look()\n"
        "print(rss())\n"
        "large = []\n"
        "for _ in range(3000):\n"  # each live block keeps the heap from shrinking
        "    large.append(libc.malloc(100_000)); ctypes.memset(large[-1], 1, 100_000); libc.malloc(64)\n"
        "for one in large: libc.free(one)\n"
        "print(rss())\n"
        "heap.look()\n"
        "print(rss())\n"
    )
    assert held > before + 250 and after < before + 30, (before, held, after)


@glibc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_many_sizes_leave_no_more_than_is_in_use(dtype):
    """oneDNN keeps 256 kernels, which lie among activations of 4 to 2,000 rows."""
    held, after = in_python(
        "from minivllm.device.hardware import prepare_environment\n"
        "prepare_environment()\n"
        "import ctypes, os, random, torch\n"
        "from minivllm.device.layers.matmul import matmul, pack\n"
        "from minivllm.runtime.processes.memory import find_trim\n"
        f"rss, rng = lambda: {RSS}, random.Random(0)\n"
        f"weights = [torch.randn(n, 256, dtype=torch.{dtype}) for n in (256, 512, 1024, 2048)]\n"
        "packed = [pack(weight) for weight in weights]\n"
        "def steps(count, most):\n"
        "    for _ in range(count):\n"
        f"        x = torch.randn(rng.randint(4, most), 256, dtype=torch.{dtype})\n"
        "        for weight, other in zip(weights, packed): matmul(x, weight, other)\n"
        "with torch.inference_mode():\n"
        "    steps(200, 100); begin = rss()\n"
        "    steps(500, 2000); held = rss(); find_trim()(); print(held - begin, rss() - begin)\n"
    )
    assert after < 24, (held, after)
