"""The bill of materials as data: everything that decides the tokens of a run, and where it came from.

``make`` builds the bill from the result of ``config.resolve``.  ``finish`` adds the results and the fingerprint.  The
fingerprint covers the values that were used (not how the configuration asked for them), the source of each chosen
plug-in and of minivllm, the model, the prompts and the sampling parameters.  These are the values that ``diff`` counts,
without library versions and the machine.  Times and paths are not in the fingerprint.
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
from minivllm.errors import ConfigError, brief, shown
from minivllm.registration.discovery import LOCAL
from minivllm.runtime.text.template import is_name, read_template

from . import Entries, live, machine, replaced, sources, values

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.config.resolved import Resolved
    from minivllm.core.interfaces.executor import Capacity, Part
    from minivllm.registry import Entry, Selection

FORMAT = "minivllm-run"
EXPECTED = "a file that --record (or LLM.record) wrote"
FORMAT_VERSION = 1
KEYS = (
    "created", "fingerprint", "minivllm", "config", "resolved", "model", "parts", "changed_sources", "versions",
    "machine", "environment", "git", "results",
)  # fmt: skip
# accepted types of values that the commands read, by their path
SHAPES: Mapping[tuple[str, ...], tuple[type, ...]] = {
    ("created",): (str,), ("fingerprint",): (str,), ("config", "values"): (dict,), ("config", "sampling"): (dict,),
    ("config", "run"): (dict,), ("config", "requires"): (list,), ("results", "requests"): (int,),
    ("results", "unfinished"): (int,), ("results", "output_tokens"): (int,), ("results", "prompts_hash"): (str,),
    ("results", "tokens_hash"): (str,), ("results", "outputs"): (list, type(None)),
}  # fmt: skip
NOT_IN_FILES = {"allow_targets"}  # options that a configuration file may not set


def make(
    resolved: Resolved,
    loaded: Loaded,
    capacity: Capacity | None = None,
    since: float = 0.0,
    first: bool = False,
) -> Entries:
    """Return the bill of materials of a resolved configuration.

    ``capacity`` describes the built engine, None before it is built.  ``since`` is the Unix time at which the engine
    was built.  Sources with a later change are named in ``changed_sources``, because the running code may be older than
    their text.  ``first`` means that the engine is the first of its process and has had no request, so that the values
    its plug-ins read are as the start left them.
    """
    import minivllm

    package = sources.package_source()
    source = {"hash": package.hash, "files": dict(package.files)}
    parts = [_part(seam, selection, part) for seam, selection, part in chosen(resolved)]
    newest = {part["seam"]: part["source"].pop("newest") for part in parts}
    newest["minivllm"] = package.newest
    now = datetime.datetime.now(datetime.timezone.utc)
    command = []
    if sys.argv:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    bill: Entries = {"format": FORMAT, "format_version": FORMAT_VERSION}
    bill["created"] = now.isoformat(timespec="seconds")
    bill["command"] = command
    bill["fingerprint"] = ""
    bill["minivllm"] = {"version": minivllm.__version__, "source": source}
    bill["config"] = _config(resolved, loaded)
    bill["resolved"] = _facts(resolved, capacity)
    bill["model"] = _model(resolved)
    bill["parts"] = parts
    bill["replaced"] = _replaced(parts)
    bill["first_engine"] = first
    bill["changed_sources"] = [name for name, changed in newest.items() if changed > since > 0]
    bill["reasons"] = [_reasons(selection) for selection in resolved.selections]
    bill["notes"] = [list(note) for note in resolved.notes]
    bill["versions"] = machine.versions()
    bill["machine"] = machine.machine(resolved.device)
    bill["torch"] = machine.torch_settings()
    bill["environment"] = machine.environment()
    git = {"directory": machine.git_state(Path.cwd())}
    git["minivllm"] = machine.git_state(Path(minivllm.__file__).parent, "__init__.py")
    bill["git"] = git
    return finish(bill, None)


def finish(bill: Entries, results: Mapping[str, Any] | None, requests: Any = None) -> Entries:
    """Return a copy of a bill of materials with the results, the recorded requests (if any) and the fingerprint."""
    from .nodes import fingerprint

    done = {**bill, "results": results}
    if requests is not None:
        done["requests"] = requests
    # converted as JSON does, so that it equals the object that is later read from the file
    done = json.loads(json.dumps(done, default=_plain))
    done["fingerprint"] = fingerprint(done)
    return done


def chosen(resolved: Resolved) -> Iterator[tuple[str, Selection, Part]]:
    """Yield (option name, selection, plug-in) for each chosen plug-in.

    A plug-in of a kind that allows several has an option name such as ``processors.name``.
    """
    from minivllm.registration.spec import OPTION_OF

    several = {"processor": iter(resolved.wiring.processors)}
    several["strategy"] = iter(resolved.strategies)
    several["hooks"] = iter(resolved.hooks)
    several["kvstore"] = iter(resolved.wiring.cache.stores)
    several["adapter"] = iter(resolved.wiring.adapters.methods)
    for selection in resolved.selections:
        kind = selection.kind
        option = OPTION_OF.get(kind, kind)
        if kind in several:
            part = next(several[kind])
            yield f"{option}.{part.name}", selection, part
        else:
            yield option, selection, resolved.parts[kind]


def _part(seam: str, selection: Selection, part: Part) -> Entries:
    """Return the entry of a chosen plug-in in the bill of materials: its seam, name, distribution, target, options,
    source and reasons."""
    candidate = selection.require()
    entry = candidate.entry
    needs = candidate.spec.needs if candidate.spec else ()
    source = live.source_of(part.target)
    found: Entries = {"hash": source.hash, "files": dict(source.files), "newest": source.newest}
    if source.missing:
        found["missing"] = source.missing
    if source.texts:
        found["texts"] = dict(source.texts)
    modules, read = values.of_part(part.target, source.files, entry.builtin)
    read |= values.beside(modules, source, entry.builtin)
    facts: Entries = {"seam": seam, "name": part.name}
    facts["asked"] = selection.requested
    facts["distribution"] = entry.dist
    facts["version"] = entry.version
    facts["target"] = part.target
    facts["options"] = dict(part.options)
    facts["source"] = found
    facts["values"] = read
    facts["values_of"] = modules
    facts["needs"] = {need.module: need.installed_version() for need in needs}
    facts["requires"] = _requires(entry)
    return facts


def _replaced(parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the functions of the engine and of torch that a program replaced, except in modules of the plug-ins
    ``parts``."""
    part_modules = {module for part in parts for module in part["values_of"]}
    modules = [name for name in replaced.engine_modules() if name not in part_modules]
    return {**replaced.of_modules(modules), **replaced.of_torch()}


