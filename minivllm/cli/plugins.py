"""The commands about plug-ins: ``minivllm plugins ...`` and ``minivllm explain``.

Parsing them imports no large package.  A verb of ``plugins``, such as ``list``, is a parser and a function that takes
the parsed arguments and returns the exit code.  The module of the function is imported when the verb is used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.cli.common import add_switch, add_value, load
from minivllm.errors import PluginError, shown, suggest

if TYPE_CHECKING:
    from minivllm.cli.plugin_check import Report
    from minivllm.registration.discovery import Entry
    from minivllm.registry import Catalog, Registry
    from minivllm.runtime.text.tokenizer import Tokenizer

VERBS = {
    "list": "List the plug-ins that are installed, from metadata; `minivllm plugins` alone does this too.",
    "show": "Print the spec of a plug-in: limits, features, options.",
    "check": "Import plug-ins, each in a process of its own, and print faults and milliseconds.",
    "new": "Write a package with a plug-in that works and passes the conformance kit.",
}


def with_verb(argv: Sequence[str]) -> list[str]:
    """Return the command line with the omitted verb: ``plugins SEAM`` is short for ``plugins list SEAM``.

    The same holds for ``plugins`` alone and for ``plugins --flag``.
    """
    words = list(argv)
    plain = [i for i, word in enumerate(words) if not word.startswith("-")]
    if not plain or words[plain[0]] != "plugins":
        return words
    command = plain[0]
    verb = words[plain[1]] if len(plain) > 1 else ""
    wants_help = {"-h", "--help"} & set(words[: command + 2])
    if verb not in VERBS and not wants_help:
        words.insert(command + 1, "list")
    return words


def add_commands(command: Any, wiring: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add the commands ``plugins`` and ``explain``.

    ``command(name, ...)`` makes the parser of a command.  ``wiring`` and ``common`` are parent parsers: the flags of
    the configuration, and ``--debug``.
    """
    from minivllm.registration.spec import KINDS

    text = "List, show and check the plug-ins that are installed; `plugins [SEAM]` is short for `plugins list [SEAM]`."
    group = command("plugins", "cli.plugins:listing", text)
    verbs = group.add_subparsers(metavar="VERB", required=True, parser_class=type(group))

    def verb(name: str, run: str) -> argparse.ArgumentParser:
        text = VERBS[name]
        sub = verbs.add_parser(name, help=text, description=text, parents=[common])
        sub.set_defaults(run=f"minivllm.{run}")
        return sub

    sub = verb("list", "cli.plugins:listing")
    sub.add_argument("seam", nargs="?", help="list only the plug-ins of this seam")
    add_switch(sub, "--specs", "import the specs of other packages too, for their summaries")
    add_switch(sub, "--json", "print JSON")
    sub = verb("show", "cli.plugins:show")
    sub.add_argument("name", help="name or package/name")
    sub.add_argument("--seam", help="the seam, if several seams have a plug-in of this name")
    sub = verb("check", "cli.plugins:check")
    text = "name or package/name; default: all plug-ins of other packages"
    sub.add_argument("names", nargs="*", metavar="name", help=text)
    add_switch(sub, "--builtins", "check minivllm's own plug-ins too")
    text = "limit for each plug-in (default 60)"
    add_value(sub, "--timeout", float, "SECONDS", text, 60.0)
    add_switch(sub, "--json", "print the reports as JSON")
    sub = verb("new", "testing.scaffold.command:new")
    sub.add_argument("name", help="name of the package and of the plug-in, such as my-attn")
    sub.add_argument("--seam", required=True, help="seam of the plug-in: " + ", ".join(KINDS))
    text = "folder in which the package's folder is written (default: the current one)"
    add_value(sub, "--dir", str, "DIR", text, ".")
    text = "Print which plug-ins a configuration chooses, and why, without loading a model."
    sub = command("explain", "cli.plugins:explain", text, wiring)
    sub.add_argument("seam", nargs="?", help="explain only this seam")
    add_switch(sub, "--all", "include every installed plug-in")
    add_switch(sub, "--json", "print JSON")


