"""What the machine can do.  Processes that die are real ones: children that send themselves the signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minivllm.device import hardware as platform
from minivllm.device.hardware import (
    AGAIN,
    Device,
    Matmul,
    _cpu_dtype,
    choose_dtype,
    find_device,
    prepare_environment,
    probe,
    require_safe,
    settled,
)
from minivllm.errors import ConfigError, ResourceError

ROOT = Path(__file__).parents[2]
CPU, GPU = Device("cpu", "c", 0, 1, ""), Device("cuda", "g", 90, 1, "")
forks = pytest.mark.skipif(sys.platform != "linux", reason="forks")


def in_python(code, **environ):
    ours = {platform.CAP, *platform.WAITING}
    env = {k: v for k, v in os.environ.items() if k not in ours} | {"PYTHONPATH": str(ROOT), **environ}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


# ---------------------------------------------------------------- the cap


@pytest.mark.parametrize(
    "flags, cap",
    [
        ("flags : avx512f avx512_bf16 fma", "AVX512_CORE_BF16"),
        ("flags : avx512_bf16 avx512_fp16", "AVX512_CORE_FP16"),
        ("flags : avx512_bf16 avx512_fp16 amx_tile amx_bf16", None),
        ("flags : avx2 avx_vnni", None),
        ("", None),
    ],
)
def test_onednn_is_capped_below_amx_only_where_the_system_offers_no_amx(flags, cap):
    environ = {}
    assert prepare_environment(environ, flags) == cap
    assert environ == platform.KEPT | platform.WAITING | ({} if cap is None else {platform.CAP: cap})


def test_a_cap_that_the_user_set_stays():
    environ = {platform.CAP: "AVX2"}
    assert prepare_environment(environ, "avx512_bf16") is None and environ == (
        platform.KEPT | platform.WAITING | {platform.CAP: "AVX2"}
    )


@pytest.mark.parametrize("mine", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "9"}])
def test_how_long_threads_loop_is_the_users_where_the_user_says_so(mine):
    environ = dict(mine)
    prepare_environment(environ, "")
    assert environ == platform.KEPT | mine


def test_openmp_reads_how_long_its_threads_loop():
    code = (
        "import os; os.environ['OMP_DISPLAY_ENV'] = 'VERBOSE'\n"
        "from minivllm.device.hardware import prepare_environment; prepare_environment()\n"
        "import torch"
    )
    done = in_python(code)
    if "GOMP_" not in done.stderr:
        pytest.skip("torch was built with another OpenMP than GNU's")
    assert re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr).group(1) == platform.WAITING["GOMP_SPINCOUNT"]


def test_bfloat16_multiplies_in_a_plain_process_after_the_environment_is_prepared():
    code = (
        "from minivllm.device.hardware import prepare_environment; prepare_environment()\n"
        "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); print(float((x @ x).sum()))"
    )
    done = in_python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "262144.0"), done.stderr


def test_memory_does_not_grow_with_the_numbers_of_rows_that_products_have_had():
    """300 sizes more of a dtype: 180 MiB if nobody bounds what is kept of them, else up to 24."""
    code = (
        "from minivllm.device.hardware import prepare_environment; prepare_environment()\n"
        "import os, torch; from minivllm.device.layers.matmul import matmul, pack\n"
        "torch.set_num_threads(1)\n"
        "def size(): return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE') >> 20\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    w = torch.ones(64, 64, dtype=dtype); p = pack(w); x = torch.ones(600, 64, dtype=dtype)\n"
        "    for m in range(4, 304): matmul(x[:m], w, p)\n"
        "    before = size()\n"
        "    for m in range(304, 600): matmul(x[:m], w, p)\n"
        "    print(size() - before)"
    )
    done = in_python(code)
    assert done.returncode == 0, done.stderr
    assert max(int(line) for line in done.stdout.split()) < 64, done.stdout  # MiB


# ---------------------------------------------------------------- the probe


@forks
def test_the_probe_is_quick_and_finds_float32_safe():
    platform.cpu_matmul.cache_clear()
    start = sum(os.times()[:4])  # of the processor, that of the child which tries dtypes included
    found = platform.cpu_matmul()
    seconds = sum(os.times()[:4]) - start
    assert found.safe("float32") and set(found.times) <= set(platform.PROBED)
    assert seconds < 1.0  # 0.1 on a machine that does nothing else
    assert platform.cpu_matmul() is found


@forks
def test_a_dtype_that_kills_its_process_is_unsafe_and_those_after_it_are_still_tried(capfd):
    def measure(name):
        if name in ("bfloat16", "int8"):
            os.kill(os.getpid(), signal.SIGILL)
        return (1.0, 2.0)

    found = probe(measure, fork=True, names=("float32", "bfloat16", "float16", "int8"))
    assert set(found.times) == {"float32", "float16"}
    assert not found.safe("bfloat16") and found.times["float16"] == (1.0, 2.0)
    assert capfd.readouterr() == ("", "")


@forks
def test_float16_is_tried_when_somebody_asks_for_it(monkeypatch):
    tried = []
    monkeypatch.setattr(platform, "cpu_matmul", lambda: pytest.fail("not needed"))
    monkeypatch.setattr(
        platform, "probe", lambda measure, names: tried.append(names) or Matmul({"float16": (1.0, 1.0)})
    )
    platform._other_matmul.cache_clear()
    assert choose_dtype("float16", "float32", CPU)[0] == choose_dtype("float16", "bfloat16", CPU)[0] == "float16"
    assert tried == [("float16",)]
    platform._other_matmul.cache_clear()
    monkeypatch.setattr(platform, "probe", lambda measure, names: Matmul({}))
    with pytest.raises(ResourceError, match="dtype='float16': a matrix product in it kills the process"):
        choose_dtype("float16", "float32", CPU)
    platform._other_matmul.cache_clear()


@forks
def test_a_child_that_hangs_is_replaced_by_a_fresh_process(monkeypatch):
    monkeypatch.setattr(platform, "_FORK_SECONDS", 0.2)
    probed = []
    monkeypatch.setattr(platform, "_in_process", lambda names: probed.append(list(names)) or "float32 1 1\nint8 1 1\n")

    def measure(name):
        time.sleep(60)

    assert set(probe(measure, fork=True).times) == {"float32", "int8"}
    assert probed[0] == list(platform.PROBED)


def test_a_fresh_process_measures_what_it_is_asked():
    found = platform._in_process(["float32"])
    name, *times = found.split()
    assert name == "float32" and len(times) == len(platform.ROWS) and all(float(t) > 0 for t in times)


@forks
def test_the_probe_works_beside_threads_and_after_multi_threaded_products():
    code = (
        "import torch, threading, time\n"
        "torch.set_num_threads(2); a = torch.randn(512, 512); a @ a\n"
        "stop = threading.Event(); t = threading.Thread(target=lambda: [a @ a for _ in iter(stop.is_set, True)])\n"
        "t.start()\n"
        "from minivllm.device.hardware import cpu_matmul, prepare_environment\n"
        "prepare_environment(); found = cpu_matmul(); stop.set(); t.join(); (a @ a).sum()\n"
        "print(found.safe('float32'))"
    )
    done = in_python(code)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "True", "")


# ---------------------------------------------------------------- the dtype


FAST = Matmul({"float32": (1.0, 1.0), "bfloat16": (0.5, 0.25)})
SLOW = Matmul({"float32": (1.0, 1.0), "bfloat16": (1.25, 0.4)})
FAST_BY_FAR = Matmul({"float32": (4.0, 4.0), "bfloat16": (1.0, 1.0)})
DEADLY = Matmul({"float32": (1.0, 1.0), "float16": (1.0, 1.0)})


@pytest.mark.parametrize(
    "matmul, dtype, why",
    [
        (FAST, "bfloat16",
         "this CPU multiplies bfloat16 at 2.0 times the speed of float32 with 1 row, 4.0 times with 32"),
        (SLOW, "float32",
         "this CPU multiplies bfloat16 at only 0.8 times the speed of float32 with 1 row, 2.5 times with 32"),
        (DEADLY, "float32", "a matrix product in bfloat16 kills the process on this CPU"),
    ],
)  # fmt: skip
def test_a_cpu_takes_bfloat16_only_where_it_is_safe_and_faster(monkeypatch, matmul, dtype, why):
    monkeypatch.setattr(platform, "cpu_matmul", lambda: matmul)
    assert choose_dtype("auto", "bfloat16", CPU) == (dtype, why)


def test_a_cpu_with_the_native_part_takes_bfloat16_wherever_it_is_safe(monkeypatch):
    monkeypatch.setattr(platform, "cpu_matmul", lambda: SLOW)
    why = "half the memory of float32, which the native part reads in half the time"
    assert choose_dtype("auto", "bfloat16", CPU, native=True) == ("bfloat16", why)
    monkeypatch.setattr(platform, "cpu_matmul", lambda: DEADLY)
    assert choose_dtype("auto", "bfloat16", CPU, native=True)[0] == "float32"


LAPTOP, SKYLAKE, ZEN4, RAPIDS = (
    frozenset(flags.split())
    for flags in ("avx2 fma f16c", "avx2 avx512f avx512bw", "avx512f avx512_bf16", "avx512_bf16 avx512_fp16 amx_bf16")
)


@pytest.mark.parametrize(
    ("flags", "cap", "dtypes"),
    [
        (LAPTOP, "", []),
        (SKYLAKE, "", []),
        (ZEN4, "", ["bfloat16"]),
        (ZEN4, "AVX512_CORE_BF16", ["bfloat16"]),
        (ZEN4, "avx2", []),
        (ZEN4, "AVX512_CORE_VNNI", []),
        (RAPIDS, "", ["bfloat16", "float16"]),
        (RAPIDS, "AVX512_CORE_BF16", ["bfloat16"]),
        (RAPIDS, "DEFAULT", ["bfloat16", "float16"]),
        (frozenset(), "", ["bfloat16", "float16"]),  # not Linux, or not x86-64: torch is trusted
    ],
)
def test_torch_multiplies_16_bits_fast_with_instructions_that_the_cpu_has_and_the_cap_allows(flags, cap, dtypes):
    assert [dtype for dtype in ("bfloat16", "float16") if platform.has_products(dtype, flags, cap)] == dtypes


def test_a_cpu_keeps_the_float32_of_a_checkpoint_without_asking(monkeypatch):
    monkeypatch.setattr(platform, "cpu_matmul", lambda: pytest.fail("not needed"))
    assert choose_dtype("auto", "float32", CPU) == ("float32", "the checkpoint's")
    assert choose_dtype("float32", "bfloat16", CPU) == ("float32", "asked for")


@pytest.mark.parametrize(
    "checkpoint, dtype", [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]
)
def test_a_gpu_takes_the_checkpoints_half_precision(checkpoint, dtype):
    assert choose_dtype("auto", checkpoint, GPU)[0] == dtype


def test_what_would_kill_the_process_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "cpu_matmul", lambda: DEADLY)
    with pytest.raises(ResourceError) as info:
        choose_dtype("bfloat16", "float32", CPU)
    assert str(info.value) == (
        "dtype='bfloat16': a matrix product in it kills the process on this CPU (oneDNN uses instructions that the "
        "machine does not have); use dtype='float32', or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before Python starts"
    )
    require_safe("float16", DEADLY)
    with pytest.raises(ConfigError, match="dtype='float8': expected auto, float32, bfloat16, float16"):
        choose_dtype("float8", "float32", CPU)


def test_the_device_is_what_torch_sees():
    cpu = find_device("cpu")
    assert (cpu.kind, cpu.sm, cpu.why) == ("cpu", 0, "asked for") and cpu.memory > 2**28 and cpu.name
    if torch.cuda.is_available():
        assert find_device("auto").kind == "cuda" and find_device("cuda").sm >= 70
    else:
        assert find_device("auto").why == "torch sees no CUDA device"
        with pytest.raises(ResourceError) as info:
            find_device("cuda")
        assert str(info.value) == "device='cuda': torch sees no CUDA device; use device='cpu' or 'auto'"


@pytest.mark.parametrize(("true", "chosen"), [((1.0, 0.9), "float32"), ((1.0, 0.4), "bfloat16")])
@pytest.mark.parametrize("disturbed", ["float32", "bfloat16"])
def test_other_work_during_one_measurement_decides_nothing(true, chosen, disturbed):
    """A dtype that took twice its time once: within the doubt it is measured again, and the least counts."""
    quiet = {name: (time, time) for name, time in zip(("float32", "bfloat16"), true, strict=True)}
    noisy = {**quiet, disturbed: tuple(2 * time for time in quiet[disturbed])}
    left = [Matmul(noisy)] + [Matmul(quiet)] * AGAIN
    assert _cpu_dtype(settled(lambda: left.pop(0)))[0] == chosen


def test_what_is_beyond_doubt_is_measured_once():
    for found in (Matmul({"float32": (1.0, 1.0), "bfloat16": (2.0, 2.0)}), FAST_BY_FAR, DEADLY):
        left = [found]
        assert settled(lambda left=left: left.pop()) == found
