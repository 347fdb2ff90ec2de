"""Commands of minivllm in this process."""

from __future__ import annotations

from typing import Any

from minivllm.cli import main


def run_cli(capsys: Any, *args: str) -> tuple[Any, str, str]:
    """Return exit code, standard output and standard error of a command."""
    try:
        code = main(list(args))
    except SystemExit as exc:
        code = exc.code
    return (code, *capsys.readouterr())
