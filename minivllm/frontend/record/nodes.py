"""Divide a bill of materials (of a run) into nodes: values that can differ, each with its possible causes.

The order of the wiring gives the causes: device, dtype, model, quantizer, KV format, attention, block size ...  A value
that the user left open (``requested`` is equal in both bills) may differ because a value that causes it differs.
Then it is a consequence.  Otherwise it is a difference of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import JsonObject
from .sources import digest
from .values import settled

GROUPS = ("model", "parts", "options", "requests", "versions", "machine")
IDENTITY = ("model", "parts", "options", "requests")  # the groups that the fingerprint covers
# options that cannot change tokens, or are part of another option
QUIET = ("config_version", "requires", "enforce_eager", "download_dir", "energy")
ABOUT_MODEL = ("model", "revision", "tokenizer", "tokenizer_revision", "skip_tokenizer_init")  # see ``_model``
LIBRARIES = ("torch", "cuda", "triton", "transformers", "tokenizers")  # libraries whose version can change a token
# environment variables that are not counted, because their effect is visible in the plug-ins or the machine
CHOOSING = ("MINIVLLM_PLUGINS", "MINIVLLM_STRICT_PLUGINS", "MINIVLLM_NATIVE", "MINIVLLM_ISA")
# properties of the machine that can change a token
MACHINE = ("cpu", "native", "cores", "threads", "gpu", "compute_capability", "driver")
FOLLOWS: Mapping[str, tuple[str, ...]] = {  # value that the user left open -> values from which it is chosen
    "tokenizer": ("model",),
    "executor": ("device", "tensor_parallel_size"),
    "model_arch": ("model", "device", "dtype", "batch_invariant"),
    "quantizer": ("model", "device", "dtype", "batch_invariant"),
    "kv_format": ("device", "dtype"),
    "attention": ("model", "device", "dtype", "kv_format", "kvcache_block_size", "batch_invariant"),
    "sampler": ("device",),
    "device": ("machine.gpu",),
    "dtype": ("model", "device", "machine.cpu", "machine.gpu"),
    "max_model_len": ("model",),
    "kvcache_block_size": ("attention",),
    "run_ahead": ("executor", "device"),
    "prompts": ("tokenizer",),  # the chat template of the tokenizer renders the prompts
}
SEVERAL = ("processors", "strategies", "hooks", "kvstore", "adapters")
# Hooks and KV stores do not change results. If a hook redirects the model's name, the hash of the model shows it.
LOOK_ON = ("hooks", "kvstore")


@dataclass(frozen=True)
class DiffNode:
    """A comparable value of a bill of materials.

    ``open`` means that the user left the choice to minivllm.  ``owner`` names a node that must be equal for this one to
    be compared; the options of another plug-in are no difference of their own.  ``subject`` is the name in the verdict.
    ``counts`` is whether the value can change tokens.  ``both`` limits the comparison to bills that both have the node.
    ``shown`` is the text for readers, "" for the value itself.
    """

    name: str
    group: str
    value: Any
    requested: Any = None
    open: bool = True
    follows: tuple[str, ...] = ()
    owner: str = ""
    subject: str = ""
    counts: bool = True
    both: bool = False
    shown: str = ""

    @property
    def label(self) -> str:
        """Return the name in the verdict."""
        return self.subject or self.name

    @property
    def text(self) -> str:
        """Return the value as text for readers."""
        return self.shown or show(self.value)


def show(value: Any) -> str:
    """Return a value as text for readers."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(show, value)) or "none"
    return str(value)


def nodes(bill: JsonObject) -> dict[str, DiffNode]:
    """Return all nodes (comparable values) of a bill of materials by name, in the order in which they are printed."""
    found: dict[str, DiffNode] = {}
    for make in (_model, _parts, _options, _requests, _versions, _machine):
        found |= {node.name: node for node in make(bill)}
    return found


def fingerprint(bill: JsonObject) -> str:
    """Return the SHA-256 over the groups of ``IDENTITY`` and the values that plug-ins read."""
    covered: dict[str, Any] = {}
    for node in nodes(bill).values():
        if node.counts and node.group in IDENTITY:
            covered[node.name] = node.value
    for part in bill["parts"]:
        constant = settled(part)
        if constant and part["seam"].partition(".")[0] not in LOOK_ON:
            covered[f"values of {part['seam']}"] = constant
    return digest(covered)


