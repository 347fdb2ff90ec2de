"""The directory that holds finished layers until all are written.

It lies beside the output directory, and one rename makes it the output directory when all files are written.  Its files
are always complete, since each is written under another name and then renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm import files
from minivllm.errors import ConfigError, ResourceError, shown

PLAN = "plan.json"
INDEX = "model.safetensors.index.json"
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")  # files of the model's directory: tokenizer, generation
NOT_COPIED = (PLAN, "config.json", "*.index.json", "quantize_config.json", "quant_config.json")


def check_free(out: Path) -> None:
    """Raise ConfigError if the output directory exists and is not empty, or cannot be created."""
    linked = os.path.islink(out)
    if linked or os.path.ismount(out):
        kind = "a symbolic link" if linked else "the mount point of a disk"
        raise ConfigError(f"{out}: is {kind}, which no directory can be renamed to; use another path")
    if os.path.lexists(out) and not (os.path.isdir(out) and not any(out.iterdir())):
        raise ConfigError(f"{out}: exists already; expected a directory that does not exist or is empty")
    parent = out.absolute().parent
    if not os.path.isdir(parent):
        raise ConfigError(f"{out}: there is no directory {parent}; expected an existing one")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"{out}: {parent} cannot be written to")


class WorkFolder:
    """The directory of unfinished output, with one file per layer and one for all other tensors.

    ``plan`` has all settings that affect the contents of the files.  It is stored with them, so that a later run with
    the same plan can continue.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any], shards: int) -> None:
        self.out = out.absolute()
        self.shards = shards
        self.folder = self.out.with_name(f"{self.out.name}.partial")
        self._plan = dict(plan)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Create the directory and lock it while the context is open.

        Raise ConfigError if another process holds the lock, or the files belong to another plan.  An OSError in the
        context becomes a ResourceError.
        """
        try:
            self.folder.mkdir(exist_ok=True)
            with open(self.folder / PLAN, "a+") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(f"{self.folder}: another process is writing to it") from None
                self._check_plan(lock)
                yield
        except OSError as e:
            raise ResourceError(f"{self.folder}: {e.strerror or e}") from e

    def _check_plan(self, file: Any) -> None:
        """Write the plan to an empty file, or raise ConfigError if the file holds another plan."""
        file.seek(0)
        text = file.read()
        stored: Any = {}
        if text:
            with contextlib.suppress(json.JSONDecodeError):
                stored = json.loads(text)
        else:
            if any(self.folder.glob("*.safetensors")):
                raise ConfigError(
                    f"{self.folder}: has layers, and no {PLAN} with the options of their run; remove it to start again"
                )
            stored = self._plan
            file.write(json.dumps(stored))
            file.flush()
        for key, value in self._plan.items():
            if stored.get(key) != value:
                raise ConfigError(
                    f"{self.folder}: was started with {key}={shown(stored.get(key))}, and this run has {shown(value)}; "
                    "remove it to start again"
                )

    def path(self, shard: int) -> Path:
        """Return the path of a file."""
        return self.folder / f"model-{shard + 1:05}-of-{self.shards:05}.safetensors"

    def read(self, shard: int) -> dict[str, Tensor] | None:
        """Return the tensors of a file, None if an earlier run has not written it."""
        if not os.path.exists(self.path(shard)):
            return None
        try:
            return load_file(self.path(shard))
        except SafetensorError:
            return None  # a crash of the machine can leave a broken file

    def write(self, shard: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a file.  Raise ResourceError if that fails, for instance on a full disk."""
        path = self.path(shard)
        temporary = path.with_suffix(".tmp")
        try:
            save_file({name: t.contiguous() for name, t in tensors.items()}, temporary, {"format": "pt"})
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            # safetensors creates files that only the user may read
            os.chmod(temporary, (self.folder / PLAN).stat().st_mode & 0o777)
            os.replace(temporary, path)
        except (SafetensorError, OSError) as e:
            reason = getattr(e, "strerror", None) or str(e)
            raise ResourceError(f"{path}: cannot be written ({reason}); earlier layers stay there") from e
        finally:
            temporary.unlink(missing_ok=True)

    def need(self, nbytes: int) -> None:
        """Raise ResourceError if the disk has no room for a packed model of ``nbytes``, less the files that exist."""
        missing = nbytes - sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            raise ResourceError(
                f"{self.folder}: the packed model takes {missing / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free"
            )

    def finish(self, model: Path, config: Mapping[str, Any]) -> None:
        """Write the index and config.json, copy the model's other files, and rename to the output directory."""
        weight_map: dict[str, str] = {}
        total = 0
        for shard in range(self.shards):
            tensors = load_file(self.path(shard))  # mapped, not read
            weight_map |= dict.fromkeys(tensors, self.path(shard).name)
            total += sum(t.numel() * t.element_size() for t in tensors.values())
        for path in sorted({p for pattern in COPIED for p in model.glob(pattern)}):
            if os.path.isfile(path) and not any(path.match(pattern) for pattern in NOT_COPIED):
                files.check(path, files.LARGE)
                shutil.copyfile(path, self.folder / path.name)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        for name, value in ((INDEX, index), ("config.json", config)):
            (self.folder / name).write_text(json.dumps(value, indent=2) + "\n")
        os.rename(self.folder, self.out)
        (self.out / PLAN).unlink()
