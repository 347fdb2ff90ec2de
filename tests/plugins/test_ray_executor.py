"""Executor ``ray``: ranks in actors give the tokens of one process, over memory and over TCP, and an end never blocks.

Tests that start a cluster are ``slow``, and need Ray: ``pip install "minivllm[ray]"``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_multiprocess_executor import LONG, PROMPTS, answers, folder, gone, options, ranks_of, want  # noqa: F401

from minivllm import LLM, ConfigError, EngineDeadError, PluginError, ResourceError, SamplingParams
from minivllm.config import tensor_parallel
from minivllm.core.interfaces.executor import Part
from minivllm.plugins.executor import ray_launcher
from minivllm.plugins.executor.options import RayOptions
from minivllm.plugins.executor.ray_executor import Ray, RayCluster
from minivllm.plugins.executor.ray_launcher import (
    check_address,
    lacks,
    of_session,
    rank_resources,
    reason_of_end,
    refused,
)
from minivllm.plugins.executor.ray_rank import CHANNEL
from minivllm.plugins.executor.ray_worker import interface_of
from minivllm.runtime.processes.gate import Guest

HAVE = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAVE, reason='Ray is not installed: pip install "minivllm[ray]"')


def ray(size=2, **more):
    requested = {"checked": True, "timeout": 30, **more}
    return {"executor": {"name": "ray", "options": requested}, "tensor_parallel_size": size}


# ---- without a cluster -----------------------------------------------------------------------------------------------


def test_without_ray_it_is_refused_with_the_command_that_installs_it(folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr("minivllm.registration.spec._installed", lambda module: module != "ray")
    with pytest.raises(PluginError, match=r'needs ray, which is not installed.*pip install "minivllm\[ray\]"'):
        LLM(**options(folder, **ray()))


@pytest.mark.skipif(not HAVE, reason="what is asked first is whether Ray is there")
def test_bad_options_are_refused_by_their_names(folder):  # noqa: F811
    for more, words in (
        ({"transport": "udp"}, "transport='udp'"),
        ({"placement_timeout": 0}, "placement_timeout=0: expected a number from 1"),
        ({"address": "nonsense"}, "executor.options.address: expected host:port of a Ray cluster, or auto"),
        ({"address": "ray://a:1/x"}, "expected host:port of a Ray cluster"),
        ({"adress": "x"}, "Did you mean 'address'"),
    ):
        with pytest.raises(PluginError, match=words):
            LLM(**options(folder, **ray(**more)))
    with pytest.raises(ConfigError, match="expected 1 or 2 or 4"):
        LLM(**options(folder, **ray(3)))


@pytest.mark.parametrize(
    ("nodes", "device", "size", "words"),
    [
        ([("a", {"CPU": 4})], "cpu", 4, ""),
        ([("a", {"CPU": 1}), ("a", {"CPU": 1})], "cpu", 2, ""),
        ([("a", {"CPU": 2.0})], "cpu", 4, "4 places are needed, each with 1 CPU.*has 2: a has 2 CPU, so 2;.*_size=2"),
        ([("a", {"CPU": 64})], "cuda", 2, "each with 1 GPU and 1 CPU.*has 0: a has 0 GPU and 64 CPU, so 0;"),
        ([("a", {"CPU": 1, "GPU": 8}), ("b", {"CPU": 9, "GPU": 2})], "cuda", 4, "a has 8 GPU and 1 CPU, so 1; b has"),
        ([], "cpu", 1, "no node that is alive"),
    ],
)  # fmt: skip
def test_a_cluster_that_could_never_have_the_places_is_told_what_it_has(nodes, device, size, words):
    found = lacks(nodes, size, rank_resources(device))
    assert re.search(words, found) if words else found == ""


@pytest.mark.parametrize("address", ["nonsense", "a:b", "host:", "ray://a:1/x"])
def test_addresses_of_another_form_are_refused(address):
    with pytest.raises(ResourceError, match="expected host:port of a Ray cluster, or auto"):
        check_address(address)


def test_an_address_at_which_nobody_answers_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = listens.getsockname()[1]
        check_address(f"127.0.0.1:{port}")
    for where in (f"127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(ResourceError, match=r"no Ray cluster answers there.*ray start --head"):
            check_address(where)
    check_address("auto")


def test_of_what_ray_says_the_advice_is_left_out():
    node = "The actor died.\n\tclass_name: A\nThe actor is dead because its node has died. Node Id: 12 \n"
    assert reason_of_end(RuntimeError(node)) == "its node has died"
    memory = (
        "x\nWorker exit detail: Task was killed due to the node running low on memory.\nMemory on the node was 3 GB"
    )
    assert reason_of_end(RuntimeError(memory)) == "Task was killed due to the node running low on memory"
    error = RuntimeError("Worker exit detail: Worker unexpectedly exits with a connection error code 2.")
    assert reason_of_end(error) == ""


def test_why_ray_does_not_start_is_told_in_one_line():
    e = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1\n    Python: 3.9\n")
    assert refused("a:1", e).endswith(
        "join the cluster at a:1: RuntimeError: Version mismatch: The cluster was started with: Ray: 2.1 Python: 3.9"
    )
    assert refused("", e).startswith("Ray cannot start a cluster here: ")
    assert "no Ray cluster answers there" in refused("auto", ConnectionError("none"))


@pytest.mark.parametrize(("limit", "received"), [(40, True), (4096, False), (-1, False)])
def test_a_limit_of_open_files_that_is_too_small_for_ray_is_told(monkeypatch, limit, received):
    monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
    assert (f"there may be {limit}: ulimit -n raises that" in refused("", RuntimeError("Timed out"))) == received


def test_devices_that_this_machine_does_not_see_count_where_an_address_was_given():
    def device(size, executor):
        return tensor_parallel.check(size, [], SimpleNamespace(devices=1, kind="cuda"), executor, {})

    requested = {"traits": {"cluster": "address"}}
    device(4, Part("minivllm/ray", "x:Y", {"address": "auto"}, **requested))
    for executor in (Part("minivllm/ray", "x:Y", {"address": ""}, **requested), Part("minivllm/multiprocess", "x:Y")):
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: .*torch sees 1 on cuda; expected at most 1"):
            device(4, executor)


def test_ranks_of_a_machine_stand_together_with_their_gpus_in_order_and_the_engines_machine_is_first(monkeypatch):
    monkeypatch.setattr("minivllm.plugins.executor.ray_executor.Child", lambda target: None)
    cluster, places = RayCluster(RayOptions()), [("b", ["1"]), ("a", ["10"]), ("b", ["0"]), ("a", ["9"])]
    cluster._node = "a"
    guests = {i: {CHANNEL: Guest({"node": node, "gpus": gpus}, None)} for i, (node, gpus) in enumerate(places)}
    order = sorted(guests, key=cluster._order(guests))
    assert [places[i] for i in order] == [("a", ["9"]), ("a", ["10"]), ("b", ["0"]), ("b", ["1"])]
    cluster._ranks = [SimpleNamespace(node=places[i][0], gpus=places[i][1], here=places[i][0] == "a") for i in order]
    received = [cluster.settings_of(rank) for rank in range(4)]
    assert [(one["visible"], one["device"]) for one in received] == [("9,10", 0), ("9,10", 1), ("0,1", 0), ("0,1", 1)]
    assert all(one["apart"] for one in received), "they cannot meet by a file"


def test_a_node_that_does_not_answer_is_lost_and_one_that_does_is_not(monkeypatch):
    monkeypatch.setattr(ray_launcher, "GONE", 0.2)
    monkeypatch.setattr(ray_launcher, "PROBE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as there:
        probe = ray_launcher.NodeProbe({0: there.getsockname(), 1: ("127.0.0.1", port), 2: ("127.0.0.1", port)})
        probe.start()
        end = time.monotonic() + 20
        while len(probe.lost) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        probe.asks = False
        probe.join(20)
    assert sorted(probe.lost) == [1, 2] and "127.0.0.1 has not answered for 0.2 s" in probe.lost[1]


def test_masks_go_as_messages_where_no_memory_is_shared():
    executor = Ray()
    executor._child = SimpleNamespace(here=False)
    assert executor.mask_memory(3, 5).shape == (3, 5) and not executor._memories


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.7") == ""


def test_a_session_is_found_by_its_leader():
    with subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run(['sleep', '60'])"], start_new_session=True
    ) as leader:
        end = time.monotonic() + 20
        while not (found := list(of_session(leader.pid))) and time.monotonic() < end:
            time.sleep(0.02)
        folder = tempfile.mkdtemp()
        ray_launcher.sweep(leader.pid, folder)
        assert len(found) == 1 and gone(found) and not os.path.exists(folder)
        leader.wait(20)


# ---- with a cluster --------------------------------------------------------------------------------------------------


def belongings():
    """Of clusters that were started by engines: folders, shared memory, and processes of any of them."""
    folders = {str(path) for path in Path(tempfile.gettempdir()).glob(f"{ray_launcher.TEMPORARY}*")}
    return folders | {name for name in os.listdir("/dev/shm") if "plasma" in name}


def of_launcher(llm):
    pid = llm.engine.executor._cluster._launcher.pid
    return [pid, *of_session(pid)]


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_in_actors_give_the_tokens_of_one_process_and_a_dead_one_ends_the_engine(folder, want, transport):  # noqa: F811
    before = belongings()
    with LLM(**options(folder, **ray(transport=transport))) as llm:
        assert answers(llm) == want
        llm.engine.cache.check()
        assert llm.engine.call("kv_resident") > 0
        assert [child.here for child in llm.engine.executor._ranks()] == [transport == "auto"] * 2
        pids, others = ranks_of(llm), of_launcher(llm)
        os.kill(pids[1], signal.SIGKILL)
        begun = time.monotonic()
        while llm.engine.dead is None and time.monotonic() - begun < 5.0:
            llm.engine.watch()
            time.sleep(0.05)
        assert time.monotonic() - begun < 2.0
        assert re.search(rf"rank 1 of 2 \(cpu of \S+, process {pids[1]}\)", llm.engine.dead)
        with pytest.raises(EngineDeadError, match="rank 1 of 2"):
            llm.generate(PROMPTS[:1], LONG, use_tqdm=False)
    assert gone([*pids, *others], 15.0) and belongings() == before


@pytest.fixture
def two_nodes(tmp_path):
    """Return the address of a cluster of two nodes on this machine, with one CPU and processes of their own."""
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = listens.getsockname()[1]
    temporary = tempfile.mkdtemp(prefix="rt")  # sockets' names are short
    words = ["--block", "--num-cpus=1", f"--object-store-memory={ray_launcher.OBJECTS}", "--disable-usage-stats"]
    head = [f"--port={port}", "--head", "--include-dashboard=false", f"--temp-dir={temporary}"]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env, "start_new_session": True}
    made = [subprocess.Popen([*command, *head, *words], **quiet)]
    try:
        _answers(port)
        made.append(subprocess.Popen([*command, f"--address=127.0.0.1:{port}", *words], **quiet))
        yield f"127.0.0.1:{port}", made
    finally:
        for one in reversed(made):
            for pid in of_session(one.pid):
                os.kill(pid, signal.SIGKILL)
            one.kill()
            one.wait()
        subprocess.run(["rm", "-rf", temporary], check=False)


def _answers(port, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail("the cluster has not started")


@needs_ray
@pytest.mark.slow
def test_ranks_on_two_nodes_of_a_cluster_give_the_same_and_it_is_left_as_it_was(folder, want, two_nodes, monkeypatch):  # noqa: F811
    address, nodes = two_nodes
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    end = time.monotonic() + 60
    while True:  # the second node may take its time
        try:
            llm = LLM(**options(folder, **ray(address=address)))
            break
        except ResourceError as e:
            assert "so 1; add nodes, or use at most tensor_parallel_size=1" in str(e) and time.monotonic() < end
    with llm:
        assert answers(llm) == want
        assert [child.here for child in llm.engine.executor._ranks()] == [True, False], "the engine's machine is first"
        with pytest.raises(ResourceError, match=r"no free places within 1 s: 2 are needed, each with 1 CPU"):
            LLM(**options(folder, **ray(address=address, placement_timeout=1)))
        pids = ranks_of(llm)
    assert gone(pids, 15.0) and all(node.poll() is None for node in nodes), "its nodes are as they were"
    with LLM(**options(folder, **ray(address=address))) as llm:  # its places are free again
        for pid in of_session(nodes[1].pid):  # a node is gone
            os.kill(pid, signal.SIGKILL)
        out = llm.generate(PROMPTS[:1], LONG, use_tqdm=False)[0] if llm.engine.dead is None else None
        assert out is None or out.finish_reason == "error"
        assert "rank 1 of 2" in (llm.engine.dead or out.error)


@needs_ray
@pytest.mark.slow
def test_an_engine_is_started_and_stopped_again_in_one_process_and_one_rank_is_enough(folder):  # noqa: F811
    before, params = belongings(), SamplingParams(temperature=0, max_tokens=5)
    for _ in range(2):
        with LLM(**options(folder, **ray(1))) as llm:
            assert llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].error is None
            others = of_launcher(llm)
        assert gone(others, 15.0) and belongings() == before
