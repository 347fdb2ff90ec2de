"""Clients that people use, each in an environment of its own, against one server.

    python tests/clients/run.py                     all of them, and a table
    python tests/clients/run.py openai_sdk curl     these

A client is a script beside this file.  Python scripts say what they need in their header (PEP 723), ``.mjs`` and
``.sh`` scripts run with node and bash.  A script gets ``BASE_URL`` (without /v1), ``MODEL`` and ``API_KEY`` in its
environment, prints ``ok NAME`` for each thing that works and ends with 0 if all do.  Environments are kept under
``--cache``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEY = "sk-of-the-tests"


def header(script: Path) -> list[str]:
    """Return the dependencies in a PEP 723 header."""
    found = re.search(r"# /// script\n(.*?)# ///", script.read_text(), re.S)
    return re.findall(r'"([^"]+)"', found.group(1)) if found else []


def environment(script: Path, cache: Path) -> Path:
    """Return the Python of a virtual environment with a script's needs; make it if it is missing."""
    wants = header(script)
    name = hashlib.sha256("\n".join([sys.version, *wants]).encode()).hexdigest()[:16]
    folder = cache / f"{script.stem}-{name}"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        uv = shutil.which("uv")
        install = [uv, "pip", "install", "-q", "--python", python] if uv else [python, "-m", "pip", "install", "-q"]
        if wants:
            subprocess.run([*install, *wants], check=True, timeout=900)
        (folder / "made").touch()
    return python


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """``minivllm serve pocket`` on loopback, until the end of the block."""

    def __init__(self, log: Path) -> None:
        self.log, self.port = log, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        start = [sys.executable, "-m", "minivllm", "serve", "pocket", "--host", "127.0.0.1", "--port", str(self.port)]
        return [*start, "--api-key", KEY]

    def __enter__(self) -> Server:
        command = self.command()
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        until = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                    if answer.status == 200:
                        return self
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise SystemExit(f"the server did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()


def run(script: Path, server: Server, cache: Path, limit: float) -> tuple[str, int, str, float]:
    """Return (version, working features, the error or "", seconds)."""
    began = time.monotonic()
    environ = {**os.environ, "BASE_URL": server.url, "MODEL": "pocket", "API_KEY": KEY}
    environ.pop("PYTHONPATH", None)
    try:
        if script.suffix == ".py":
            command = [str(environment(script, cache)), str(script)]
        else:
            tool = {"mjs": "node", "sh": "bash"}[script.suffix[1:]]
            if shutil.which(tool) is None:
                return "", 0, f"{tool} is not here", 0.0
            command = [tool, str(script)]
        with tempfile.TemporaryDirectory() as home:
            done = subprocess.run(
                command, env={**environ, "HOME": home}, cwd=home, capture_output=True, text=True, timeout=limit
            )
    except subprocess.TimeoutExpired:
        return "", 0, f"not done after {limit:.0f} s", time.monotonic() - began
    except subprocess.CalledProcessError as e:
        return "", 0, f"could not be installed: {e}", time.monotonic() - began
    lines = done.stdout.splitlines()
    version = next((line[8:] for line in lines if line.startswith("version ")), "")
    passed = [line for line in lines if line.startswith("ok ")]
    wrong = "" if done.returncode == 0 else (done.stdout[-1500:] + done.stderr[-3000:]).strip() or "no output"
    return version, len(passed), wrong, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts, without their ending")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "minivllm-clients")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a client")
    args = parser.parse_args()
    scripts = [
        p for p in sorted(HERE.iterdir()) if p.suffix in (".py", ".mjs", ".sh") and p != Path(__file__).resolve()
    ]
    unknown = set(args.names) - {p.stem for p in scripts}
    if unknown:
        raise SystemExit(
            f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(p.stem for p in scripts)}"
        )
    args.cache.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as logs, Server(Path(logs) / "server.log") as server:
        print(f"{'client':16s} {'version':44s} {'works':>5s} {'s':>5s}", flush=True)
        for script in scripts:
            if args.names and script.stem not in args.names:
                continue
            version, passed, wrong, seconds = run(script, server, args.cache, args.limit)
            failed += bool(wrong)
            print(
                f"{script.stem:16s} {version:44s} {passed:5d} {seconds:5.0f}  {'FAILED' if wrong else ''}", flush=True
            )
            if wrong:
                print("    " + wrong.replace("\n", "\n    "), flush=True)
        if server.process.poll() is not None:
            print("the server has ended:\n" + server.log.read_text()[-4000:])
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
