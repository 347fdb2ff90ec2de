"""``minivllm plugins new NAME --seam SEAM``."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from minivllm.scaffold import files, write
from minivllm.spec import check_seam


def new(args: argparse.Namespace) -> int:
    """Write the package, and say what to do next."""
    folder = write(args.name, args.seam, args.dir)
    seam = check_seam(args.seam)
    assert seam is not None
    for path, _ in files(args.name, seam):
        print(folder / path)
    where = shlex.quote(str(folder if folder.is_absolute() else Path(".") / folder))
    print(
        f"\nA working {seam} plug-in.  Next:\n"
        f'  pip install -e "{where}[test]"\n'
        f"  python -m minivllm.testing {args.name}/{args.name} --seam {seam}\n"
        f"then change {folder / 'src' / args.name.replace('-', '_') / 'plugin.py'}, and test again."
    )
    return 0
