"""torch's profile of everything that a worker's process does."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from minivllm import files
from minivllm.errors import RequestError


class TorchTrace:
    """torch's profile of this process, from now to ``stop``."""

    def __init__(self, cuda: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile = profile(activities=activities)
        self._profile.__enter__()

    def stop(self, path: str) -> None:
        """End it and write it as a Chrome trace.  RequestError if there is no folder for it, and it goes on."""
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise RequestError(f"{path}: there is no folder {folder}; make it, then call stop_profile again")
        files.check_output(path, RequestError)
        self.close()
        self._profile.export_chrome_trace(path)

    def close(self) -> None:
        self._profile.__exit__(None, None, None)
