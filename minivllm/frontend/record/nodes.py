"""A bill as the things that can differ, each with what was asked for and what it follows from.

The fold of the wiring gives the order: device, dtype, model, quantizer, KV format, attention, block size ...  A value
that was left open (``asked`` is the same in both bills) and that differs is a consequence if something that it follows
from differs, and a difference of its own if not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .sources import digest
from .values import settled

GROUPS = ("model", "parts", "options", "requests", "versions", "machine")
IDENTITY = ("model", "parts", "options", "requests")  # the groups that the fingerprint covers
# decide nothing, or are part of another option
QUIET = ("config_version", "requires", "enforce_eager", "download_dir", "energy")
ABOUT_MODEL = ("model", "revision", "tokenizer", "tokenizer_revision", "skip_tokenizer_init")  # nodes of their own
LIBRARIES = ("torch", "cuda", "triton", "transformers", "tokenizers")  # those whose version can change a token
CHOOSING = ("MINIVLLM_PLUGINS", "MINIVLLM_STRICT_PLUGINS",  # what they bring about is seen in the parts
            "MINIVLLM_NATIVE", "MINIVLLM_ISA")  # and in the machine  # fmt: skip
MACHINE = ("cpu", "native", "cores", "threads", "gpu", "compute_capability", "driver")  # and what of the machine can
FOLLOWS: Mapping[str, tuple[str, ...]] = {  # what decides a value that the user left open
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
    "prompts": ("tokenizer",),  # a chat template is the tokenizer's
}
SEVERAL = ("processors", "strategies", "hooks")
LOOK_ON = ("hooks",)  # they see frozen views and decide nothing; what they say a model's name means is seen in its hash


@dataclass(frozen=True)
class DiffNode:
    """``value`` is what is compared; ``open`` says that the user left the choice to minivllm.  ``owner`` is the node
    that must be the same for this one to be compared (the options of another plug-in are no difference of their own),
    ``subject`` what the verdict calls it, ``counts`` whether it can decide the outcome, ``both`` that it is compared
    only if both bills have it."""

    name: str
    group: str
    value: Any
    asked: Any = None
    open: bool = True
    follows: tuple[str, ...] = ()
    owner: str = ""
    subject: str = ""
    counts: bool = True
    both: bool = False
    shown: str = ""

    @property
    def label(self) -> str:
        return self.subject or self.name

    @property
    def text(self) -> str:
        return self.shown or show(self.value)


def show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(show, value)) or "none"
    return str(value)


def nodes(bill: Mapping[str, Any]) -> dict[str, DiffNode]:
    """Everything that can differ, by name, in the order in which it is shown."""
    made = [*_model(bill), *_parts(bill), *_options(bill), *_requests(bill), *_versions(bill), *_machine(bill)]
    return {node.name: node for node in made}


def fingerprint(bill: Mapping[str, Any]) -> str:
    """SHA-256 over what decides the run: the groups of ``IDENTITY``, and the values that parts read."""
    covered: dict[str, Any] = {n.name: n.value for n in nodes(bill).values() if n.counts and n.group in IDENTITY}
    for part in bill["parts"]:
        if part["seam"].partition(".")[0] not in LOOK_ON and (read := settled(part)):
            covered[f"values of {part['seam']}"] = read
    return digest(covered)


def _model(bill: Mapping[str, Any]) -> Iterator[DiffNode]:
    """A model is its files; the commit of one from the hub, which may change without them, says where they are."""
    model, asked = bill["model"], bill["config"]["values"]
    given = [asked["model"], asked.get("revision")]
    yield DiffNode("model", "model", model["hash"], given, False, shown=_of_model(model["name"], model))
    yield from _commit("model", model)
    tokenizer = model["tokenizer"]
    value = tokenizer["hash"] if tokenizer else None
    shown = _of_model(asked["tokenizer"] or "the model's", tokenizer) if tokenizer else "none"
    own = asked["tokenizer"] is None and asked.get("tokenizer_revision") is None
    given = [asked["tokenizer"], asked.get("tokenizer_revision"), asked["skip_tokenizer_init"]]
    yield DiffNode("tokenizer", "model", value, given, own, FOLLOWS["tokenizer"], shown=shown)
    yield from _commit("tokenizer", tokenizer or {})
    for of, beside in model.get("beside", {}).items():
        part = next(p for p in bill["parts"] if p["seam"] == of)
        option = f"{of}@{part['name']}.model"
        given = [part["options"].get("model"), part["options"].get("revision")]
        shown, name = _of_model(str(given[0]), beside), f"model of {of}"
        yield DiffNode(name, "model", beside["hash"], given, False, owner=option, both=True, shown=shown)
        yield from _commit(name, beside)


def _of_model(name: str, found: Mapping[str, Any]) -> str:
    at = f" at {found['commit']}" if "commit" in found else ""
    return f"{name}{at} ({found['hash'][:12]})"


def _commit(of: str, found: Mapping[str, Any]) -> Iterator[DiffNode]:
    if "commit" in found:
        value = [found["repository"], found["commit"]]
        yield DiffNode(f"commit of {of}", "model", value, counts=False, both=True, shown=" at ".join(value))


def _options(bill: Mapping[str, Any]) -> Iterator[DiffNode]:
    """Options as they were used: a value that was left open is the one that was supplied."""
    asked, used = bill["config"]["values"], bill["resolved"]
    seams = {part["seam"].partition(".")[0] for part in bill["parts"]}
    for name, want in asked.items():
        if name in (*seams, *SEVERAL, *QUIET, *ABOUT_MODEL):
            continue
        if name == "run_ahead" and name not in used:  # the executor has not started: its choice is not known
            continue
        value = used.get(name, want)
        given = [want, asked["enforce_eager"]] if name == "graph" else want
        left_open = want in (None, "auto")
        yield DiffNode(name, "options", value, given, left_open, FOLLOWS.get(name, ()), both=name == "run_ahead")
    if "kv_blocks" in used:
        # with -1 it is what memory was free at that moment: not a choice of anybody, so it is shown and not counted
        yield DiffNode("kv_blocks", "options", used["kv_blocks"], asked["num_kvcache_blocks"], counts=False, both=True)


def _parts(bill: Mapping[str, Any]) -> Iterator[DiffNode]:
    yield DiffNode(
        "minivllm",
        "parts",
        [bill["minivllm"]["version"], bill["minivllm"]["source"]["hash"]],
        shown=f"{bill['minivllm']['version']} ({bill['minivllm']['source']['hash'][:12]})",
    )
    for name, text in bill.get("replaced", {}).items():
        yield DiffNode(f"replaced.{name}", "parts", text, subject=name, shown=f"replaced by {text}")
    values = bill["config"]["values"]
    several: dict[str, list[str]] = {name: [] for name in SEVERAL}
    for part in bill["parts"]:
        seam, name = part["seam"], part["name"]
        family = seam.partition(".")[0]
        if family in several:
            several[family].append(name)
        else:
            prefer = list((values.get(seam) or {}).get("prefer") or ())
            yield DiffNode(
                seam,
                "parts",
                name,
                [part["asked"], prefer],
                part["asked"] == "auto",
                FOLLOWS.get(seam, ()),
                shown=_described(part),
            )
        yield from _implementation(part, seam if family not in several else f"{family}.{name}", family in several)
    for family, names in several.items():
        yield DiffNode(family, "parts", names, names, False, counts=family not in LOOK_ON)


def _implementation(part: Mapping[str, Any], subject: str, one_of_several: bool) -> Iterator[DiffNode]:
    """The code and the options of one plug-in; compared only with the same plug-in."""
    name, owner = part["name"], "" if one_of_several else part["seam"]
    at, counts = f"{subject}@{name}", subject.partition(".")[0] not in LOOK_ON
    builtin = part["distribution"] == "minivllm"  # whose version is minivllm's own
    version = None if builtin else part["version"]
    code = [version, part["source"]["hash"], part["needs"], part["requires"]]
    shown = _described(part)
    yield DiffNode(at, "parts", code, open=False, owner=owner, subject=subject, counts=counts, both=True, shown=shown)
    for key, value in part["options"].items():
        option = f"{subject}.options.{key}"
        yield DiffNode(
            f"{at}.{key}", "parts", value, value, False, owner=owner, subject=option, counts=counts, both=True
        )


def _described(part: Mapping[str, Any]) -> str:
    version = "" if part["version"] == "-" else f" {part['version']}"
    source = part["source"]["hash"][:12] or part["source"].get("missing", "no source")
    return f"{part['name']}{version} ({source})"


def _requests(bill: Mapping[str, Any]) -> Iterator[DiffNode]:
    config, results = bill["config"], bill.get("results") or {}
    run = config["run"]
    for name, value in config["sampling"].items():
        yield DiffNode(f"sampling.{name}", "requests", value, value, False)
    table = [run["prompts"], run["chat"]] if run["prompts"] else None
    count = results.get("requests", len(run["prompts"]))
    if results:
        asked = tuple(f"sampling.{name}" for name in config["sampling"])
        for name, follows in (("prompts", FOLLOWS["prompts"]), ("sampling", asked)):
            found, given = results[f"{name}_hash"], digest(table) if table and name == "prompts" else None
            shown = f"{count} requests ({found[:12]})"
            yield DiffNode(name, "requests", found, given, follows=follows, both=True, shown=shown)
    elif table:
        yield DiffNode("prompts", "requests", digest(table), digest(table), False, both=True, shown=f"{count} prompts")


def _versions(bill: Mapping[str, Any]) -> Iterator[DiffNode]:
    for name, value in bill["versions"].items():
        yield DiffNode(f"versions.{name}", "versions", value, subject=name, counts=name in LIBRARIES)
    for where, state in bill["git"].items():
        if state is not None:
            text = state["commit"][:12] + (f" with {state['changed_files']} changed files" if state["dirty"] else "")
            commit = [state["commit"], state["dirty"]]
            yield DiffNode(f"git.{where}", "versions", commit, counts=False, both=True, shown=text)


def _machine(bill: Mapping[str, Any]) -> Iterator[DiffNode]:
    for name, value in bill["machine"].items():
        both = name == "native"  # records of earlier versions do not have it, nor those of a GPU
        yield DiffNode(f"machine.{name}", "machine", value, subject="the machine", counts=name in MACHINE, both=both)
    for name, value in bill.get("torch", {}).items():
        yield DiffNode(f"torch.{name}", "machine", value, both=True)
    for name, value in bill["environment"].items():
        yield DiffNode(f"environment.{name}", "machine", value, subject="the machine", counts=name not in CHOOSING)
