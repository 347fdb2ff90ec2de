"""The commands about plug-ins: ``minivllm plugins ...`` and ``minivllm explain``.  Parsing them imports nothing heavy.

A verb of ``plugins`` is a parser and a function that takes the parsed arguments and returns the exit code; the function
may be in any module, which is imported when the verb is used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.cli.common import load
from minivllm.errors import PluginError, shown, suggest

if TYPE_CHECKING:
    from minivllm.registration.discovery import Entry
    from minivllm.registry import Catalog, Registry

VERBS = {
    "list": "List the plug-ins that are installed, from metadata; `minivllm plugins` alone does this too.",
    "show": "Print what a plug-in says about itself: limits, features, options.",
    "check": "Import plug-ins, each in a process of its own, and print faults and milliseconds.",
    "new": "Write a package that is a plug-in of a seam already: it works, and passes the conformance kit.",
}


def with_verb(argv: Sequence[str]) -> list[str]:
    """``plugins``, ``plugins SEAM`` and ``plugins --flag`` are short for ``plugins list ...``."""
    words = list(argv)
    plain = [i for i, word in enumerate(words) if not word.startswith("-")]
    if plain and words[plain[0]] == "plugins" and not {"-h", "--help"} & set(words[: plain[0] + 2]):
        verb = words[plain[1]] if len(plain) > 1 else ""
        if verb not in VERBS:
            words.insert(plain[0] + 1, "list")
    return words


def add_commands(command: Any, wiring: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add ``plugins`` and ``explain``.  ``command`` is that of ``minivllm.cli``."""
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
    sub.add_argument("seam", nargs="?", help="only those of this seam")
    sub.add_argument("--specs", action="store_true", help="import the specs of other packages too, for their summaries")
    sub.add_argument("--json", action="store_true", help="the same as JSON")
    sub = verb("show", "cli.plugins:show")
    sub.add_argument("name", help="name or package/name")
    sub.add_argument("--seam", help="if the name is one of several seams")
    sub = verb("check", "cli.plugins:check")
    sub.add_argument("names", nargs="*", metavar="name", help="name or package/name; default: all of other packages")
    sub.add_argument("--builtins", action="store_true", help="minivllm's own too")
    sub.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each (default 60)")
    sub.add_argument("--json", action="store_true", help="the reports as JSON")
    sub = verb("new", "testing.scaffold.command:new")
    sub.add_argument("name", help="of the package and of the plug-in, such as my-attn")
    sub.add_argument("--seam", required=True, help="of which seam it is: " + ", ".join(KINDS))
    sub.add_argument("--dir", default=".", metavar="DIR", help="where to write its folder (default: here)")

    sub = command(
        "explain", "cli.plugins:explain", "Say what would be wired, and why, without loading a model.", wiring
    )
    sub.add_argument("seam", nargs="?", help="only this seam")
    sub.add_argument("--all", action="store_true", help="look at every installed plug-in")
    sub.add_argument("--json", action="store_true", help="the same as JSON")


def listing(args: argparse.Namespace) -> int:
    """What is installed.  Imports the specs of the built-ins and, only if asked to, those of others; what is broken is
    a line, not an end."""
    from minivllm.registration.spec import check_seam
    from minivllm.registry import Catalog

    kind = check_seam(args.seam)
    catalog = Catalog.discover()
    rows = [("seam", "name", "dist", "version", "summary")]
    for seam, registry in catalog.items():
        for entry in registry.entries if kind in (None, seam) else ():
            rows.append((seam, entry.name, entry.dist, entry.version, summary(registry, entry, args.specs)))
    if kind is None:
        rows += [(e.kind, e.name, e.dist, e.version, "reserved: not used by this version") for e in catalog.reserved]
    if args.json:
        found = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
        print(json.dumps({"plugins": found, "faults": [str(fault) for fault in catalog.faults]}, indent=1))
        return 0
    print(table(rows))
    for fault in catalog.faults:
        print(f"not used: {fault}")
    return 0


def summary(registry: Registry, entry: Entry, ask: bool) -> str:
    """PluginError for a broken spec only under MINIVLLM_STRICT_PLUGINS=1."""
    if entry.blocked:
        return "blocked by MINIVLLM_PLUGINS"
    if not (entry.builtin or ask):
        return f"(not imported: {entry.target})"
    try:
        return registry.spec(entry).summary
    except PluginError as exc:
        if registry.strict:
            raise
        return f"broken: {exc}".partition("\n")[0]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the last as it comes."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(text.ljust(w) for text, w in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip()
        for row in rows
    )


