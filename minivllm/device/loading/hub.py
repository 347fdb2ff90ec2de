"""Models of the Hugging Face hub, as a snapshot in the local cache or downloaded into it.  No code of a model is run.

    id, revision ──► snapshot in the cache ── complete ───────────────────────────► its folder
                              └── missing or incomplete ──► download from the hub ──►

A complete snapshot is used without a request to the hub.  So a start needs no network, and a model stays the same until
the user downloads a newer one (``hf download ID``).  The layout of the cache is described at
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError, ModelError, brief, shown

from . import NewFields

# patterns of the files of the configuration and the tokenizer; none of them has code or a pickle
CONFIGURATION = ("*.json", "*.jinja", "*.model", "*.txt")
PICKLED = ("*.bin", "*.pt", "*.pth")  # patterns of files that are downloaded only for load_format='pt'
WEIGHTS = "*.safetensors"
POOLING = "1_Pooling"  # folder that sentence-transformers writes; its configuration is read for embedding models
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_NAMED = 3  # largest number of files that a message names
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)[\w.-][\w./-]{0,199}")


@dataclass(frozen=True)
class HubFiles:
    """The files of a repository to download, as ``patterns``.

    ``lacks`` returns the required files that a folder does not have.
    """

    patterns: tuple[str, ...]
    lacks: Callable[[Path], list[str]]


@dataclass(frozen=True)
class HubOptions:
    """The revision of a repository on the Hugging Face hub, and the folder of the cache.

    ``revision`` is a branch, a tag or a commit; None means main.  ``download_dir`` is the cache; None means that of the
    hub's library (HF_HUB_CACHE, HF_HOME).  ``option`` is the name of the user's option for the revision.
    """

    revision: str | None = None
    download_dir: str | None = None
    option: str = "revision"

    def refuse_revision(self, what: str) -> None:
        """Raise ConfigError if a revision is set for a model that is not on the hub."""
        if self.revision is not None:
            raise ConfigError(
                f"{self.option}={shown(self.revision)}: {brief(what)} is no id of the Hugging Face hub, and has no "
                f"revisions; leave {self.option} out, or give an id such as Qwen/Qwen3-0.6B"
            )


def without_weights(folder: Path) -> list[str]:
    """Return the names of files that a folder lacks and that are needed to describe its model without weights."""
    return [] if os.path.exists(folder / "config.json") else ["config.json"]


def whole_model(folder: Path) -> list[str]:
    """Return the names of files that a folder lacks and that are needed to load its model.  A broken link counts as
    missing."""
    lacks = without_weights(folder)
    if os.path.exists(folder / SINGLE):
        return lacks
    if not os.path.exists(folder / INDEX):
        return [*lacks, SINGLE]
    listed = files.read_json(folder / INDEX, files.PART, ModelError)
    return lacks + _missing(folder, listed)


def whole_pickled(folder: Path) -> list[str]:
    """Return the names of files that a folder lacks and that ``load_format = "pt"`` needs."""
    index = folder / "pytorch_model.bin.index.json"
    if os.path.exists(index):
        listed = files.read_json(index, files.PART, ModelError)
        return without_weights(folder) + _missing(folder, listed)
    there = any(os.path.exists(path) for pattern in PICKLED for path in folder.glob(pattern))
    return without_weights(folder) + ([] if there else ["pytorch_model.bin"])


def _missing(folder: Path, listed: Any) -> list[str]:
    """Return the sorted names of the shards that the index ``listed`` names and a folder lacks.

    A malformed index gives no names; the loader refuses it later."""
    shards = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(shards, dict):
        return []
    names = {str(shard) for shard in shards.values()}
    return sorted(name for name in names if not os.path.exists(folder / name))


def other_folders(name: str) -> list[str]:
    """Return patterns of ``fnmatch`` for the files of all folders except ``name``, including files of subfolders."""
    patterns = [f"{name}/*/*", f"{name}[!/]*/*"]
    for at, letter in enumerate(name):
        begin = name[:at]
        patterns += [f"{begin}/*", f"{begin}[!{letter}/]*/*"]
    return patterns


# patterns of files that are never downloaded: folders with the same weights in other formats
NEVER_READ = (*other_folders(POOLING), "consolidated*.safetensors")
MODEL = HubFiles((*CONFIGURATION, WEIGHTS), whole_model)
PICKLED_MODEL = HubFiles((*CONFIGURATION, *PICKLED), whole_pickled)
DESCRIPTION = HubFiles(CONFIGURATION, without_weights)


def tokenizer_files(names: tuple[str, ...]) -> HubFiles:
    """Return the files of a repository to download for a tokenizer; one of the files ``names`` is required.

    An error about a missing file has the first of the names."""
    return HubFiles(CONFIGURATION, lambda at: [] if any(os.path.exists(at / name) for name in names) else [names[0]])


def find_snapshot(name: str, wanted: HubFiles, hub: HubOptions) -> Path:
    """Return the folder with the files of a repository, from the cache or downloaded.

    ConfigError for an impossible revision.  ModelError names the files, the places and what to do.
    """
    if hub.revision is not None and not _REVISION.fullmatch(hub.revision):
        raise ConfigError(f"{hub.option}={shown(hub.revision)}: expected a branch, a tag or a commit")
    cached = _cached(name, wanted, hub)
    if cached is not None and not wanted.lacks(cached):
        return cached
    folder = _download(name, wanted, hub)
    if not (lacks := wanted.lacks(folder)):
        return folder
    if folder == cached:  # without a network the library returned the incomplete folder of the cache
        raise ModelError(_unreachable(name, wanted, hub, unless=", or has no such file"))
    why = "expected a whole model"
    if SINGLE in lacks:
        why = (
            "if it has weights of torch.save (*.bin), load_format='pt' fetches and reads them, and runs nothing of them"
        )
    raise ModelError(f"{_at(name, hub)}: the repository on the hub has no {_listed(lacks)}; {why}")


def _at(name: str, hub: HubOptions) -> str:
    return name if hub.revision is None else f"{name} ({hub.option}={hub.revision})"


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _download_arguments(wanted: HubFiles, hub: HubOptions) -> NewFields:
    """Return the arguments of ``snapshot_download``."""
    place = None if hub.download_dir is None else str(files.expanded(hub.download_dir))
    return {
        "revision": hub.revision,
        "cache_dir": place,
        "allow_patterns": list(wanted.patterns),
        "ignore_patterns": list(NEVER_READ),
    }


def _cached(name: str, wanted: HubFiles, hub: HubOptions) -> Path | None:
    """Return the folder of a model in the cache, which may lack files, or None.  ModelError if the name cannot be a hub
    id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, **_download_arguments(wanted, hub)))
    except HFValidationError:
        raise ModelError(f"{name}: no such directory, and no Hugging Face model id") from None
    except LocalEntryNotFoundError:
        return None
    except (OSError, ValueError, RuntimeError) as exc:  # the path is impossible, or a file of the cache is no text
        raise ModelError(f"{name}: the Hugging Face cache cannot be read: {one_line(exc)}") from exc


