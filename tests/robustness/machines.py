"""Two machines that are network namespaces of this one, a Ray cluster over both, and the programs on them.

Each machine has a network, a host name, a /dev/shm and a folder for temporary files of its own.  A pair of virtual
interfaces is the cable.  The processes and their numbers belong to the real machine, so tests can end them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARK = "TWO_MACHINES"
NAMES = ("host-a", "host-b")
PORT, HTTP = 6379, 8000
STARTS = 180.0  # the most seconds that a cluster or an engine may take to start
PROMPTS = ["Once upon a time", "The dog", "One day a girl", "Tom and Mia went"]
SIZES = dict(max_num_seqs=4, max_num_batched_tokens=64, num_kvcache_blocks=64, max_model_len=256, device="cpu")
ENGINE = """
import json, sys, time
from minivllm import LLM, SamplingParams

def say(**words):
    print(json.dumps(words), flush=True)

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    params = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True)
    try:
        llm = LLM(model="pocket", dtype="float32", **asked["options"])
    except Exception as e:
        say(start=str(e), at=time.monotonic())
        sys.exit(getattr(e, "exit_code", 1))
    with llm:
        ranks = getattr(llm.engine.executor, "_ranks", list)()
        say(ready=[[one.pid, getattr(one, "host", "")] for one in ranks])
        while True:
            outs = llm.generate(asked["prompts"], params, use_tqdm=False)
            if outs[0].finish_reason == "error":
                say(error=outs[0].error, at=time.monotonic())
                break
            say(tokens=[list(out.tokens) for out in outs])
            if asked["once"]:
                break
"""


def run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Return the reason why two machines cannot be made here, "" if they can."""
    if importlib.util.find_spec("ray") is None:
        return 'Ray is not installed: pip install "minivllm[ray]"'
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() or not shutil.which("ip"):
        return "network namespaces expected Linux, root and the command ip (iproute2)"
    name = f"mv-{secrets.token_hex(3)}"
    try:
        run("ip", "netns", "add", name)
        try:
            inside = "hostname a; mount --bind /tmp /dev/shm"
            run("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-ec", inside)
        finally:
            run("ip", "netns", "del", name)
    except OSError as e:
        return str(e)
    return ""