def _requires(entry: Entry) -> dict[str, str]:
    """Return the installed versions of the dependencies of a third-party package, which may contain its kernels."""
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
            continue  # a line that pip cannot read either, or an extra that is not installed
    found.pop("minivllm", None)
    return dict(sorted(found.items()))


def _config(resolved: Resolved, loaded: Loaded) -> Entries:
    """Return the configuration with absolute paths and inlined files, so that it can be read from any folder."""
    requested = loaded.engine.model_dump(mode="json", exclude=NOT_IN_FILES)
    for key in ("model", "tokenizer"):
        name = requested[key]
        if isinstance(name, str) and name not in IN_PACKAGE:
            folder = files.folder_of(name)
            if folder is not None:
                requested[key] = str(folder.resolve())
    if requested["generation_config"] not in ("auto", *NONE):
        requested["generation_config"] = _absolute(requested["generation_config"])
    if requested["download_dir"] is not None:
        requested["download_dir"] = _absolute(requested["download_dir"])
    if requested["chat_template"] is not None and not is_name(requested["chat_template"]):
        requested["chat_template"] = read_template(requested["chat_template"])
    run = loaded.run.model_dump(mode="json", exclude={"record", "prompts_file"})
    if run["output"]:
        run["output"] = os.path.abspath(run["output"])
    sampling = {**resolved.sampling, **loaded.sampling}
    config: Entries = {"values": requested, "sampling": sampling, "run": run}
    config["requires"] = list(loaded.requires)
    config["origins"] = dict(loaded.origins)
    return config


def _absolute(path: str) -> str:
    """Return an absolute path, with ``~`` replaced by the home folder."""
    return os.path.abspath(os.path.expanduser(path))


def _facts(resolved: Resolved, capacity: Capacity | None) -> Entries:
    """Return the values with which the engine runs, whether the user or minivllm chose them.

    ``capacity`` adds how many steps may be in flight (``run_ahead``), and the sizes of the KV cache, the weights and
    the recurrent states.  None leaves them out, before the engine is built.
    """
    wiring = resolved.wiring
    facts: Entries = {"device": wiring.device, "dtype": wiring.dtype}
    facts["max_model_len"] = wiring.max_model_len
    facts["kvcache_block_size"] = wiring.block
    facts["graph"] = wiring.steps.graph
    facts["kv_groups"] = len(wiring.cache.groups)
    if capacity is not None:
        facts["run_ahead"] = capacity.depth
        facts["kv_blocks"] = list(capacity.blocks)
        facts["kv_block_bytes"] = list(capacity.block_bytes)
        facts["weight_bytes"] = capacity.weight_bytes
        if capacity.checkpoints is not None:
            facts["state_bytes"] = capacity.state_bytes
            facts["state_checkpoints"] = capacity.checkpoints
    return facts


def _model(resolved: Resolved) -> Entries:
    """Return the entry of the model, its tokenizer, and the second models of drafters and processors (``beside``)."""
    wiring = resolved.wiring
    second: Entries = {"drafter": wiring.speculation.draft_model}
    for name, model in wiring.own_models.items():
        second[f"processors.{name}"] = model
    beside = {}
    for seam, model in second.items():
        if model is not None:
            beside[seam] = _checkpoint(model.model_dir, wiring.load_format)
    tokenizer = None
    if resolved.tokenizer_dir is not None:
        tokenizer = _tokenizer(Path(resolved.tokenizer_dir))
    checkpoint = _checkpoint(wiring.model_dir, wiring.load_format)
    return {"name": resolved.config.model, **checkpoint, "tokenizer": tokenizer, "beside": beside}