def _download(name: str, wanted: HubFiles, hub: HubOptions) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    at = _at(name, hub)
    url = constants.ENDPOINT
    token = "set HF_TOKEN, or run `hf auth login`"
    try:
        return Path(snapshot_download(name, **_download_arguments(wanted, hub), **_bars()))
    except errors.GatedRepoError as exc:
        raise ModelError(f"{at}: is gated; request access at {url}/{name}, then {token}") from exc
    except errors.RevisionNotFoundError as exc:
        raise ModelError(
            f"{name}: the hub ({url}) has no {hub.option} {shown(hub.revision)} of it; expected a branch, a tag or a "
            "commit"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise ModelError(
            f"{name}: no such directory, and the hub ({url}) has no such model, or a private one; expected a "
            f"directory, or an id with the hub's spelling; for a private one {token}"
        ) from exc
    except errors.LocalEntryNotFoundError as exc:
        raise ModelError(_unreachable(name, wanted, hub, _status(exc.__cause__))) from exc
    except errors.HfHubHTTPError as exc:
        todo = f"; {token}" if _status(exc) in (401, 403) else ""
        raise ModelError(f"{at}: the Hugging Face hub ({url}) returned: {one_line(exc)}{todo}") from exc
    except Exception as exc:  # many types: errors of the HTTP client, a full disk
        raise ModelError(f"{at}: cannot be fetched from the Hugging Face hub ({url}): {one_line(exc)}") from exc


def _bars() -> NewFields:
    """Return the arguments by which the library shows progress bars on a terminal, and none elsewhere."""
    if sys.stderr is not None and sys.stderr.isatty():
        return {}
    from huggingface_hub.utils import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return {"tqdm_class": NoBar}


def _status(exc: BaseException | None) -> int | None:
    """Return the HTTP status of the hub's answer in an exception or its causes, or None."""
    return getattr(getattr(exc, "response", None), "status_code", None)


def _unreachable(name: str, wanted: HubFiles, hub: HubOptions, status: int | None = None, unless: str = "") -> str:
    """Return the error message for files that the cache lacks while the hub is not reachable, or answers with
    ``status``.

    ``unless`` is the text of a further possible reason."""
    from huggingface_hub import constants

    why = f"the hub ({constants.ENDPOINT}) " + (f"answers {status}" if status else f"cannot be reached{unless}")
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    at = _at(name, hub)
    cache = files.expanded(hub.download_dir or constants.HF_HUB_CACHE)
    here = cache / f"models--{name.replace('/', '--')}"
    partial = _snapshot(here, hub.revision or "main")
    todo = f"run `hf download {name}` where there is a network"
    if partial is not None and (lacks := wanted.lacks(partial)):
        return f"{at}: the cached snapshot {partial} lacks {_listed(lacks)}, and {why}; {todo}"
    if partial is not None:  # the folder lacks only files that the model does not need
        return f"{at}: the cached snapshot {partial} is not whole, and {why}; {todo}, or give that directory"
    if hub.revision is not None and os.path.isdir(here):
        refs = [
            p.relative_to(here / "refs").as_posix() for p in sorted((here / "refs").rglob("*")) if os.path.isfile(p)
        ]
        there = _listed(refs + sorted(p.name for p in (here / "snapshots").glob("*")))
        return f"{at}: not in the Hugging Face cache {cache}, which has {there or 'nothing'} of it, and {why}"
    return (
        f"{at}: no such directory, not in the Hugging Face cache {cache}, and {why}; "
        "give a directory, or try `--model pocket`"
    )


def _snapshot(here: Path, revision: str) -> Path | None:
    """Return the folder of a revision in ``here``, the folder of a repository in the cache; None if it is not there."""
    ref = here / "refs" / revision
    commit = files.read_text(ref, error=ModelError).strip() if os.path.isfile(ref) else revision
    folder = here / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and os.path.isdir(folder) else None


def one_line(exc: BaseException) -> str:
    text = " ".join(str(exc).split()) or type(exc).__name__
    return text if len(text) <= 300 else text[:297] + "..."
