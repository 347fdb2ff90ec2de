"""``minivllm run-batch``: its flags, and the run of a batch file of OpenAI's API.

Parsing the flags imports no large package.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.cli import serve
from minivllm.cli.common import add_switch, check_one_model, read_config, report, show_warnings
from minivllm.errors import ConfigError

INTERRUPTED = 130  # exit status


def add_commands(command: Any, wiring: argparse.ArgumentParser) -> None:
    """Add the command ``run-batch``.

    ``command(name, ...)`` makes the parser of a command; ``wiring`` has flags for it.
    """
    text = "Run the requests of an OpenAI batch file, without a server."
    sub = command("run-batch", "cli.batch:run", text, wiring)
    sub.add_argument("positional", nargs="?", metavar="MODEL", help="as --model")
    sub.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSON lines, each with a request")
    sub.add_argument("-o", "--output-file", required=True, metavar="FILE", help="JSON lines, each with a result")
    add_switch(sub, "--resume", "continue an output file: skip the lines that have a result in it")
    text = "requests that run at once (default: 16 more than max_num_seqs)"
    sub.add_argument("--concurrency", type=int, metavar="N", help=text)
    serve.add_engine_flags(sub)


def run(args: argparse.Namespace) -> int:
    """Run ``minivllm run-batch`` and return its exit code: 0, 1 if a request failed, or 130 if the run was interrupted.

    ConfigError if an argument or the configuration is wrong."""
    serve.check_packages("run-batch")
    check_one_model(args)
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError(f"--concurrency {args.concurrency}: expected a positive number of requests")
    flags = serve.engine_options(args)
    loaded = read_config(args.config, args.set, flags)
    show_warnings()
    from minivllm.server import batch, logs

    paths = batch.BatchFiles(Path(args.input_file), Path(args.output_file), args.resume)
    batch.check_files(paths)
    files.check_output(args.output_file)
    logs.set_up(loaded.server.log_format, "warning")
    for note in loaded.notes:
        report(note)
    start = time.monotonic()
    tally = asyncio.run(batch.run_batch(loaded, paths, args.concurrency))
    seconds = time.monotonic() - start
    counts = f"{tally.answered} answers and {tally.failed} errors"
    if tally.skipped:
        counts += f", {tally.skipped} lines skipped"
    report(f"{counts} in {seconds:.1f} s: {args.output_file}")
    if tally.interrupted:
        report("interrupted; --resume continues the output file")
        return INTERRUPTED
    return 1 if tally.failed else 0
