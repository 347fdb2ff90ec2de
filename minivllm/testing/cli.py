"""The command line of the conformance kit: it tests plug-ins, prints the result of each test and writes a JSON report.

The exit status is 0 if every plug-in conforms, 1 if a test failed, and 2 if the command cannot be carried out.  It is
3 if no test failed, but too few tests could run for a verdict.
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
from functools import partial
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.errors import ConfigError, MinivllmError, PluginError
from minivllm.registration.spec import KINDS, version

from . import WANTED
from .verdict import advice, exit_status, summary, verdict

if TYPE_CHECKING:
    from .session import Outcome

EPILOG = """
Each line of a known-failures file has the name of a test and a reason, such as "test_sinks  not written yet, issue
12".  A listed test that passes is an error.  A test class of your own can also run the suite:

    from minivllm.testing import AttentionConformance

    class TestFlash(AttentionConformance):
        plugin = "acme/flash"

Only such a class can override methods of the suite.  A plug-in with parameters of its own needs this: without an
override of params(), few of its rules are tested, the verdict is "hardly tested" or "own parameters not tested" rather
than "conforms", and the exit status is 3.  The page of the seam in docs/plugins/ lists the methods that can be
overridden.

A suite takes 1 to 20 seconds on an idle CPU, and up to 4 minutes with --profile long.  On a busy CPU the suite of a
sampler takes minutes (OMP_NUM_THREADS=1 may help).  On a GPU, a CPU core compiles kernels for each size, so pass
--processes 16 if there are 16 cores.  With -v and one process, each test is shown as soon as it ends.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m minivllm.testing",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Test plug-ins against the contract of their seam, over all that their specs claim.",
    )
    p.add_argument("plugin", nargs="*", help="name, dist/name or module:Class")
    p.add_argument("--seam", choices=sorted(KINDS), help="required if plug-ins of several seams have the name")
    p.add_argument("--builtins", action="store_true", help="test every plug-in of this package")
    p.add_argument("--device", default="", help="cpu or cuda; default: the first claimed device of this machine")
    p.add_argument("--profile", choices=("fast", "long"), default="fast", help="long draws 12 times as many examples")
    p.add_argument("--seed", type=int, help="draw other examples; without a seed, each run draws the same ones")
    p.add_argument("--processes", type=int, default=1, metavar="N", help="share the tests among N processes")
    p.add_argument("-k", dest="select", default="", metavar="EXPR", help="only tests whose names match (as in pytest)")
    p.add_argument("--known-failures", metavar="FILE", help="tests that are expected to fail, with a reason each")
    p.add_argument("--json", metavar="FILE", help="write every outcome to a file")
    p.add_argument("-v", "--verbose", action="store_true", help="also show tests that passed or were skipped")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with its arguments and return the exit status."""
    args = parser().parse_args(argv)
    sys.path.insert(0, "")  # as in `python -m pytest`, a plug-in may be a module in the working directory
    try:
        plugins = _plugins(args)
        known = _known(args.known_failures)
        if args.json:
            files.check_output(args.json)
        # imported here because --help and wrong arguments must work without pytest
        from minivllm.testing import run
    except (MinivllmError, ImportError, OSError) as exc:
        missing = isinstance(exc, ImportError) and exc.name in ("pytest", "hypothesis")
        print(f"minivllm.testing: error: {WANTED if missing else exc}", file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    verdicts: dict[tuple[str, str], str] = {}
    start = time.perf_counter()
    try:
        for of_plugin in _run_suites(plugins, args, known, run):
            outcomes += of_plugin
            if of_plugin:
                print(f"  {_count(of_plugin)} in {time.perf_counter() - start:.1f} s")
                result = verdict(of_plugin, bool(args.select))
                verdicts[of_plugin[0].seam, of_plugin[0].plugin] = result
                if advised := advice(result):
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


def _run_suites(
    plugins: Sequence[tuple[str, str]],
    args: argparse.Namespace,
    known: dict[str, str],
    run: Callable[..., list[Outcome]],
) -> Iterator[list[Outcome]]:
    """Run the suite of each (seam, plug-in), print a headline and the outcomes, and yield the outcomes.

    ``run`` is ``minivllm.testing.run``.
    """
    options: dict[str, Any] = {"known": known}
    for name in ("device", "profile", "seed", "select"):
        options[name] = getattr(args, name)
    if args.processes > 1:
        from .parallel import run_parallel

        for (seam, plugin), outcomes in run_parallel(plugins, args.processes, **options):
            print(_headline(seam, plugin, args), flush=True)
            for outcome in outcomes:
                _print_outcome(outcome, args.verbose)
            yield outcomes
        return
    tell = partial(_print_outcome, verbose=args.verbose)
    for seam, plugin in plugins:
        print(_headline(seam, plugin, args), flush=True)
        yield run([(seam, plugin)], **options, tell=tell)


def _plugins(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the (seam, plug-in) pairs that the arguments select.

    Raise PluginError if a name is unknown or plug-ins of several seams have it, and ConfigError for other wrong
    arguments.
    """
    from .session import builtins, seams_of

    if args.processes < 1:
        raise ConfigError(f"--processes {args.processes}: expected 1 or more")
    if bool(args.plugin) == args.builtins:
        raise ConfigError("expected either the names of plug-ins or --builtins")
    if args.builtins:
        return [(seam, plugin) for seam, plugin in builtins() if args.seam in (None, seam)]
    found = []
    for name in args.plugin:
        if args.seam:
            seams = [args.seam]
        else:
            seams = seams_of(name)
        if not seams:
            raise PluginError(f"no plug-in of any seam is called {name!r}; `minivllm plugins` lists what is installed")
        if len(seams) > 1:
            choices = " or --seam ".join(seams)
            raise PluginError(f"plug-ins of several seams are called {name!r}: add --seam {choices}")
        found.append((seams[0], name))
    return found


