"""Where a run took place: versions, machine, the environment variables that change numbers, git."""

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

LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
VARIABLES = re.compile(  # MINIVLLM__... is not here: it is part of the configuration
    r"(MINIVLLM_(?!_)|OMP_|MKL_|OPENBLAS_|ONEDNN_|DNNL_|ATEN_|CUBLAS_|CUDNN_|NVIDIA_TF32|PYTORCH_|TORCH_|TRITON_)\w*|"
    r"CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|MODULE_LOADING)|PYTHONHASHSEED"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY", re.I)
_GIT_SECONDS = 10.0


def versions() -> dict[str, str]:
    """Of Python, the libraries that make numbers, and CUDA as torch was built for."""
    import torch

    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = str(torch.__version__)  # with the build, as +cpu or +cu126
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def machine(device: Any) -> dict[str, Any]:
    """CPU, memory, and the GPU if ``device`` (a hardware.Device) is one, else the instruction set of the native part.
    Holds no name of the host or of a user."""
    import torch

    from minivllm.device.hardware import find_device
    from minivllm.device.native import library

    cpu = device if device.kind == "cpu" else find_device("cpu")
    found: dict[str, Any] = {
        "cpu": cpu.name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(cpu.memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if device.kind == "cpu":
        found["native"] = library.isa()  # its kernels sum in another order than torch's
    else:
        found["gpu"] = device.name
        found["gpu_memory_gib"] = round(device.memory / 2**30, 1)
        found["compute_capability"] = f"{device.sm // 10}.{device.sm % 10}"
        found["driver"] = driver()
    return found


def torch_settings() -> dict[str, Any]:
    """Return torch's global settings of this process that change numbers."""
    import torch

    backends = torch.backends
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "interop_threads": torch.get_num_interop_threads(),
        "flush_denormal": _flushes_denormal(),
        "mkldnn": backends.mkldnn.enabled if hasattr(backends.mkldnn, "enabled") else None,
        "cudnn.deterministic": backends.cudnn.deterministic,
        "cudnn.benchmark": backends.cudnn.benchmark,
        "cuda.matmul.reduced_precision": [
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        ],
        "sdp": [getattr(backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "mem_efficient", "math")],
    }


def _flushes_denormal() -> bool:
    import torch

    return float(torch.tensor(1e-40) * 1.0) == 0.0


def driver(path: str = "/proc/driver/nvidia/version") -> str | None:
    """The version of NVIDIA's kernel driver, None where it does not say."""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"Kernel Module\D*?\s(\d+\.[\d.]+)", text):
            return found[1]
    return None


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that change numbers or choices; nothing that looks like a secret."""
    given = os.environ if environ is None else environ
    return {k: v for k, v in sorted(given.items()) if VARIABLES.fullmatch(k) and not SECRET.search(k)}


def git_state(folder: Path, tracks: str | None = None) -> dict[str, Any] | None:
    """Commit, branch and whether files differ from it; None outside a repository, without git, or if the repository
    does not track the file ``tracks`` (an installed package may lie inside somebody else's)."""
    if tracks is not None and _git(folder, "ls-files", "--error-unmatch", tracks) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain")
    if commit is None or status is None:
        return None
    changed = [line for line in status.splitlines() if not line.startswith("??")]
    return {
        "commit": commit,
        "branch": _git(folder, "symbolic-ref", "--short", "-q", "HEAD"),
        "dirty": bool(changed),
        "changed_files": len(changed),
        "untracked_files": len(status.splitlines()) - len(changed),
    }


def _git(folder: Path, *args: str) -> str | None:
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}  # looking must not write to the index
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(folder), *args], env=env, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
        if done.returncode == 0:
            return done.stdout.strip("\n")
    return None
