"""The command ``minivllm plugins new NAME --seam SEAM``."""

from __future__ import annotations

import argparse
import shlex

from minivllm.registration.spec import check_seam
from minivllm.testing.scaffold import files, write


def new(args: argparse.Namespace) -> int:
    """Write a new package, and print its files and the next commands."""
    folder = write(args.name, args.seam, args.dir)
    seam = check_seam(args.seam)
    assert seam is not None
    for path, _ in files(args.name, seam):
        print(folder / path)
    # written as a path, so that pip does not take it for the name of a package on PyPI
    if folder.is_absolute():
        where = folder.as_posix()
    else:
        where = f"./{folder.as_posix()}"
    print(
        f"\nA working {seam} plug-in.  Next:\n"
        f"  pip install -e {shlex.quote(where + '[test]')}\n"
        f"  python -m minivllm.testing {args.name}/{args.name} --seam {seam}\n"
        f"  pytest {shlex.quote(where)}    # the kit, and the tests in {folder / 'tests'}\n"
        f"then change {folder / 'src' / args.name.replace('-', '_') / 'plugin.py'}, and test again."
    )
    return 0