def _known(path: str | None) -> dict[str, str]:
    """Read a known-failures file into test -> reason; without a file return {}.

    Raise ConfigError for a test without a reason.
    """
    if path is None:
        return {}
    known = {}
    for number, line in enumerate(files.read_lines(path), 1):
        name, _, reason = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        if not reason.strip():
            raise ConfigError(f"{path}:{number}: {name} has no reason: expected 'test_name  why it fails'")
        known[name] = reason.strip()
    return known


def _headline(seam: str, plugin: str, args: argparse.Namespace) -> str:
    """Return the line that is printed above the outcomes of a plug-in."""
    from .base import find

    found = find(seam, plugin)
    device = f" on {args.device}" if args.device else ""
    api = version(found.spec.api)
    release = found.entry.version
    of = f" ({release})" if release != "-" else ""  # a plug-in named by module:Class has no version
    return f"{seam} {found.entry.label}{of}, contract {api}, {args.profile} profile{device}"


def _print_outcome(outcome: Outcome, verbose: bool) -> None:
    """Print the outcome of a test.

    A failed test is printed with its rule, the failing values and the place of the failure.  Other outcomes are
    printed only if ``verbose``.
    """
    heading = f"{outcome.test}  ({outcome.seconds:.1f} s)"
    if outcome.status == "failed":
        print(f"  FAIL  {heading}")
        for label, text in (("rule", outcome.rule), ("", outcome.text), ("at", outcome.where)):
            for i, line in enumerate(_wrap(text)):
                print(f"        {label if i == 0 else '':5} {line}")
    elif verbose:
        mark = {"passed": "ok  ", "skipped": "-   ", "xfailed": "known"}[outcome.status]
        print(f"  {mark}  {heading}{'  ' + outcome.text if outcome.text else ''}")
    sys.stdout.flush()


def _wrap(text: str) -> list[str]:
    """Return the first 24 lines of a text, wrapped at 105 characters."""
    lines = text.splitlines()
    if len(lines) > 24:
        lines = [*lines[:24], f"... {len(lines) - 24} more lines"]
    return [part for line in lines for part in textwrap.wrap(line, 105, subsequent_indent="  ") or [""]]


def _count(outcomes: Sequence[Outcome]) -> str:
    """Return how many tests have each status, and how many were skipped for each reason."""
    counts = Counter(outcome.status for outcome in outcomes)
    words = {"passed": "passed", "failed": "FAILED", "xfailed": "known failures", "skipped": "skipped"}
    not_run = [outcome for outcome in outcomes if outcome.status == "skipped"]
    reasons = Counter(outcome.text.partition(": ")[0] for outcome in not_run)
    parts = (f"{counts[status]} {word}" for status, word in words.items() if counts[status])
    text = ", ".join(parts)
    if not reasons:
        return text
    skipped = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
    return f"{text} ({skipped})"


def _write(args: argparse.Namespace, outcomes: Sequence[Outcome], verdicts: Mapping[tuple[str, str], str]) -> None:
    """Write the JSON report with the versions, the settings, the outcomes and the verdicts."""
    import platform

    import torch

    import minivllm

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = platform.processor() or "cpu"
    report: dict[str, Any] = {"minivllm": minivllm.__version__}
    report["torch"] = torch.__version__
    report["python"] = platform.python_version()
    report["device"] = device
    report["profile"] = args.profile
    report["seed"] = args.seed
    report["outcomes"] = [asdict(outcome) for outcome in outcomes]
    report["verdicts"] = {f"{seam} {plugin}": found for (seam, plugin), found in verdicts.items()}
    content = json.dumps(report, indent=1) + "\n"
    files.write_text(args.json, content)
