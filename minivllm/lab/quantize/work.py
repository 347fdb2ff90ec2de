"""The directory in which finished layers wait for the others.

It lies beside the one that is asked for and becomes that by one rename, when all is written.  A file in it is whole: it
is written by another name, and renamed.
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
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")  # of the model's directory: tokenizer, generation
NOT_COPIED = (PLAN, "config.json", "*.index.json", "quantize_config.json", "quant_config.json")


def check_free(out: Path) -> None:
    """ConfigError if ``out`` is there, or cannot be made."""
    if out.is_symlink() or os.path.ismount(out):
        kind = "a symbolic link" if out.is_symlink() else "where a disk is mounted"
        raise ConfigError(f"{out}: is {kind}, which no directory can be renamed to; want another path")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out}: is there already; want a directory that is not, or is empty")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{out}: there is no directory {parent}; want one to write in")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"{out}: {parent} cannot be written to")


class WorkFolder:
    """``plan``: what the files in it depend on.  ConfigError if what is there is of another plan, or in use."""

    def __init__(self, out: Path, plan: Mapping[str, Any], shards: int) -> None:
        self.out, self.shards = out.absolute(), shards
        self.folder = self.out.with_name(f"{self.out.name}.partial")
        self._plan = dict(plan)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        try:
            self.folder.mkdir(exist_ok=True)
            with open(self.folder / PLAN, "a+") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(f"{self.folder}: another process is at work there") from None
                self._agree(lock)
                yield
        except OSError as e:
            raise ResourceError(f"{self.folder}: {e.strerror or e}") from e

    def _agree(self, file: Any) -> None:
        file.seek(0)
        text = file.read()
        if not text and any(self.folder.glob("*.safetensors")):
            raise ConfigError(f"{self.folder}: has layers, and no {PLAN} that says of what; remove it to begin anew")
        there = {}
        with contextlib.suppress(json.JSONDecodeError):
            there = json.loads(text) if text else dict(self._plan)
        if not text:
            file.write(json.dumps(self._plan))
            file.flush()
        apart = [key for key in self._plan if there.get(key) != self._plan[key]]
        if apart:
            key = apart[0]
            raise ConfigError(
                f"{self.folder}: was begun with {key}={shown(there.get(key))}, and this is {shown(self._plan[key])}; "
                "remove it to begin anew"
            )

    def path(self, shard: int) -> Path:
        return self.folder / f"model-{shard + 1:05}-of-{self.shards:05}.safetensors"

    def read(self, shard: int) -> dict[str, Tensor] | None:
        """What has been written before, None if nothing has."""
        if not self.path(shard).exists():
            return None
        try:
            return load_file(self.path(shard))
        except SafetensorError:
            return None  # of a machine that went down

    def write(self, shard: int, tensors: Mapping[str, Tensor]) -> None:
        """ResourceError where there is no room."""
        path = self.path(shard)
        made = path.with_suffix(".tmp")
        try:
            save_file({name: t.contiguous() for name, t in tensors.items()}, made, {"format": "pt"})
            with open(made, "rb") as file:
                os.fsync(file.fileno())
            os.chmod(made, (self.folder / PLAN).stat().st_mode & 0o777)  # the library's are the user's alone
            os.replace(made, path)
        except (SafetensorError, OSError) as e:
            said = getattr(e, "strerror", None) or str(e)
            raise ResourceError(f"{path}: cannot be written ({said}); layers before it are kept there") from e
        finally:
            made.unlink(missing_ok=True)

    def need(self, more: int) -> None:
        """ResourceError if the disk has no room for ``more`` bytes beside what is written."""
        more -= sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        free = shutil.disk_usage(self.folder).free
        if more > free:
            raise ResourceError(
                f"{self.folder}: the packed model takes {more / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free"
            )

    def finish(self, model: Path, config: Mapping[str, Any]) -> None:
        """The index, config.json and what else the model's directory has; then the name that was asked for."""
        weight_map, total = {}, 0
        for shard in range(self.shards):
            found = load_file(self.path(shard))  # mapped
            weight_map |= dict.fromkeys(found, self.path(shard).name)
            total += sum(t.numel() * t.element_size() for t in found.values())
        for path in sorted({p for pattern in COPIED for p in model.glob(pattern)}):
            if path.is_file() and not any(path.match(pattern) for pattern in NOT_COPIED):
                files.check(path, files.LARGE)
                shutil.copyfile(path, self.folder / path.name)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        for name, value in ((INDEX, index), ("config.json", config)):
            (self.folder / name).write_text(json.dumps(value, indent=2) + "\n")
        os.rename(self.folder, self.out)
        (self.out / PLAN).unlink()