def listing(args: argparse.Namespace) -> int:
    """Run ``minivllm plugins list`` and return its exit code.

    It imports the specs of the built-in plug-ins, and those of other packages only with ``--specs``.  A plug-in that
    is broken is a line of the list, not an error.
    """
    from minivllm.registration.spec import check_seam
    from minivllm.registry import Catalog

    wanted = check_seam(args.seam)
    catalog = Catalog.discover()
    rows = [("seam", "name", "dist", "version", "summary")]
    for seam, registry in catalog.items():
        if wanted not in (None, seam):
            continue
        for entry in registry.entries:
            rows.append((seam, entry.name, entry.dist, entry.version, summary(registry, entry, args.specs)))
    if wanted is None:
        for entry in catalog.reserved:
            rows.append((entry.kind, entry.name, entry.dist, entry.version, "reserved: not used by this version"))
    if args.json:
        plugins = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
        faults = [str(fault) for fault in catalog.faults]
        print(json.dumps({"plugins": plugins, "faults": faults}, indent=1))
        return 0
    print(table(rows))
    for fault in catalog.faults:
        print(f"not used: {fault}")
    return 0


def summary(registry: Registry, entry: Entry, import_spec: bool) -> str:
    """Return the summary of a plug-in's spec, or why there is none.

    ``import_spec`` allows the import of a spec that is not built in.  PluginError for a broken spec, but only under
    MINIVLLM_STRICT_PLUGINS=1.
    """
    if entry.blocked:
        return "blocked by MINIVLLM_PLUGINS"
    if not entry.builtin and not import_spec:
        return f"(--specs imports {entry.target})"
    try:
        return registry.spec(entry).summary
    except PluginError as exc:
        if registry.strict:
            raise
        return f"broken: {exc}".partition("\n")[0]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text with aligned columns.  The last column is not padded."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = []
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*padded, last]).rstrip())
    return "\n".join(lines)


def named(catalog: Catalog, name: str, seam: str | None = None) -> list[Entry]:
    """Return the registry entries with a name or package/name, at most one per seam (kind of plug-in).

    PluginError if there is none, or if several packages have the name in one seam.
    """
    from minivllm.registration.spec import check_seam

    wanted = check_seam(seam)
    registries = [registry for kind, registry in catalog.items() if wanted in (None, kind)]
    matching = [r for r in registries if any(name in (entry.name, entry.label) for entry in r.entries)]
    if matching:
        return [registry.find(name) for registry in matching]
    if name in catalog:
        raise PluginError(f"{shown(name)} is a kind of plug-in; `minivllm plugins {name}` lists the plug-ins.")
    labels = {entry.label for registry in registries for entry in registry.entries}
    names = {label.partition("/")[2] for label in labels}
    near = suggest(name, labels | names)
    raise PluginError(f"No plug-in is called {shown(name)}.{near} `minivllm plugins` lists them.")


def show(args: argparse.Namespace) -> int:
    """Run ``minivllm plugins show`` and return its exit code.

    It imports the spec of the plug-in and the model of its options.
    """
    from minivllm.registry import Catalog

    catalog = Catalog.discover()
    texts = []
    for entry in named(catalog, args.name, args.seam):
        lines = _spec_lines(catalog[entry.kind], entry)
        texts.append("\n".join(f"{head:9} {text}" if head else text for head, text in lines))
    print("\n\n".join(texts))
    return 0


def _spec_lines(registry: Registry, entry: Entry) -> list[tuple[str, str]]:
    """Return the printed lines of a plug-in's spec as (head, text)."""
    from minivllm.registration.spec import ANY, describe, version

    spec = registry.spec(entry)
    limits = {"any": ANY} if spec.limits == ANY else spec.limits
    lines = [("", f"{entry}"), ("summary", spec.summary), ("contract", version(spec.api)), ("class", spec.impl)]
    lines += [("limits", f"{fact}: {describe(limit)}") for fact, limit in limits.items()]
    lines += [("features", name) for name in sorted(spec.features)]
    for need in spec.needs:
        text = f"{need.module} {need.version}".strip()
        if need.install:
            text += f"  ({need.install})"
        lines.append(("needs", text))
    lines += [("prefers", f"{fact}={value}") for fact, value in spec.prefer.items()]
    lines += [("declares", f"{name}={value}") for name, value in spec.traits.items()]
    lines += [("requests", f"{param.name}: {param}: {param.summary}") for param in spec.params]
    if spec.options:
        for name, option in registry.options_model(entry, spec).model_fields.items():
            default = option.get_default(call_default_factory=True)
            lines.append(("options", f"{name} = {default!r}: {option.description}"))
    return lines


