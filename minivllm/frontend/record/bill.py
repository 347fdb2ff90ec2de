"""The bill of materials as data: everything that decides a run, and where it came from.

``make`` needs what ``config.resolve`` returned; ``finish`` adds what came out.  The fingerprint covers the values that
were used (not how they were asked for), the source of each chosen part and of minivllm, the model, the prompts and the
sampling parameters: whatever ``diff`` counts but for library versions and the machine.  Times and paths are not in it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.device.loading.generation import NONE
from minivllm.device.loading.hf_config import IN_PACKAGE
from minivllm.errors import ConfigError
from minivllm.registration.discovery import LOCAL
from minivllm.runtime.text.template import is_name, read_template

from . import live, machine, replaced, sources, values

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.config.resolve import Resolved
    from minivllm.core.interfaces.executor import Capacity, Part
    from minivllm.registry import Entry, Selection

FORMAT, WANTED = "minivllm-run", "a file that --record (or LLM.record) wrote"
FORMAT_VERSION = 1
KEYS = (
    "created", "fingerprint", "minivllm", "config", "resolved", "model", "parts", "changed_sources", "versions",
    "machine", "environment", "git", "results",
)  # fmt: skip
SELVES = ("allow_targets",)  # values of the configuration that a file may not hold: kept apart


def make(
    resolved: Resolved,
    loaded: Loaded,
    capacity: Capacity | None = None,
    since: float = 0.0,
    first: bool = False,
) -> dict[str, Any]:
    """The bill of what was wired.  ``since`` (Unix time): sources that changed later are named in ``changed_sources``,
    because what runs may not be what they say now.  ``first``: the engine is the first one of its process and has had
    no request, so values of its parts are as the wiring left them."""
    import minivllm

    package = sources.package_source()
    parts = [_part(seam, selection, part) for seam, selection, part in chosen(resolved)]
    newer = [p["seam"] for p in parts if p["source"].pop("newest") > since > 0]
    newer += ["minivllm"] if package.newest > since > 0 else []
    bill: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
        "fingerprint": "",
        "minivllm": {"version": minivllm.__version__, "source": {"hash": package.hash, "files": dict(package.files)}},
        "config": _config(resolved, loaded),
        "resolved": _facts(resolved, capacity),
        "model": _model(resolved),
        "parts": parts,
        "replaced": _replaced(parts),
        "first_engine": first,
        "changed_sources": newer,
        "reasons": [_reasons(s) for s in resolved.selections],
        "notes": [list(note) for note in resolved.notes],
        "versions": machine.versions(),
        "machine": machine.machine(resolved.device),
        "torch": machine.torch_settings(),
        "environment": machine.environment(),
        "git": {
            "directory": machine.git_state(Path.cwd()),
            "minivllm": machine.git_state(Path(minivllm.__file__).parent, "__init__.py"),
        },
    }
    return finish(bill, None)


def finish(bill: dict[str, Any], results: Mapping[str, Any] | None, requests: Any = None) -> dict[str, Any]:
    """The bill with what came out (and the requests, if they were kept), and its fingerprint."""
    from .nodes import fingerprint

    done = {**bill, "results": results}
    if requests is not None:
        done["requests"] = requests
    done = json.loads(json.dumps(done, default=_plain))  # what a reader of the file will see
    done["fingerprint"] = fingerprint(done)
    return done


def chosen(resolved: Resolved) -> Iterator[tuple[str, Selection, Part]]:
    """(seam, why, what) of each part; a seam is called as in the configuration, one of several ``processors.name``."""
    from minivllm.registration.spec import OPTION_OF

    several = {
        "processor": iter(resolved.wiring.processors),
        "strategy": iter(resolved.strategies),
        "hooks": iter(resolved.hooks),
    }
    for selection in resolved.selections:
        option = OPTION_OF.get(selection.kind, selection.kind)
        if selection.kind in several:
            part = next(several[selection.kind])
            yield f"{option}.{part.name}", selection, part
        else:
            yield option, selection, resolved.parts[selection.kind]


def _part(seam: str, selection: Selection, part: Part) -> dict[str, Any]:
    candidate = selection.require()
    entry, spec = candidate.entry, candidate.spec
    source = live.source_of(part.target)
    found: dict[str, Any] = {"hash": source.hash, "files": dict(source.files), "newest": source.newest}
    if source.missing:
        found["missing"] = source.missing
    if source.texts:
        found["texts"] = dict(source.texts)
    modules, read = values.of_part(part.target, source.files, entry.builtin)
    read |= values.beside(modules, source, entry.builtin)
    return {
        "seam": seam,
        "name": part.name,
        "asked": selection.asked,
        "distribution": entry.dist,
        "version": entry.version,
        "target": part.target,
        "options": dict(part.options),
        "source": found,
        "values": read,
        "values_of": modules,
        "needs": {need.module: need.installed_version() for need in (spec.needs if spec else ())},
        "requires": _requires(entry),
    }


def _replaced(parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the functions of the engine and of torch that a program has replaced, but for those of parts."""
    theirs = {module for part in parts for module in part["values_of"]}
    own = [name for name in replaced.engine_modules() if name not in theirs]
    return {**replaced.of_modules(own), **replaced.of_torch()}


