"""The commands ``minivllm config show`` and ``minivllm schema``.

Parsing them imports no large package.  Running them imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.cli.common import add_switch, load
from minivllm.errors import PluginError

if TYPE_CHECKING:
    from minivllm.config.show import ShownValue
    from minivllm.registry import Entry


def add_commands(command: Any, wiring: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add the commands ``config`` and ``schema``.

    ``command(name, ...)`` makes the parser of a command; ``wiring`` and ``common`` have flags for them.
    """
    group = command("config", "cli.config:show", "Show a configuration with its files, settings and defaults merged.")
    verbs = group.add_subparsers(metavar="VERB", required=True, parser_class=type(group))
    text = "Every option with its value, as TOML that can be read again or as JSON."
    sub = verbs.add_parser("show", help=text, description=text, parents=[common, wiring])
    sub.set_defaults(run="minivllm.cli.config:show")
    sub.add_argument("files", nargs="*", metavar="FILE", help="TOML, YAML or JSON, as with --config")
    add_switch(sub, "--origin", "show where each value came from, and the version of each plug-in")
    sub.add_argument("--format", choices=["toml", "json"], default="toml", help="default toml")
    text = "Write a JSON Schema of configuration files over the plug-ins that are installed, for editors."
    sub = command("schema", "cli.config:schema", text)
    sub.add_argument("-o", "--output", metavar="FILE", help="default standard output")


def show(args: argparse.Namespace) -> int:
    """Run ``minivllm config show``, which prints the configuration as TOML or JSON, with ``--origin`` also the source
    of each value; return its exit code."""
    from minivllm.config.show import leaves, to_json, to_toml

    loaded = load(args, args.files)
    plugin_of = plugin_finder(loaded.engine.allow_targets) if args.origin else None
    if args.format == "json":
        print(to_json(loaded, plugin_of))
        return 0
    comment = None
    if plugin_of is not None:

        def comment(leaf: ShownValue) -> str:
            return ", ".join(filter(None, (leaf.origin, plugin_text(plugin_of(leaf)))))

    for file in loaded.files:
        print(f"# {file}")
    sys.stdout.write(to_toml(leaves(loaded), comment))
    return 0


def plugin_finder(allow_targets: list[str]) -> Callable[[ShownValue], Entry | str | None]:
    """Return a function that finds the registry entry of the plug-in that a configuration value names.

    It returns None for ``auto`` and for values that are not plug-in names, and the reason as a text if the plug-in
    cannot be found.
    """
    from minivllm.registration.spec import KINDS, OPTION_OF
    from minivllm.registry import Catalog

    catalog = Catalog.discover().allow(allow_targets)
    kinds = {OPTION_OF.get(kind, kind): kind for kind in KINDS}

    def plugin_of(leaf: ShownValue) -> Entry | str | None:
        option = leaf.path[0]
        if option not in kinds or leaf.path[-1] != "name" or len(leaf.path) > 3 or leaf.value == "auto":
            return None
        try:
            return catalog[kinds[option]].find(leaf.value)
        except PluginError as exc:
            return str(exc).partition("\n")[0].rstrip(".")

    return plugin_of


def plugin_text(plugin: Entry | str | None) -> str:
    """Return the package and version of a plug-in, the reason why it was not found, or "" for no plug-in."""
    if plugin is None:
        return ""
    return plugin if isinstance(plugin, str) else f"{plugin.dist} {plugin.version}"


def schema(args: argparse.Namespace) -> int:
    """Run ``minivllm schema`` and return its exit code.  ConfigError if the output file cannot be written."""
    from minivllm.config.schema import config_schema
    from minivllm.registry import Catalog

    text = json.dumps(config_schema(Catalog.discover()), indent=2) + "\n"
    if args.output is None:
        sys.stdout.write(text)
        return 0
    files.check_output(args.output)
    files.write_text(args.output, text)
    path = os.path.join(".", args.output)  # ``join`` keeps an absolute path unchanged
    print(f"written; the first line of a TOML file beside it names it: #:schema {path}", file=sys.stderr)
    return 0