def check(args: argparse.Namespace) -> int:
    """Run ``minivllm plugins check`` and return its exit code.

    The code is 4 if a plug-in has a fault, or if one that the user named cannot be imported on this machine.
    """
    from minivllm.registry import Catalog

    from .plugin_check import check as check_all

    catalog = Catalog.discover()
    names = args.names
    entries = [entry for name in names for entry in named(catalog, name)]
    for registry in catalog.values():
        for entry in registry.entries:
            selected = args.builtins if entry.builtin else not names
            if selected and not entry.blocked:
                entries.append(entry)
    faults = [] if names else catalog.faults
    reports = []
    if not args.json:
        print(f"{'result':8} {'spec ms':>8} {'impl ms':>8}  plug-in")
    for report in check_all(entries, args.timeout):
        reports.append(report)
        if not args.json:
            _print_report(report)
    if args.json:
        texts = [str(fault) for fault in faults]
        print(json.dumps({"reports": [report.as_dict() for report in reports], "faults": texts}, indent=1))
    else:
        _print_end(reports, faults)
    failed = any(report.faults or (names and report.missing) for report in reports)
    return PluginError.exit_code if failed or faults else 0


def _print_report(report: Report) -> None:
    """Print the line of a checked plug-in and a line for each problem."""
    times = ["-" if ms is None else f"{ms:.1f}" for ms in (report.spec_ms, report.impl_ms)]
    heavy = "".join(f", {name} {ms:.0f} ms" for name, ms in report.heavy_ms.items())
    plugin = f"{report.entry.kind} {report.entry.label}{heavy}"
    print(f"{report.word:8} {times[0]:>8} {times[1]:>8}  {plugin}", flush=True)
    for text in (*report.faults, *report.missing, *report.outdated):
        print(f"{'':28}{text}")


def _print_end(reports: Sequence[Report], faults: Sequence[Any]) -> None:
    """Print the faults of packages, and, for external plug-ins without faults, the command that tests them further."""
    for fault in faults:
        print(f"{'FAULTY':28}{fault}")
    if not reports:
        print("no plug-ins of other packages are installed; --builtins checks minivllm's own")
    fine = [report.entry.label for report in reports if report.word == "ok" and not report.entry.builtin]
    if fine:
        print(f"{'':28}whether they do what they claim: python -m minivllm.testing {' '.join(fine)}")


def explain(args: argparse.Namespace) -> int:
    """Run ``minivllm explain`` and return its exit code.

    If the choice of a plug-in of some kind fails, the choices before it and the reasons are printed.
    """
    from minivllm.device.hardware import prepare_environment
    from minivllm.frontend.explaining import explain_loaded
    from minivllm.registration.spec import check_seam
    from minivllm.server.openai.parsers import choose

    prepare_environment()
    seam = check_seam(args.seam)
    weights = seam == "quantizer"
    loaded = load(args)

    def parser(tokenizer: Tokenizer) -> str:
        chosen = choose(loaded.server, tokenizer, loaded.engine.allow_targets)
        return f"{chosen.name}: {chosen.reason}"

    with contextlib.redirect_stdout(sys.stderr):  # keeps text that imported plug-ins print out of the result
        found = explain_loaded(loaded, weights=weights, parser=None if seam not in (None, "parser") else parser)
        answer = found.as_dict(args.seam, args.all) if args.json else found.text(args.seam, args.all)
    if found.error is not None and all(seam.chosen is not None for seam in found.of(args.seam)):
        raise found.error  # the error is about another kind of plug-in than the one that the user named
    print(json.dumps(answer, indent=1) if args.json else answer)
    return found.error.exit_code if found.error is not None else 0
