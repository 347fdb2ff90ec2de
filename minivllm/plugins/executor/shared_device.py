"""Other users of a GPU's memory, for the error of an engine that finds too little memory."""

from __future__ import annotations

from minivllm.errors import ResourceError

CONTEXT = 1 << 30  # largest GPU memory of a process in bytes that torch does not count


def with_others(error: ResourceError, device: str) -> ResourceError:
    """Return the error with the memory that other processes use on the GPU, if it is more than a process's own
    overhead.
    """
    if device != "cuda":
        return error
    import torch

    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved() - CONTEXT
    if others <= 0:
        return error
    device = f"cuda:{torch.cuda.current_device()}"
    return ResourceError(
        f"{error}.  About {others / 2**30:.1f} of the {total / 2**30:.0f} GiB of {device} are other processes' "
        "(nvidia-smi names them), such as another engine's: run one engine on a device, or set a smaller "
        "gpu_memory_utilization for the one that starts first"
    )