def _requires(entry: Entry) -> dict[str, str]:
    """Installed versions of what a third-party package depends on: its kernels may live there."""
    from packaging.requirements import InvalidRequirement, Requirement

    if entry.builtin or entry.dist == LOCAL:
        return {}
    try:
        lines = importlib.metadata.requires(entry.dist) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        try:
            name = Requirement(line).name
            found[name] = importlib.metadata.version(name)
        except (InvalidRequirement, importlib.metadata.PackageNotFoundError):
            continue  # what pip could not read either, or an extra that is not installed
    return {name: version for name, version in sorted(found.items()) if name != "minivllm"}


def _config(resolved: Resolved, loaded: Loaded) -> dict[str, Any]:
    """The configuration such that it means the same when it is read again, from any folder."""
    asked = loaded.engine.model_dump(mode="json", exclude=set(SELVES))
    for key in ("model", "tokenizer"):
        if isinstance(asked[key], str) and asked[key] not in IN_PACKAGE and Path(asked[key]).expanduser().is_dir():
            asked[key] = str(Path(asked[key]).expanduser().resolve())
    if asked["generation_config"] not in ("auto", *NONE):
        asked["generation_config"] = os.path.abspath(os.path.expanduser(asked["generation_config"]))
    if asked["download_dir"] is not None:
        asked["download_dir"] = os.path.abspath(os.path.expanduser(asked["download_dir"]))
    if asked["chat_template"] is not None and not is_name(asked["chat_template"]):
        asked["chat_template"] = read_template(asked["chat_template"])
    run = loaded.run.model_dump(mode="json", exclude={"record", "prompts_file"})
    if run["output"]:
        run["output"] = os.path.abspath(run["output"])
    return {
        "values": asked,
        "sampling": {**resolved.sampling, **loaded.sampling},
        "run": run,
        "requires": list(loaded.requires),
        "origins": dict(loaded.origins),
    }


def _facts(resolved: Resolved, capacity: Capacity | None) -> dict[str, Any]:
    """The values that were used where the configuration left them open."""
    wiring = resolved.wiring
    facts: dict[str, Any] = {
        "device": wiring.device,
        "dtype": wiring.dtype,
        "max_model_len": wiring.max_model_len,
        "kvcache_block_size": wiring.block,
        "graph": wiring.steps.graph,
        "kv_groups": len(wiring.cache.groups),
    }
    if capacity is not None:
        facts |= {
            "run_ahead": capacity.depth,
            "kv_blocks": list(capacity.blocks),
            "kv_block_bytes": list(capacity.block_bytes),
            "weight_bytes": capacity.weight_bytes,
        }
    return facts


