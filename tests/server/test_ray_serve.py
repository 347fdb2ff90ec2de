"""Servers on Ray Serve: answers, failed engines, rolling updates, autoscaling, and refusals.

A test that starts a cluster is slow and needs Ray: ``pip install "minivllm[ray-serve]"``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from minivllm import LLM, ConfigError, SamplingParams
from minivllm.cli import main
from minivllm.config import load_config
from minivllm.errors import EngineDeadError
from minivllm.server.cluster import plan
from minivllm.server.cluster.deployment import EngineReplica
from minivllm.server.cluster.run import cause, check_installed
from minivllm.server.link.process_client import ProcessClient

HAVE = importlib.util.find_spec("ray") is not None and importlib.util.find_spec("ray.serve") is not None
needs_ray = pytest.mark.skipif(not HAVE, reason='Ray Serve is not installed: pip install "minivllm[ray-serve]"')
PROMPT = "Once upon a time there was a fox"
ROOT = str(Path(__file__).resolve().parents[2])


def loaded(server=(), **engine):
    table = {"cluster": "ray", **dict(server)}
    return load_config(keywords={"model": "pocket", **engine, "server": table}, environ={})


# ---- without Ray -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"cluster": "slurm"}, "cluster"),
        ({"cluster": "local", "ray_address": "auto"}, "ray_address without server.cluster=ray"),
        ({"cluster": "local", "autoscaling": {"max_replicas": 2}}, "autoscaling without server.cluster=ray"),
        ({"uds": "/tmp/a"}, "uds together with server.cluster=ray: Ray Serve listens on a port"),
        ({"admin": True}, "would reach one replica"),
        ({"replicas": 2, "router": "prefix"}, "Ray Serve chooses the replica.*expected least-tokens or session"),
        ({"replicas": 2, "router": "session", "router_options": {"most": 9}}, "routers of Ray Serve have no options"),
        ({"restart": 2}, "always starts its engine again"),
        ({"responses_dir": "/tmp"}, "reach different replicas"),
        ({"replicas": 3, "autoscaling": {"max_replicas": 2}}, "a number of at least server.replicas=3"),
        ({"autoscaling": {"target_ongoing_requests": 2}}, "expected max_replicas"),
        ({"autoscaling": {"min_replicas": 1, "max_replicas": 2}}, "use server.replicas"),
    ],
)
def test_options_that_ray_serve_does_not_have_are_refused(server, words):
    with pytest.raises(ConfigError, match=words):
        loaded(server)


def test_without_ray_it_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Ray is not installed. Do: pip install 'minivllm\[ray-serve\]'"):
        check_installed()


def test_a_replica_has_all_gpus_of_its_ranks_on_one_node():
    two = loaded(tensor_parallel_size=2, device="auto")
    assert plan.resources(two, gpus=8) == {"num_cpus": 1, "num_gpus": 2}
    assert plan.resources(two, gpus=0) == {"num_cpus": 2}
    assert plan.resources(loaded(device="cpu"), gpus=8) == {"num_cpus": 1}


def test_more_devices_than_present_are_refused_with_the_number_that_fits():
    three = loaded({"replicas": 3}, tensor_parallel_size=2, device="cuda")
    nodes = {"a": {"CPU": 64, "GPU": 3}, "b": {"CPU": 64, "GPU": 2}}
    words = "each with 1 CPU and 2 GPU of one node, and the Ray cluster has 2: a has 64 CPU and 3 GPU, so 1; b"
    with pytest.raises(ConfigError, match=f"{words}.*use at most --replicas 2"):
        plan.check_room(three, nodes)
    plan.check_room(loaded({"replicas": 2}, tensor_parallel_size=2, device="cuda"), nodes)
    with pytest.raises(ConfigError, match="lower tensor_parallel_size or use device=cpu"):
        plan.check_room(three, {"a": {"CPU": 64}})


def test_a_node_with_another_version_or_other_files_is_refused(tmp_path):
    (tmp_path / "weights").write_text("one")
    found = loaded()
    engine = found.engine.model_copy(update={"model": str(tmp_path)})
    found = type(found)(engine=engine, server=found.server)
    facts = plan.facts(found)
    os.utime(tmp_path / "weights", (1, 1))  # a copy has another time
    plan.check_facts(found, facts)
    (tmp_path / "weights").write_text("other")
    with pytest.raises(ConfigError, match="differ from those of the server"):
        plan.check_facts(found, facts)
    with pytest.raises(ConfigError, match="install the same version on all nodes"):
        plan.check_facts(found, facts | {"version": "0.0.1"})


def test_a_configuration_is_the_same_when_a_replica_reads_it():
    first = load_config(
        keywords={
            "model": "pocket",
            "max_num_seqs": 4,
            "attention": {"name": "sdpa"},
            "sampling": {"temperature": 0.5},
            "server": {"cluster": "ray", "replicas": 2, "served_model_name": ["a"], "autoscaling": {"max_replicas": 3}},
        },
        environ={},
    )
    again = load_config(keywords=json.loads(json.dumps(plan.arguments(first))), environ={})
    assert (again.engine, again.server, dict(again.sampling)) == (first.engine, first.server, dict(first.sampling))


def test_a_router_of_sessions_is_the_one_of_ray_serve():
    assert "request_router_config" not in plan.deployment_options(loaded({"replicas": 2}), 0)
    for size in ({"replicas": 2}, {"autoscaling": {"max_replicas": 2}}):
        options = plan.deployment_options(loaded({**size, "router": "session"}), 0)
        assert options["request_router_config"] == {"request_router_class": plan.SESSIONS}


def test_the_queue_length_of_autoscaling_is_the_number_of_running_sequences():
    options = plan.deployment_options(loaded({"autoscaling": {"max_replicas": 4}}, max_num_seqs=16), 0)
    scaling = options["autoscaling_config"]
    assert scaling == {"min_replicas": 1, "target_ongoing_requests": 16, "max_replicas": 4}
    assert "num_replicas" not in options
    assert plan.deployment_options(loaded({"replicas": 3}), 0)["num_replicas"] == 3


def test_a_replica_ends_only_with_an_engine_that_is_not_started_again():
    """Between the end of an engine's process and its restart, the engine has no socket and may have been silent."""
    client = ProcessClient(loaded(), 60.0, restarts=1)
    replica = SimpleNamespace(engine=client)
    client._gone, client._last_frame = False, -math.inf
    client._writer = SimpleNamespace(is_closing=lambda: True)
    assert not client.healthy()[0]
    asyncio.run(EngineReplica.check_health(replica))
    client._gone = client.restarting = True
    asyncio.run(EngineReplica.check_health(replica))
    client.restarting, client._why = False, "no restart is left"
    with pytest.raises(EngineDeadError, match="no restart is left"):
        asyncio.run(EngineReplica.check_health(replica))