def of_mark(mark: str) -> list[int]:
    """Return the processes that were started for a scene, whatever their current parent is."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


class Machines:
    """Two namespaces and the cable between them."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(3)
        self.names = tuple(f"mv-{self.mark}-{end}" for end in "ab")
        self.links = tuple(f"v{self.mark}{end}" for end in "ab")
        number = int(self.mark, 16)
        self.ips = tuple(f"10.{200 + number % 50}.{number >> 8 & 255}.{last}" for last in (1, 2))
        self.folder = tempfile.mkdtemp(prefix="mv")  # a short path, where each machine has a file system of its own
        self.env = {**os.environ, MARK: self.mark, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self.env |= {
            "TMPDIR": self.folder,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUNBUFFERED": "1",
        }
        for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
            self.env.pop(name, None)
        self.nodes: list[subprocess.Popen] = []

    def __enter__(self) -> Machines:
        for name in self.names:
            run("ip", "netns", "add", name)
        a, b = self.links
        run("ip", "link", "add", a, "netns", self.names[0], "type", "veth", "peer", "name", b, "netns", self.names[1])
        for name, link, ip in zip(self.names, self.links, self.ips, strict=True):
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "addr", "add", f"{ip}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
        return self

    def link(self, state: str) -> None:
        run("ip", "-n", self.names[1], "link", "set", self.links[1], state)

    def start(self, where: int, *words: str, instead: Sequence[str] = (), **more: Any) -> subprocess.Popen:
        """Start a process on a machine.  ``instead`` has a folder and the path at which the machine has it."""
        disk, memory = self._disks(where)
        binds = [(memory, "/dev/shm"), (disk, self.folder), *([tuple(instead)] if instead else [])]
        mounts = "; ".join(f"mount --bind {shlex.quote(a)} {shlex.quote(b)}" for a, b in binds)
        inside = f'hostname {NAMES[where]}; {mounts}; exec "$@"'
        command = ["ip", "netns", "exec", self.names[where], "unshare", "--uts", "sh", "-ec", inside, "sh", *words]
        return subprocess.Popen(command, env=self.env, start_new_session=True, **more)

    def _disks(self, where: int) -> tuple[str, str]:
        """Make the folders that a machine has in place of the folder for temporary files and of /dev/shm."""
        found = f"{self.folder}.{where}", f"{self.folder}.{where}.shm"
        for folder in found:
            os.makedirs(folder, exist_ok=True)
        return found

    def of(self, where: int) -> list[int]:
        """Return the processes of a scene that are on a machine."""
        number = os.stat(f"/run/netns/{self.names[where]}").st_ino
        return [pid for pid in of_mark(self.mark) if _network(pid) == f"net:[{number}]"]

    def __exit__(self, *exc: object) -> None:
        for pid in of_mark(self.mark):
            if pid != os.getpid():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for node in self.nodes:
            node.wait()
        for name in self.names:
            run("ip", "netns", "del", name, check=False)
        for folder in (self.folder, *self._disks(0), *self._disks(1)):
            shutil.rmtree(folder, ignore_errors=True)

    # ---- the cluster ---------------------------------------------------------------------------------------------

    def ray(self, where: int, *words: str, instead: Sequence[str] = ()) -> None:
        """Start Ray's head or node on a machine."""
        start = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"
        few = ["--block", "--num-cpus=1", "--object-store-memory=83886080", "--disable-usage-stats"]
        at = f"--node-ip-address={self.ips[where]}"
        reported = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        command = [sys.executable, "-c", start, "start", at, *few, *words]
        self.nodes.append(self.start(where, *command, instead=instead, **reported))

    @property
    def address(self) -> str:
        return f"{self.ips[0]}:{PORT}"

    def cluster(self, instead: Sequence[str] = ()) -> None:
        """Start the cluster.  ``instead`` has a folder and the path at which the second machine has it."""
        self.ray(0, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}")
        probe = f"import socket; socket.create_connection(('{self.ips[0]}', {PORT}), 1)"
        end = time.monotonic() + STARTS
        while self.start(0, sys.executable, "-c", probe, stderr=subprocess.DEVNULL).wait():
            if time.monotonic() > end or self.nodes[0].poll() is not None:
                raise OSError("Ray's head has not started")
            time.sleep(0.3)
        self.ray(1, f"--address={self.address}", instead=instead)
        wait = "import ray, sys, time; ray.init(sys.argv[1], log_to_driver=False)\n"
        wait += "while len(ray.nodes()) < 2: time.sleep(0.2)"
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if self.start(0, "timeout", str(int(STARTS)), sys.executable, "-c", wait, self.address, **quiet).wait():
            raise OSError("Ray's node on the second machine has not joined")

    def options(self, **more: Any) -> dict[str, Any]:
        requested = {"address": self.address, "timeout": 30, **more}
        return {**SIZES, "tensor_parallel_size": 2, "executor": {"name": "ray", "options": requested}}

    def of_node(self, where: int) -> list[int]:
        """Return the processes of Ray on a machine, including its workers."""
        return [pid for pid in self.of(where) if "ray" in command_of(pid)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _network(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


class Engine:
    """An engine on the first machine."""

    def __init__(self, machines: Machines, options: dict[str, Any], tokens: int = 200, once: bool = False) -> None:
        requested = {"options": options, "tokens": tokens, "once": once, "prompts": PROMPTS}
        self.machines = machines
        self.process = machines.start(
            0,
            sys.executable,
            "-c",
            ENGINE,
            json.dumps(requested),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        """Return the next line of its output, {} at the end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def ready(self) -> list[list[Any]]:
        """Return process and host of each rank."""
        reported = self.hear()
        if "ready" not in reported:
            raise AssertionError(f"it has not started: {reported or self.process.stderr.read()[-500:]}")
        return reported["ready"]

    def end(self, since: float) -> tuple[str, float]:
        """Return its last message, and its time in seconds after ``since``."""
        reported: dict[str, Any] = {}
        while heard := self.hear():
            reported = heard if "error" in heard or "start" in heard else reported
        self.process.wait()
        return reported.get("error", reported.get("start", "")), reported.get("at", time.monotonic()) - since


class Server:
    """``minivllm serve`` on the first machine."""

    BODY = {"model": "pocket", "prompt": PROMPTS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    AT = f"http://127.0.0.1:{HTTP}/v1/completions"

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        options = {"model": "pocket", "dtype": "float32", **machines.options()}
        (Path(machines.folder + ".0") / "serve.yaml").write_text(json.dumps(options))  # JSON is YAML
        command = ["-m", "minivllm", "serve", "--config", f"{machines.folder}/serve.yaml", "--port", str(HTTP)]
        self.process = machines.start(0, sys.executable, *command, stderr=subprocess.PIPE, text=True)

    def ask(self, tokens: int) -> subprocess.Popen:
        """Start a client on the first machine that prints the answer."""
        body, pipes = json.dumps({**self.BODY, "max_tokens": tokens}), dict(stdout=subprocess.PIPE, text=True)
        pipes["stderr"] = subprocess.DEVNULL
        return self.machines.start(0, sys.executable, "-c", ASK, self.AT, body, **pipes)

    def answer(self, tokens: int) -> list[list[int]]:
        """Return the token ids by prompt, after the server has started."""
        end = time.monotonic() + STARTS
        while True:
            asks = self.ask(tokens)
            reported, _ = asks.communicate()
            if asks.returncode == 0:
                choices = sorted(json.loads(reported)["choices"], key=lambda one: one["index"])
                return [choice["token_ids"] for choice in choices]
            assert self.process.poll() is None, f"the server has ended: {self.process.communicate()[1][-500:]}"
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.5)


ASK = """
import sys, urllib.error, urllib.request
asked = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"content-type": "application/json"})
try:
    print(urllib.request.urlopen(asked, timeout=60).read().decode())
except urllib.error.HTTPError as e:
    print(e.code, e.read().decode())
    sys.exit(1)
"""
