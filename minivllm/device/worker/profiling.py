"""Record a profile of a worker process with ``torch.profiler``."""

from __future__ import annotations

import os
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from minivllm import files
from minivllm.errors import RequestError


class TorchTrace:
    """A running profile of this process by torch.  It begins when the object is created and ends with ``stop``."""

    def __init__(self, cuda: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile = profile(activities=activities)
        self._profile.__enter__()

    def stop(self, path: str) -> None:
        """End the profile and write it to ``path`` as a Chrome trace.

        Raise RequestError if the folder does not exist or the file cannot be written; the profile then continues."""
        folder = Path(path).absolute().parent
        if not os.path.isdir(folder):
            raise RequestError(f"{path}: there is no folder {folder}; make it, then call stop_profile again")
        files.check_output(path, RequestError)
        self.close()
        self._profile.export_chrome_trace(path)

    def close(self) -> None:
        self._profile.__exit__(None, None, None)