def named(catalog: Catalog, name: str, seam: str | None = None) -> list[Entry]:
    """The entries that a user means, of any seam.  PluginError if there is none, or several packages offer it bare."""
    from minivllm.registration.spec import check_seam

    kind = check_seam(seam)
    seams = [r for k, r in catalog.items() if kind in (None, k) and any(name in (e.name, e.label) for e in r.entries)]
    if not seams:
        known = {e.label for r in catalog.values() for e in r.entries if kind in (None, e.kind)}
        if name in catalog:
            raise PluginError(f"{shown(name)} is a seam; `minivllm plugins {name}` lists its plug-ins.")
        near = suggest(name, known | {label.partition("/")[2] for label in known})
        raise PluginError(f"No plug-in is called {shown(name)}.{near} `minivllm plugins` lists them.")
    return [registry.find(name) for registry in seams]


def show(args: argparse.Namespace) -> int:
    """The spec as it is; imports it, and the model of its options."""
    from minivllm.registration.spec import ANY, describe, version
    from minivllm.registry import Catalog

    catalog = Catalog.discover()
    for i, entry in enumerate(named(catalog, args.name, args.seam)):
        registry = catalog[entry.kind]
        spec = registry.spec(entry)
        lines = [("", f"{entry}"), ("summary", spec.summary), ("contract", version(spec.api)), ("class", spec.impl)]
        limits = {"any": ANY} if spec.limits == ANY else spec.limits
        lines += [("limits", f"{fact}: {describe(limit)}") for fact, limit in limits.items()]
        lines += [("features", name) for name in sorted(spec.features)]
        lines += [
            ("needs", f"{n.module} {n.version}".strip() + f"  ({n.install})" * bool(n.install)) for n in spec.needs
        ]
        lines += [("prefers", f"{fact}={value}") for fact, value in spec.prefer.items()]
        lines += [("declares", f"{name}={value}") for name, value in spec.traits.items()]
        lines += [("requests", f"{p.name}: {p}: {p.summary}") for p in spec.params]
        if spec.options:
            fields = registry.options_model(entry, spec).model_fields
            lines += [
                ("options", f"{name} = {f.get_default(call_default_factory=True)!r}: {f.description}")
                for name, f in fields.items()
            ]
        print("\n" * bool(i) + "\n".join(f"{what:9} {text}" if what else text for what, text in lines))
    return 0


def check(args: argparse.Namespace) -> int:
    """Exit code 4 if a plug-in has a fault, or one that was named cannot be imported here."""
    from minivllm.registry import Catalog

    from .plugin_check import check as check_all

    catalog = Catalog.discover()
    names = args.names
    entries = [entry for name in names for entry in named(catalog, name)]
    installed = [entry for registry in catalog.values() for entry in registry.entries if not entry.blocked]
    entries += [e for e in installed if (args.builtins if e.builtin else not names)]
    faults = [] if names else catalog.faults
    reports = []
    if not args.json:
        print(f"{'result':8} {'spec ms':>8} {'impl ms':>8}  plug-in")
    for report in check_all(entries, args.timeout):
        reports.append(report)
        if not args.json:
            spec, impl = ("-" if ms is None else f"{ms:.1f}" for ms in (report.spec_ms, report.impl_ms))
            heavy = "".join(f", {name} {ms:.0f} ms" for name, ms in report.heavy_ms.items())
            print(f"{report.word:8} {spec:>8} {impl:>8}  {report.entry.kind} {report.entry.label}{heavy}", flush=True)
            for text in (*report.faults, *report.missing, *report.outdated):
                print(f"{'':28}{text}")
    bad = [r for r in reports if r.faults or (names and r.missing)]
    if args.json:
        print(json.dumps({"reports": [r.as_dict() for r in reports], "faults": [str(f) for f in faults]}, indent=1))
    else:
        for fault in faults:
            print(f"{'FAULTY':28}{fault}")
        if not entries:
            print("no plug-ins of other packages are installed; --builtins checks minivllm's own")
        if fine := [r.entry.label for r in reports if r.word == "ok" and not r.entry.builtin]:
            print(f"{'':28}whether they do what they claim: python -m minivllm.testing {' '.join(fine)}")
    return PluginError.exit_code if bad or faults else 0


def explain(args: argparse.Namespace) -> int:
    """What would be wired, and why.  Where a choice fails, the choices before it and the reasons are shown."""
    from minivllm.device.hardware import prepare_environment
    from minivllm.frontend.explaining import explain_loaded
    from minivllm.registration.spec import check_seam

    prepare_environment()
    weights = check_seam(args.seam) == "quantizer"
    loaded = load(args)
    with contextlib.redirect_stdout(sys.stderr):  # what plug-ins print when they are imported is no part of the answer
        found = explain_loaded(loaded, weights=weights)
        answer = found.as_dict(args.seam, args.all) if args.json else found.text(args.seam, args.all)
    if found.error is not None and all(s.chosen is not None for s in found.of(args.seam)):
        raise found.error  # of another seam than the one that was asked for
    print(json.dumps(answer, indent=1) if args.json else answer)
    return found.error.exit_code if found.error is not None else 0
