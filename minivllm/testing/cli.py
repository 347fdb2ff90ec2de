"""The kit's command line: which plug-ins, what each test said, a report as JSON.

Exit status: 0 if every plug-in conforms, 1 if a test failed, 2 if the command cannot be carried out, 3 if no test
failed and too little could be tested to say so.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.errors import ConfigError, MinivllmError, PluginError
from minivllm.registration.spec import KINDS, version

from . import WANTED
from .verdict import advice, exit_status, summary, verdict

if TYPE_CHECKING:
    from .session import Outcome

EPILOG = """
A known-failures file has one test a line, then the reason: "test_sinks  not written yet, issue 12".  It is strict: a
test on it that passes is an error.  In a test file of your own:

    from minivllm.testing import AttentionConformance

    class TestFlash(AttentionConformance):
        plugin = "acme/flash"

Only there can hooks be overridden, such as params() of a plug-in with parameters of its own, without which little of it
is tested: "hardly tested" or "own parameters not tested" is not "conforms", and the exit status is 3.  The page of
the seam (docs/plugins/) names them all.  A suite takes 1 to 20 seconds on an idle CPU, with --profile long
up to 4 minutes; on a busy one a sampler's takes minutes (OMP_NUM_THREADS=1 may help).  On a GPU kernels are compiled
for each size, the work of a core: say --processes 16 where there are 16.  -v shows each test, as it ends if there is
one process.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m minivllm.testing",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Test plug-ins against the contract of their seam, over all that their specs claim.",
    )
    p.add_argument("plugin", nargs="*", help="name, dist/name or module:Class")
    p.add_argument("--seam", choices=sorted(KINDS), help="needed if the name is there in several seams")
    p.add_argument("--builtins", action="store_true", help="test every plug-in of this package")
    p.add_argument("--device", default="", help="cpu or cuda; default: the first claimed one that is here")
    p.add_argument("--profile", choices=("fast", "long"), default="fast", help="long draws 12 times as many examples")
    p.add_argument("--seed", type=int, help="draw other examples than always the same")
    p.add_argument("--processes", type=int, default=1, metavar="N", help="share the tests among N processes")
    p.add_argument("-k", dest="select", default="", metavar="EXPR", help="only tests whose names match (as in pytest)")
    p.add_argument("--known-failures", metavar="FILE", help="tests that are expected to fail, with a reason each")
    p.add_argument("--json", metavar="FILE", help="write every outcome to a file")
    p.add_argument("-v", "--verbose", action="store_true", help="show what passed and was skipped too")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    sys.path.insert(0, "")  # a module beside the caller can be named, as with `python -m pytest`
    try:
        plugins = _plugins(args)
        known = _known(args.known_failures)
        if args.json:
            files.check_output(args.json)
        # after the arguments: --help and a wrong name need no pytest
        from minivllm.testing import run
    except (MinivllmError, ImportError, OSError) as exc:
        missing = isinstance(exc, ImportError) and exc.name in ("pytest", "hypothesis")
        print(f"minivllm.testing: error: {WANTED if missing else exc}", file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    verdicts: dict[tuple[str, str], str] = {}
    start = time.perf_counter()
    try:
        for _, done in _done(plugins, args, known, run):
            outcomes += done
            if done:
                print(f"  {_count(done)} in {time.perf_counter() - start:.1f} s")
                found = verdicts[done[0].seam, done[0].plugin] = verdict(done, bool(args.select))
                if advised := advice(found):
                    print(f"  {advised}")
            print(flush=True)
            start = time.perf_counter()
    except MinivllmError as exc:
        print(f"minivllm.testing: error: {exc}", file=sys.stderr)
        return 2
    if args.json:
        _write(args, outcomes, verdicts)
    if not outcomes:
        print(f"minivllm.testing: error: no test matches -k {args.select!r}", file=sys.stderr)
        return 2
    print("\n".join(summary(verdicts)))
    return exit_status(verdicts, args.builtins)


def _done(
    plugins: Sequence[tuple[str, str]],
    args: argparse.Namespace,
    known: dict[str, str],
    run: Callable[..., list[Outcome]],
) -> Iterator[tuple[tuple[str, str], list[Outcome]]]:
    """Each plug-in with the outcomes of its suite, which have been told; its headline stands before them."""
    how: dict[str, Any] = dict(
        device=args.device, profile=args.profile, seed=args.seed, select=args.select, known=known
    )
    if args.processes > 1:
        from .parallel import run_parallel

        for (seam, plugin), outcomes in run_parallel(plugins, args.processes, **how):
            print(_headline(seam, plugin, args), flush=True)
            for o in outcomes:
                _tell(o, args.verbose)
            yield (seam, plugin), outcomes
        return
    for seam, plugin in plugins:
        print(_headline(seam, plugin, args), flush=True)
        yield (seam, plugin), run([(seam, plugin)], **how, tell=lambda o: _tell(o, args.verbose))


def _plugins(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(seam, plug-in) of all that are asked for; PluginError if a name is unknown or there in several seams."""
    from .session import builtins, seams_of

    if args.processes < 1:
        raise ConfigError(f"--processes {args.processes}: want 1 or more")
    if bool(args.plugin) == args.builtins:
        raise ConfigError("want the names of plug-ins, or --builtins")
    if args.builtins:
        return [(s, p) for s, p in builtins() if args.seam in (None, s)]
    found = []
    for name in args.plugin:
        seams = [args.seam] if args.seam else seams_of(name)
        if not seams:
            raise PluginError(f"no plug-in of any seam is called {name!r}; `minivllm plugins` lists what is installed")
        if len(seams) > 1:
            raise PluginError(f"{name!r} is there in several seams: say --seam {' or --seam '.join(seams)}")
        found.append((seams[0], name))
    return found


def _known(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    known = {}
    for number, line in enumerate(files.read_lines(path), 1):
        name, _, reason = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        if not reason.strip():
            raise ConfigError(f"{path}:{number}: {name} has no reason: want 'test_name  why it fails'")
        known[name] = reason.strip()
    return known


def _headline(seam: str, plugin: str, args: argparse.Namespace) -> str:
    from .base import find

    found = find(seam, plugin)
    place = f" on {args.device}" if args.device else ""
    api, release = version(found.spec.api), found.entry.version
    of = f" ({release})" if release != "-" else ""  # a module:Class has none
    return f"{seam} {found.entry.label}{of}, contract {api}, {args.profile} profile{place}"


def _tell(o: Outcome, verbose: bool) -> None:
    """One outcome: what failed comes with the rule that it broke, the values and the place."""
    if o.status == "failed":
        print(f"  FAIL  {o.test}  ({o.seconds:.1f} s)")
        for label, text in (("rule", o.rule), ("", o.text), ("at", o.where)):
            for i, line in enumerate(_wrap(text) if text else ()):
                print(f"        {label if i == 0 else '':5} {line}")
    elif verbose:
        mark = {"passed": "ok  ", "skipped": "-   ", "xfailed": "known"}[o.status]
        print(f"  {mark}  {o.test}  ({o.seconds:.1f} s){'  ' + o.text if o.text else ''}")
    sys.stdout.flush()


def _wrap(text: str) -> list[str]:
    lines = text.splitlines()
    lines = [*lines[:24], f"... {len(lines) - 24} more lines"] if len(lines) > 24 else lines
    return [part for line in lines for part in textwrap.wrap(line, 105, subsequent_indent="  ") or [""]]


def _count(outcomes: Sequence[Outcome]) -> str:
    n = Counter(o.status for o in outcomes)
    words = {"passed": "passed", "failed": "FAILED", "xfailed": "known failures", "skipped": "skipped"}
    why = Counter(o.text.partition(": ")[0] for o in outcomes if o.status == "skipped")
    text = ", ".join(f"{n[key]} {word}" for key, word in words.items() if n[key])
    return f"{text} ({', '.join(f'{k} {v}' for k, v in why.items())})" if why else text


def _write(args: argparse.Namespace, outcomes: Sequence[Outcome], verdicts: Mapping[tuple[str, str], str]) -> None:
    import platform

    import torch

    import minivllm

    report: dict[str, Any] = {
        "minivllm": minivllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "profile": args.profile,
        "seed": args.seed,
        "outcomes": [asdict(o) for o in outcomes],
        "verdicts": {f"{seam} {plugin}": found for (seam, plugin), found in verdicts.items()},
    }
    Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
