"""Give each replica its share of the machine: GPUs or threads, as variables of its process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.errors import ConfigError
from minivllm.limits import threads_given, usable_cores

if TYPE_CHECKING:
    from minivllm.config import Loaded

VISIBLE, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
# hooks that write one file or screen, which several processes cannot share
ALONE = ("live", "step_log")
CLUSTER = "ray"  # executor that may use devices of other machines


def visible_gpus(environ: Mapping[str, str], folder: str = "/dev") -> list[str]:
    """Return the names of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` has them."""
    if VISIBLE in environ:
        names = environ[VISIBLE].split(",")
        return [name.strip() for name in names if name.strip() and name.strip() != "-1"]
    try:
        files = os.listdir(folder)
    except OSError:
        return []
    numbers = [int(found[1]) for file in files if (found := re.fullmatch(r"nvidia(\d+)", file))]
    return [str(number) for number in range(len(numbers))]


def environments(
    loaded: Loaded, environ: Mapping[str, str] | None = None, folder: str = "/dev"
) -> list[dict[str, str]]:
    """Return the variables of each replica's process.

    Replicas on GPUs get ``tensor_parallel_size`` GPUs each.  Replicas on a CPU share its cores, unless the user has set
    the number of threads.  ConfigError if there are too few GPUs, or if hooks of the replicas would share a file.
    """
    environ = os.environ if environ is None else environ
    replicas, engine = loaded.server.replicas, loaded.engine
    for hook in engine.hooks:
        if hook.name.rpartition("/")[2] in ALONE:
            text = f"hooks={hook.name} with server.replicas={replicas}: the replicas would share its file or screen"
            raise ConfigError(f"{text}; use the metrics of /metrics, or replicas=1")
    if engine.executor.name == CLUSTER:
        return [{} for _ in range(replicas)]
    each = engine.tensor_parallel_size
    gpus = [] if engine.device == "cpu" else visible_gpus(environ, folder)
    if gpus:
        if replicas * each > len(gpus):
            need = f"server.replicas={replicas} with tensor_parallel_size={each} needs {replicas * each} GPUs"
            most = len(gpus) // each
            advice = f"lower server.replicas to {most}" if most > 1 else "leave server.replicas out"
            raise ConfigError(f"{need}, and {len(gpus)} can be used; {advice}, or set device=cpu")
        return [{VISIBLE: ",".join(gpus[i * each : (i + 1) * each])} for i in range(replicas)]
    if threads_given(environ):
        return [{} for _ in range(replicas)]
    threads = max(1, usable_cores() // (replicas * each))
    return [{THREADS: str(threads)} for _ in range(replicas)]