def _model(resolved: Resolved) -> dict[str, Any]:
    wiring, config = resolved.wiring, resolved.config
    beside = {"drafter": wiring.speculation.draft_model, **{f"processors.{k}": m for k, m in wiring.own_models.items()}}
    whole, pickled = wiring.load_format != "dummy", wiring.load_format == "pt"
    return {
        "name": config.model,
        **_checkpoint(Path(wiring.model_dir), whole, pickled),
        "tokenizer": None if resolved.tokenizer_dir is None else _tokenizer(Path(resolved.tokenizer_dir)),
        "beside": {of: _checkpoint(Path(m.model_dir), whole, pickled) for of, m in beside.items() if m is not None},
    }


def _checkpoint(folder: Path, whole: bool, pickled: bool = False) -> dict[str, Any]:
    """Return what a model was: ``repository`` and ``commit`` are those of a snapshot from the Hugging Face hub."""
    found = sources.model_identity(folder, whole, pickled)
    return {"folder": str(folder), **_snapshot(folder), "hash": found.hash, "files": dict(found.files)}


def _tokenizer(folder: Path) -> dict[str, Any]:
    found = sources.tokenizer_identity(folder)
    return {**_snapshot(folder), "hash": found.hash, "files": dict(found.files)}


def _snapshot(folder: Path) -> dict[str, str]:
    there = files.snapshot_of(folder)
    return {} if there is None else {"repository": there[0], "commit": there[1]}


def _reasons(selection: Selection) -> dict[str, Any]:
    chosen = selection.chosen
    return {
        "kind": selection.kind,
        "asked": selection.asked,
        "prefer": list(selection.preferred),
        "facts": {k: _plain(v) for k, v in selection.request.facts.items()},
        "features": sorted(selection.request.features),
        "approximate": selection.approximate,
        "chosen": chosen.entry.label if chosen else None,
        "candidates": [
            {"name": c.entry.label, "suitable": c.suitable, "reasons": [str(r) for r in c.reasons]}
            for c in selection.candidates
        ],
        "not_looked_at": [e.label for e in selection.skipped],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    return str(value)


def write(path: str | os.PathLike[str], bill: Mapping[str, Any]) -> None:
    """Write a bill; who reads the file meanwhile sees the old one or the new one, whole.  ConfigError if it cannot."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        try:
            part.write_text(json.dumps(bill, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"{path}: the record cannot be written: {exc.strerror}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """ConfigError if ``write`` could not; called before the work, and leaves nothing behind."""
    target = Path(path)
    if os.path.isdir(target):
        raise ConfigError(f"{path}: is a directory; want a file for the record, for example run.json")
    if os.path.exists(target) and not os.path.isfile(target):
        raise ConfigError(f"{path}: is no regular file; want one for the record, for example run.json")
    if target.suffix != ".json":
        raise ConfigError(f"{path}: want a name that ends in .json, so that the record can be read again")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{path}: the record cannot be written: no writable directory {target.parent}")


def is_record(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a bill.  ConfigError if it cannot be read; broken JSON is none (a hook may know better)."""
    raw = files.read_bytes(path, files.LARGE)
    try:
        found = files.parse_json(raw.decode(), str(path))
    except (UnicodeDecodeError, ConfigError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A bill from a file.  ConfigError if it is none."""
    found = files.read_json(path, files.LARGE, want=WANTED)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path}: no record of a run; want {WANTED}")
    if found.get("format_version") != FORMAT_VERSION:
        raise ConfigError(
            f"{path}: a record of format {found.get('format_version')}, and this minivllm reads {FORMAT_VERSION}; "
            f"it was written by minivllm {found.get('minivllm', {}).get('version', '?')}"
        )
    if missing := [key for key in KEYS if key not in found]:
        raise ConfigError(f"{path}: not a whole record: it lacks {', '.join(missing)}")
    from .nodes import fingerprint

    try:
        fingerprint(found)
    except (LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(f"{path}: not a whole record, edited by hand? {type(exc).__name__}: {exc}") from None
    return found