def _checkpoint(directory: str, load_format: str) -> Entries:
    """Return the entry of a checkpoint.  With ``load_format`` "dummy" its weights are not part of its identity.

    ``repository`` and ``commit`` are there for a snapshot from the Hugging Face hub.
    """
    folder = Path(directory)
    identity = sources.model_identity(folder, load_format != "dummy", load_format == "pt")
    return {"folder": str(folder), **_identified(folder, identity)}


def _tokenizer(folder: Path) -> Entries:
    """Return the entry of a tokenizer in the bill of materials: the hash and the files of its folder, and the commit of
    a hub snapshot."""
    return _identified(folder, sources.tokenizer_identity(folder))


def _identified(folder: Path, identity: sources.Source) -> Entries:
    """Return the commit of a snapshot, if the folder is one, and the hash and files of an identity."""
    found: Entries = {}
    snapshot = files.snapshot_of(folder)
    if snapshot is not None:
        found["repository"], found["commit"] = snapshot
    found["hash"] = identity.hash
    found["files"] = dict(identity.files)
    return found


def _reasons(selection: Selection) -> Entries:
    """Return why a plug-in was chosen: the query, and the verdict on each candidate."""
    chosen = selection.chosen
    query = selection.request
    candidates = []
    for candidate in selection.candidates:
        reasons = [str(reason) for reason in candidate.reasons]
        candidates.append({"name": candidate.entry.label, "suitable": candidate.suitable, "reasons": reasons})
    reasons_of: Entries = {"kind": selection.kind, "asked": selection.requested}
    reasons_of["prefer"] = list(selection.preferred)
    reasons_of["facts"] = {fact: _plain(value) for fact, value in query.facts.items()}
    reasons_of["features"] = sorted(query.features)
    reasons_of["approximate"] = selection.approximate
    reasons_of["chosen"] = chosen.entry.label if chosen else None
    reasons_of["candidates"] = candidates
    reasons_of["not_looked_at"] = [entry.label for entry in selection.skipped]
    return reasons_of


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: a sorted list of a set, a list of an array, the text of any other object."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    return str(value)


def write(path: str | os.PathLike[str], bill: Mapping[str, Any]) -> None:
    """Write a bill of materials atomically: readers see the old or the new file.  ConfigError if that fails."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        try:
            text = json.dumps(bill, indent=1, ensure_ascii=False)
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"{path}: the record cannot be written: {exc.strerror}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError if ``write`` would fail.  Called before the work; it creates no file."""
    target = Path(path)
    if os.path.isdir(target):
        raise ConfigError(f"{path}: is a directory; expected a file for the record, for example run.json")
    if os.path.exists(target) and not os.path.isfile(target):
        raise ConfigError(f"{path}: is no regular file; expected one for the record, for example run.json")
    if target.suffix != ".json":
        raise ConfigError(f"{path}: expected a name that ends in .json, so that the record can be read again")
    if not os.path.isdir(target.parent) or not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{path}: the record cannot be written: no writable directory {target.parent}")


def is_record(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a record of a run (a bill of materials); False for broken JSON.

    ConfigError if the file cannot be read."""
    raw = files.read_bytes(path, files.LARGE)
    try:
        found = files.parse_json(raw.decode(), str(path))
    except (UnicodeDecodeError, ConfigError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def read(path: str | os.PathLike[str]) -> Entries:
    """Return the bill of materials in the record of a run.

    ConfigError if the file is no complete bill of this format version."""
    found = files.read_json(path, files.LARGE, expected=EXPECTED)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path}: no record of a run; expected {EXPECTED}")
    if found.get("format_version") != FORMAT_VERSION:
        about = found.get("minivllm")
        version = about.get("version", "?") if isinstance(about, dict) else "?"
        raise ConfigError(
            f"{path}: a record of format {shown(found.get('format_version'))}, and this minivllm reads "
            f"{FORMAT_VERSION}; it was written by minivllm {brief(str(version))}"
        )
    if missing := [key for key in KEYS if key not in found]:
        raise ConfigError(f"{path}: not a whole record: it lacks the keys {', '.join(missing)}")
    from .nodes import fingerprint

    try:
        fingerprint(found)
    except (LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(f"{path}: not a whole record ({type(exc).__name__}: {exc}); record the run again") from None
    for place, kinds in SHAPES.items():
        _check_shape(path, found, place, kinds)
    return found


def _check_shape(path: object, found: Entries, place: tuple[str, ...], kinds: tuple[type, ...]) -> None:
    """Raise ConfigError if the value at a place of a record has another type than ``kinds``.  A record may have no
    results."""
    value: Any = found
    for key in place:
        if key == "results" and value.get(key) is None:
            return
        inner = value[key] if isinstance(value, dict) and key in value else ...
        if inner is ...:
            raise ConfigError(f"{path}: not a whole record: it lacks {'.'.join(place)}; record the run again")
        value = inner
    if not isinstance(value, kinds) or isinstance(value, bool):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(
            f"{path}: not a whole record: {'.'.join(place)}={shown(value)}: expected {names}; record the run again"
        )