def _model(bill: JsonObject) -> Iterator[DiffNode]:
    """Yield the nodes of the model, its tokenizer and second models.

    The files of a model are its identity.  The commit of a model from the hub may change although the files stay the
    same, so it does not count.
    """
    model = bill["model"]
    requested = bill["config"]["values"]
    wanted = [requested["model"], requested.get("revision")]
    yield DiffNode("model", "model", model["hash"], wanted, False, shown=_named(model["name"], model))
    yield from _commit("model", model)
    tokenizer = model["tokenizer"]
    value, shown = None, "none"
    if tokenizer:
        value = tokenizer["hash"]
        shown = _named(requested["tokenizer"] or "the model's", tokenizer)
    wanted = [requested["tokenizer"], requested.get("tokenizer_revision"), requested["skip_tokenizer_init"]]
    left_open = wanted[0] is None and wanted[1] is None
    yield DiffNode("tokenizer", "model", value, wanted, left_open, FOLLOWS["tokenizer"], shown=shown)
    yield from _commit("tokenizer", tokenizer or {})
    for seam, second in model.get("beside", {}).items():
        part = next(part for part in bill["parts"] if part["seam"] == seam)
        wanted = [part["options"].get("model"), part["options"].get("revision")]
        name = f"model of {seam}"
        owner = f"{seam}@{part['name']}.model"
        shown = _named(str(wanted[0]), second)
        yield DiffNode(name, "model", second["hash"], wanted, False, owner=owner, both=True, shown=shown)
        yield from _commit(name, second)


def _named(name: str, found: JsonObject) -> str:
    """Return the name of a model with its commit, if it has one, and the start of its hash."""
    at = f" at {found['commit']}" if "commit" in found else ""
    return f"{name}{at} ({found['hash'][:12]})"


def _commit(name: str, found: JsonObject) -> Iterator[DiffNode]:
    """Yield the node of the commit of a model or tokenizer from the hub, nothing for others."""
    if "commit" in found:
        value = [found["repository"], found["commit"]]
        yield DiffNode(f"commit of {name}", "model", value, counts=False, both=True, shown=" at ".join(value))


def _options(bill: JsonObject) -> Iterator[DiffNode]:
    """Yield the nodes of options, with minivllm's choice as the value of an option that was left open."""
    requested = bill["config"]["values"]
    used = bill["resolved"]
    seams = {part["seam"].partition(".")[0] for part in bill["parts"]}
    skipped = {*seams, *SEVERAL, *QUIET, *ABOUT_MODEL}
    for name, wanted in requested.items():
        if name in skipped:
            continue
        if name == "run_ahead" and name not in used:  # the executor chooses the value at its start
            continue
        value = used.get(name, wanted)
        left_open = wanted in (None, "auto")
        if name == "graph":
            wanted = [wanted, requested["enforce_eager"]]
        follows = FOLLOWS.get(name, ())
        yield DiffNode(name, "options", value, wanted, left_open, follows, both=name == "run_ahead")
    if "kv_blocks" in used:
        # the number of KV blocks is shown but not counted: unless the configuration sets it, it depends on the free
        # memory
        yield DiffNode(
            "kv_blocks", "options", used["kv_blocks"], requested["num_kvcache_blocks"], counts=False, both=True
        )


def _parts(bill: JsonObject) -> Iterator[DiffNode]:
    """Yield the nodes of minivllm itself, of functions replaced at run time, and of plug-ins with their options."""
    version = bill["minivllm"]["version"]
    source_hash = bill["minivllm"]["source"]["hash"]
    yield DiffNode("minivllm", "parts", [version, source_hash], shown=f"{version} ({source_hash[:12]})")
    for name, text in bill.get("replaced", {}).items():
        yield DiffNode(f"replaced.{name}", "parts", text, subject=name, shown=f"replaced by {text}")
    values = bill["config"]["values"]
    several: dict[str, list[str]] = {name: [] for name in SEVERAL}
    for part in bill["parts"]:
        seam, name = part["seam"], part["name"]
        family = seam.partition(".")[0]
        if family in several:
            several[family].append(name)
            yield from _implementation(part, f"{family}.{name}", "")
            continue
        prefer = list((values.get(seam) or {}).get("prefer") or ())
        wanted = [part["asked"], prefer]
        left_open = part["asked"] == "auto"
        follows = FOLLOWS.get(seam, ())
        yield DiffNode(seam, "parts", name, wanted, left_open, follows, shown=_described(part))
        yield from _implementation(part, seam, seam)
    for family, names in several.items():
        yield DiffNode(family, "parts", names, names, False, counts=family not in LOOK_ON)