def test_the_error_of_a_replica_is_found_in_the_traceback_of_serve():
    text = "Traceback:\n  File a\nray.exceptions.RayTaskError: x\nminivllm.errors.ModelError: no model there"
    assert cause([text, text]) == "ModelError: no model there"
    assert cause(["The deployment failed  to start"]) == "The deployment failed to start"


def test_a_file_for_serve_run_has_the_configuration_and_no_keys(tmp_path, monkeypatch, capsys):
    path = tmp_path / "serve.yaml"
    flags = ["serve", "pocket", "--cluster", "ray", "--replicas", "2", "--port", "8123"]
    assert main([*flags, "--write-ray-config", str(path)]) == 0
    found = yaml.safe_load(path.read_text())
    assert found["http_options"] == {"host": "127.0.0.1", "port": 8123}
    (application,) = found["applications"]
    assert application["import_path"] == plan.BUILDER
    assert application["args"] == {"model": "pocket", "server": {"cluster": "ray", "replicas": 2}}
    assert main([*flags, "--api-key", "secret", "--write-ray-config", str(path)]) == 2
    assert "a file has no keys" in capsys.readouterr().err
    assert main(["serve", "pocket", "--write-ray-config", str(path)]) == 2
    assert main([*flags, "--middleware", "a:b"]) == 2


# ---- with a cluster --------------------------------------------------------------------------------------------------


