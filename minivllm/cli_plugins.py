"""The commands about plug-ins: ``minivllm plugins ...`` and ``minivllm explain``.  Parsing them imports nothing heavy.

A verb of ``plugins`` is a parser and a function that takes the parsed arguments and returns the exit code; the function
may be in any module, which is imported when the verb is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from minivllm.errors import PluginError

VERBS = {
    "list": "The plug-ins that are installed; `minivllm plugins` alone does this too.",
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
    group = command("plugins", "cli_plugins:listing", "What is installed: list it. `minivllm plugins SEAM` is short.")
    verbs = group.add_subparsers(metavar="VERB", required=True, parser_class=type(group))

    def verb(name: str, run: str) -> argparse.ArgumentParser:
        text = VERBS[name]
        sub = verbs.add_parser(name, help=text, description=text, parents=[common])
        sub.set_defaults(run=f"minivllm.{run}")
        return sub

    sub = verb("list", "cli_plugins:listing")
    sub.add_argument("seam", nargs="?", help="only those of this seam")
    # the next verb goes here: verb("new", "its_module:its_function")

    sub = command(
        "explain", "cli_plugins:explain", "Say what would be wired, and why, without loading a model.", wiring
    )
    sub.add_argument("seam", nargs="?", help="only this seam")
    sub.add_argument("--all", action="store_true", help="look at every installed plug-in")


def listing(args: argparse.Namespace) -> int:
    """What is installed.  Imports specs, no implementations; a broken spec is a line, not an end."""
    from minivllm.registry import Catalog
    from minivllm.spec import check_seam

    kind = check_seam(args.seam)
    catalog = Catalog.discover()
    rows = [("seam", "name", "dist", "version", "summary")]
    for seam, registry in catalog.items():
        for entry in registry.entries if kind in (None, seam) else ():
            try:
                summary = "blocked by MINIVLLM_PLUGINS" if entry.blocked else registry.spec(entry).summary
            except PluginError as exc:
                summary = f"broken: {exc}".partition("\n")[0]
            rows.append((seam, entry.name, entry.dist, entry.version, summary))
    if kind is None:
        rows += [(e.kind, e.name, e.dist, e.version, "reserved: not used by this version") for e in catalog.reserved]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join([*(text.ljust(w) for text, w in zip(row[:4], widths, strict=True)), row[4]]).rstrip())
    return 0


def explain(args: argparse.Namespace) -> int:
    """What would be wired, and why.  Where a choice fails, the choices before it and the reasons are shown."""
    from minivllm.cli_commands import load
    from minivllm.hardware import prepare_environment
    from minivllm.registry import Catalog
    from minivllm.spec import check_seam

    prepare_environment()
    from minivllm.wiring import explain as explain_choices
    from minivllm.wiring import resolve

    kind = check_seam(args.seam)
    loaded = load(args)
    catalog = Catalog.discover().allow(loaded.engine.allow_targets)
    try:
        print(resolve(loaded.engine, catalog, loaded.origins).explain(kind, args.all))
        return 0
    except PluginError as exc:
        if getattr(exc, "selection", None) is None:
            raise
        print(explain_choices(exc.selections, exc.notes, catalog, kind, args.all))  # type: ignore[attr-defined]
        return exc.exit_code
