"""The surroundings of a run: versions, machine, environment variables that change numbers, and git."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.limits import usable_cores

from . import Entries

LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
# names of recorded variables; those of MINIVLLM__... are left out, because they are part of the configuration
VARIABLES = re.compile(
    r"(MINIVLLM_(?!_)|OMP_|MKL_|OPENBLAS_|ONEDNN_|DNNL_|ATEN_|CUBLAS_|CUDNN_|NVIDIA_TF32|PYTORCH_|TORCH_|TRITON_)\w*|"
    r"CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|MODULE_LOADING)|PYTHONHASHSEED"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY", re.I)
_GIT_SECONDS = 10.0


def versions() -> dict[str, str]:
    """Return the versions of Python, of the libraries that compute, and of CUDA for which torch was built."""
    import torch

    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = str(torch.__version__)  # the version with the build, such as +cpu or +cu126
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def machine(device: Any) -> Entries:
    """Return entries that describe the CPU, the memory, and the GPU if ``device`` (a hardware.Device) is one.

    On a CPU the instruction set of the native kernels is included.  The names of the host and the user are not."""
    import torch

    from minivllm.device.hardware import find_device
    from minivllm.device.native import library

    cpu = device if device.kind == "cpu" else find_device("cpu")
    found: Entries = {"cpu": cpu.name, "cores": usable_cores(), "threads": torch.get_num_threads()}
    found["memory_gib"] = round(cpu.memory / 2**30, 1)
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    if device.kind == "cpu":
        found["native"] = library.isa()  # native kernels add numbers in another order than torch
    else:
        found["gpu"] = device.name
        found["gpu_memory_gib"] = round(device.memory / 2**30, 1)
        found["compute_capability"] = f"{device.sm // 10}.{device.sm % 10}"
        found["driver"] = driver()
    return found


def torch_settings() -> Entries:
    """Return torch's global settings of this process that change numbers."""
    import torch

    backends = torch.backends
    matmul = backends.cuda.matmul
    reduced = [matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction]
    settings: Entries = {"float32_matmul_precision": torch.get_float32_matmul_precision()}
    settings["deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    settings["default_dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
    settings["interop_threads"] = torch.get_num_interop_threads()
    settings["flush_denormal"] = _flushes_denormal()
    settings["mkldnn"] = getattr(backends.mkldnn, "enabled", None)
    settings["cudnn.deterministic"] = backends.cudnn.deterministic
    settings["cudnn.benchmark"] = backends.cudnn.benchmark
    settings["cuda.matmul.reduced_precision"] = reduced
    settings["sdp"] = [getattr(backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "mem_efficient", "math")]
    return settings


def _flushes_denormal() -> bool:
    """Return whether torch replaces denormal numbers by zero."""
    import torch

    return float(torch.tensor(1e-40) * 1.0) == 0.0


def driver(path: str = "/proc/driver/nvidia/version") -> str | None:
    """Return the version of NVIDIA's kernel driver, None if it cannot be read."""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"Kernel Module\D*?\s(\d+\.[\d.]+)", text):
            return found[1]
    return None


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that change numbers or choices, without names that look like secrets.

    ``environ`` None means ``os.environ``.
    """
    variables = os.environ if environ is None else environ
    names = [name for name in sorted(variables) if VARIABLES.fullmatch(name) and not SECRET.search(name)]
    return {name: variables[name] for name in names}


def git_state(folder: Path, tracks: str | None = None) -> Entries | None:
    """Return the commit and branch of a folder, and how many files differ from the commit.

    None outside a repository and without git.  None also if the repository does not track the file ``tracks``, because
    an installed package may be inside an unrelated repository.
    """
    if tracks is not None and _git(folder, "ls-files", "--error-unmatch", tracks) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain")
    if commit is None or status is None:
        return None
    lines = status.splitlines()
    untracked = sum(line.startswith("??") for line in lines)
    changed = len(lines) - untracked
    return {
        "commit": commit,
        "branch": _git(folder, "symbolic-ref", "--short", "-q", "HEAD"),
        "dirty": bool(changed),
        "changed_files": changed,
        "untracked_files": untracked,
    }


def _git(folder: Path, *args: str) -> str | None:
    """Return the output of a git command, None if it fails or takes too long."""
    # without these locks git does not write to the index
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-C", str(folder), *args]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_GIT_SECONDS)
        if done.returncode == 0:
            return done.stdout.strip("\n")
    return None
