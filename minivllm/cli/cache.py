"""``minivllm cache``: list and verify the files of the KV cache on a disk, export and import prefixes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError, brief

VERBS = ("ls", "verify", "export", "import")
DEFAULT = "~/.cache/minivllm/kv"


def add_commands(command: Any) -> None:
    """Add the command ``cache``; ``command(name, ...)`` makes its parser."""
    text = "List and verify the files of the store disk, and move saved prefixes to another machine."
    sub = command("cache", "cli.cache:cache", text)
    sub.add_argument("verb", choices=VERBS, help="export NAME FILE, import FILE")
    sub.add_argument("arguments", nargs="*", metavar="NAME FILE")
    sub.add_argument("--path", default=DEFAULT, help=f"the store's option path; default {DEFAULT}")


def cache(args: argparse.Namespace) -> int:
    """Run ``minivllm cache`` and return its exit code: 1 if ``verify`` finds damage.  ConfigError if the number of
    arguments is wrong."""
    from minivllm.plugins.kvstore import archive

    root, given = files.expanded(args.path), args.arguments
    wanted = {"export": 2, "import": 1}.get(args.verb, 0)
    if len(given) != wanted:
        usage = {"export": "NAME FILE", "import": "FILE"}.get(args.verb, "no argument")
        raise ConfigError(f"cache {args.verb}: expected {usage}; --path names the folder of the cache")
    if args.verb == "export":
        pages = archive.export(root, given[0], Path(given[1]))
        print(f"{pages} pages in {given[1]}")
        return 0
    if args.verb == "import":
        pages = archive.import_from(root, Path(given[0]))
        print(f"{pages} pages added to {root}")
        return 0
    verify = args.verb == "verify"
    models = archive.models(root, verify)
    for one in models:
        print(_line(one, verify))
        for name in one.names:
            print(f"  prefix {brief(name)}")
    if not models:
        print(f"{root}: no files")
    return int(verify and any(one.damaged or one.unusable for one in models))


def _line(one: Any, verify: bool) -> str:
    """Return the line about the cache files of a model; with ``verify`` it has the number of damaged pages."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.changed))
    text = f"{one.folder.name[:12]}  {one.pages:,} pages  {one.bytes / 1e6:,.1f} MB in {one.files} files  {when}"
    if verify:
        text += f"  {one.damaged} pages damaged, {one.unusable} files with unusable ends or heads"
    return f"{text}  {one.about}"