class Server:
    """A process of ``minivllm serve --cluster ray``."""

    def __init__(self, folder, text, *flags):
        self.config = folder / "serve.toml"
        self.config.write_text(text)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "log"
        command = [sys.executable, "-m", "minivllm", "serve", "--config", str(self.config), "--cluster", "ray"]
        command += ["--port", str(self.port), *flags]
        self.home = folder / "home"
        self.home.mkdir()
        environ = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "HOME": str(self.home)}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environ, cwd=folder, start_new_session=True)

    def text(self):
        return self.log.read_text()

    def until(self, word, seconds=180):
        """Wait for a word in the log."""
        end = time.monotonic() + seconds
        while word not in self.text():
            assert self.process.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.2)

    def ask(self, session="", **body):
        """Return the status and the JSON answer of a completion, sent within a session unless it is empty."""
        body = {"model": "pocket", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **body}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        headers = {"Content-Type": "application/json"} | ({"X-Session-Id": session} if session else {})
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as e:
            return e.code, e.read()

    def answer(self, **body):
        status, found = self.ask(**body)
        assert status == 200, found
        return found["choices"][0]["text"]

    def processes(self, word):
        """Return the ids of the session's processes whose command line has a word."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if os.getsid(int(entry.name)) == self.process.pid and word in command:
                    found.append(int(entry.name))
        return found

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(60)
        end = time.monotonic() + 20
        while (left := self.processes("")) and time.monotonic() < end:
            time.sleep(0.2)
        assert not left, "processes of the cluster are left"
        assert not list(self.home.glob(".ray")), "a token of the cluster is left in the user's home"
        return code


@contextlib.contextmanager
def running(folder, text, *flags):
    server = Server(folder, text, *flags)
    try:
        server.until("serving")
        yield server
        assert server.stop() == 0, server.text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


@contextlib.contextmanager
def load(server, expected, users=3):
    """Count the answers of users who send requests without pauses."""
    counts = Counter()
    ended = threading.Event()

    def user():
        while not ended.is_set():
            try:
                status, found = server.ask()
            except OSError:
                counts["no answer"] += 1
                continue
            right = status == 200 and found["choices"][0]["text"] == expected
            counts["right" if right else "wrong" if status == 200 else f"error {status}"] += 1

    threads = [threading.Thread(target=user) for _ in range(users)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        ended.set()
        for thread in threads:
            thread.join()


TWO = """
model = "pocket"
device = "cpu"
max_num_seqs = 8
max_model_len = 256
[server]
replicas = 2
"""


def wanted(tokens=12):
    params = SamplingParams(temperature=0, max_tokens=tokens)
    with LLM(model="pocket", device="cpu", max_model_len=256) as llm:
        return llm.generate([PROMPT], params, use_tqdm=False)[0].text


@needs_ray
@pytest.mark.slow
def test_replicas_of_ray_serve_answer_survive_an_engine_and_are_updated_without_an_error(tmp_path):
    expected = wanted()
    with running(tmp_path, TWO) as server:
        assert server.answer() == expected
        for _ in range(2):  # an engine ends: requests without a token wait until it runs again
            with load(server, expected) as counts:
                while counts["right"] < 20:
                    time.sleep(0.1)
                (first, *more) = server.processes("engine_process")
                assert more
                os.kill(first, signal.SIGKILL)
                end = time.monotonic() + 90
                while first in (now := server.processes("engine_process")) or len(now) < 2:
                    assert time.monotonic() < end, server.text()
                    time.sleep(0.2)
            assert counts["right"] > 20 and not counts["wrong"], counts
            assert sum(counts.values()) - counts["right"] <= 3, counts  # the users' requests that had a token
        server.config.write_text(TWO.replace("256", "128"))
        with load(server, expected) as counts:
            server.process.send_signal(signal.SIGHUP)
            server.until("updated")
        assert set(counts) == {"right"}, counts
        status, found = server.ask(max_tokens=200)
        assert status == 400 and b"128" in found
        server.config.write_text(TWO.replace("pocket", "no-such-model"))
        server.process.send_signal(signal.SIGHUP)
        server.until("not updated")
        assert server.answer() == expected


@needs_ray
@pytest.mark.slow
def test_a_session_stays_with_the_replica_that_has_its_prefix(tmp_path):
    with running(tmp_path, TWO + 'router = "session"\n') as server:
        cached = []
        for number in [*range(8), *range(8)]:
            status, found = server.ask(session=f"user {number}", prompt=f"{number} {PROMPT}. " * 8)
            assert status == 200, found
            cached.append((found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        assert not any(cached[:8]) and all(cached[8:]), cached


@needs_ray
@pytest.mark.slow
def test_the_number_of_replicas_follows_the_queue(tmp_path):
    fast = "max_replicas = 2, target_ongoing_requests = 1, upscale_delay_s = 1, downscale_delay_s = 2"
    fast += ", look_back_period_s = 2, metrics_interval_s = 1"
    text = TWO.replace("replicas = 2", f"replicas = 1\nautoscaling = {{{fast}}}")
    expected = wanted()
    with running(tmp_path, text) as server:
        assert len(server.processes("engine_process")) == 1
        with load(server, expected, users=6) as counts:
            end = time.monotonic() + 120
            while len(server.processes("engine_process")) < 2:
                assert time.monotonic() < end, server.text()
                time.sleep(0.2)
        assert set(counts) == {"right"}, counts
        end = time.monotonic() + 120
        while len(server.processes("engine_process")) > 1:
            assert time.monotonic() < end, server.text()
            time.sleep(0.2)
        assert server.answer() == expected


@needs_ray
@pytest.mark.slow
def test_a_cluster_that_stops_ends_the_server_within_seconds(tmp_path):
    server = Server(tmp_path, TWO.replace("replicas = 2", "replicas = 1"))
    try:
        server.until("serving")
        (head,) = server.processes("gcs_server")
        os.kill(head, signal.SIGKILL)
        start = time.monotonic()
        assert server.process.wait(30) == 7
        assert time.monotonic() - start < 20
        assert "has stopped" in server.text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)


@needs_ray
@pytest.mark.slow
def test_a_cluster_without_room_or_without_an_answer_is_refused(tmp_path, capsys):
    flags = ["serve", "pocket", "--cluster", "ray", "--port", "0"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main([*flags, "--ray-address", f"127.0.0.1:{port}"]) != 0
        assert "no Ray cluster answers there" in capsys.readouterr().err
        taken.listen()
        assert main([*flags[:-1], str(port)]) != 0
        assert "cannot listen" in capsys.readouterr().err
    server = Server(tmp_path, TWO, "--device", "cuda", "--load-format", "dummy")
    assert server.process.wait(90) == 2
    assert "2 places are needed, each with 1 CPU and 1 GPU" in server.text()
    assert not server.processes("")
