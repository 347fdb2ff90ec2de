"""K1 to K6: wrong command lines."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from typing import Any

from .ground import ROOT, environment
from .lines import line
from .tools import Tools

CONFIG, MODEL, PLUGIN, MACHINE = 2, 3, 4, 5
POCKET = ROOT / "minivllm" / "pocket" / "draft"


@line("K1", "unknown flags and commands", "tools")
def k1(tools: Tools, rng: random.Random) -> Any:
    word = "".join(rng.choice("abcdefgh") for _ in range(6))
    for argv in (
        ["serve", f"--{word}x"],
        [f"{word}x"],
        ["serve", "pocket", "extra"],
        ["--prot", "5"],
        ["serve", "--port"],
        ["bench", word],
        ["serve", "--set"],
        ["generate", "--max-tokens", "x"],
        ["serve", "--model", "a", "pocket"],
        ["serve", "--set", "noequals"],
    ):
        yield " ".join(argv), lambda argv=argv: tools.run(*argv).ended(CONFIG)


@line("K2", "a port or an address that cannot be had", "tools")
def k2(tools: Tools, rng: random.Random) -> Any:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        yield "in use", lambda: tools.run("serve", "pocket", "--port", port).ended(MACHINE, port)
        for host in ("no.such.host.invalid", "203.0.113.7", "256.1.1.1", "::g", "a b"):
            yield (
                host,
                lambda host=host: tools.run("serve", "pocket", "--port", "0", "--host", host).ended(MACHINE, "host"),
            )
        yield "in use, really", lambda: tools.really("serve", "pocket", "--port", port).ended(MACHINE, port)


@line("K3", "values of flags", "tools")
def k3(tools: Tools, rng: random.Random) -> Any:
    for argv in (
        ["--port", "abc"],
        ["--port", "70000"],
        ["--port", "-1"],
        ["--port", "1.5"],
        ["--max-model-len", "0"],
        ["--max-num-seqs", "-3"],
        ["--log-format", "xml"],
        ["--tool-parser", "hermse"],
        ["--dtype", "float7"],
        ["--drain-timeout", "-1"],
        ["--max-queue", "x"],
        ["--drain-timeout", "nan"],
        ["--host", ""],
        ["--api-key", ""],
        ["--tensor-parallel-size", "0"],
        ["--device", "tpu9"],
    ):

        def check(argv: list[str] = argv) -> None:
            done = (
                tools.run("serve", "pocket", *argv, "--port", "0")
                if argv[0] != "--port"
                else tools.run("serve", "pocket", *argv)
            )
            assert done.code in (CONFIG, MACHINE), done
            done.ended(done.code)

        yield " ".join(argv), check


@line("K4", "help answers at once, without torch", "tools")
def k4(tools: Tools, rng: random.Random) -> Any:
    code = (
        "import sys\nfrom minivllm.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as e:\n    assert not e.code\n"
        "print([m for m in ('torch', 'transformers', 'fastapi') if m in sys.modules], file=sys.stderr)"
    )
    for argv in (
        ["--help"],
        ["serve", "--help"],
        ["--version"],
        [rng.choice(["generate", "plugins", "bench", "run", "config"]), "--help"],
    ):

        def check(argv: list[str] = argv) -> None:
            done = subprocess.run(
                [sys.executable, "-c", code, *argv], env=environment(), capture_output=True, text=True, timeout=30
            )
            assert done.returncode == 0 and done.stderr.strip() == "[]", done.stderr[-300:]
            assert "minivllm" in done.stdout

        yield " ".join(argv), check


@line("K5", "files of keys", "tools")
def k5(tools: Tools, rng: random.Random) -> Any:
    made = tools.folder()
    for name, data in (("empty", b""), ("comments", b"# a\n\n#b\n"), ("noise", b"\xff\xfe\x00"), ("blank", b" \n\t\n")):
        (made / name).write_bytes(data)
    (made / "folder").mkdir()
    for name in ("empty", "comments", "noise", "blank", "folder", "missing"):
        yield (
            name,
            lambda name=name: tools.run("serve", "pocket", "--port", "0", "--api-key-file", str(made / name)).ended(
                CONFIG, "api_key_file"
            ),
        )


@line("K6", "no command at all: 2 and how to use it (without a model, pocket is served: that is the default)", "tools")
def k6(tools: Tools, rng: random.Random) -> Any:
    for argv in ([], ["--debug"], ["config"], ["bench"]):

        def check(argv: list[str] = argv) -> None:
            done = tools.run(*argv)
            assert done.code == CONFIG and "--help" in done.err and "Traceback" not in done.err, done

        yield " ".join(argv) or "nothing", check