def _implementation(part: JsonObject, subject: str, owner: str) -> Iterator[DiffNode]:
    """Yield nodes (comparable values) for the code and for the options of one plug-in.

    They are only compared if the other run has the same plug-in.  ``owner`` is the name of the node that names the
    chosen plug-in of this kind, "" for a kind with several plug-ins.
    """
    name = f"{subject}@{part['name']}"
    counts = subject.partition(".")[0] not in LOOK_ON
    # the version of this package is in the node ``minivllm``
    version = None if part["distribution"] == "minivllm" else part["version"]
    code = [version, part["source"]["hash"], part["needs"], part["requires"]]

    def node(name: str, value: Any, **fields: Any) -> DiffNode:
        return DiffNode(name, "parts", value, open=False, owner=owner, counts=counts, both=True, **fields)

    yield node(name, code, subject=subject, shown=_described(part))
    for key, value in part["options"].items():
        yield node(f"{name}.{key}", value, requested=value, subject=f"{subject}.options.{key}")


def _described(part: JsonObject) -> str:
    """Return the name and version of a plug-in, and the start of its hash or the reason why it has none."""
    version = "" if part["version"] == "-" else f" {part['version']}"
    source = part["source"]["hash"][:12] or part["source"].get("missing", "no source")
    return f"{part['name']}{version} ({source})"


def _requests(bill: JsonObject) -> Iterator[DiffNode]:
    """Yield the nodes of sampling parameters and prompts, from the requests of the run, or from the [run] table if
    there are no results yet."""
    config = bill["config"]
    results = bill.get("results") or {}
    run = config["run"]
    for name, value in config["sampling"].items():
        yield DiffNode(f"sampling.{name}", "requests", value, value, False)
    table = digest([run["prompts"], run["chat"]]) if run["prompts"] else None
    if not results:
        if table:
            shown = f"{len(run['prompts'])} prompts"
            yield DiffNode("prompts", "requests", table, table, False, both=True, shown=shown)
        return
    count = results.get("requests", len(run["prompts"]))
    sampling = tuple(f"sampling.{name}" for name in config["sampling"])
    for name, wanted, follows in (("prompts", table, FOLLOWS["prompts"]), ("sampling", None, sampling)):
        value = results[f"{name}_hash"]
        shown = f"{count} requests ({value[:12]})"
        yield DiffNode(name, "requests", value, wanted, follows=follows, both=True, shown=shown)


def _versions(bill: JsonObject) -> Iterator[DiffNode]:
    """Yield the nodes of library versions and of git commits."""
    for name, value in bill["versions"].items():
        yield DiffNode(f"versions.{name}", "versions", value, subject=name, counts=name in LIBRARIES)
    for where, state in bill["git"].items():
        if state is not None:
            text = state["commit"][:12]
            if state["dirty"]:
                text += f" with {state['changed_files']} changed files"
            commit = [state["commit"], state["dirty"]]
            yield DiffNode(f"git.{where}", "versions", commit, counts=False, both=True, shown=text)


def _machine(bill: JsonObject) -> Iterator[DiffNode]:
    """Yield the nodes of the machine, of torch's settings and of environment variables."""
    subject = "the machine"
    for name, value in bill["machine"].items():
        both = name == "native"  # the records of earlier versions and of GPUs have no native instruction set
        yield DiffNode(f"machine.{name}", "machine", value, subject=subject, counts=name in MACHINE, both=both)
    for name, value in bill.get("torch", {}).items():
        yield DiffNode(f"torch.{name}", "machine", value, both=True)
    for name, value in bill["environment"].items():
        yield DiffNode(f"environment.{name}", "machine", value, subject=subject, counts=name not in CHOOSING)
