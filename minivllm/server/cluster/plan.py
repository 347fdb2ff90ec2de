"""Describe a server as an application of Ray Serve, as plain data: its arguments, resources and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import minivllm
from minivllm.errors import ConfigError
from minivllm.server.replicas.weights import model_files

if TYPE_CHECKING:
    from minivllm.config import Loaded

NAME = "minivllm"  # name of the application of Ray Serve
DEPLOYMENT = "Engine"
BUILDER = "minivllm.server.cluster.deployment:build"
HEALTH_PERIOD = 1.0  # seconds between two checks of a replica
HEALTH_TIMEOUT = 10.0
# Ray Serve's router that sends all requests with the same X-Session-Id header to one replica
SESSIONS = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
STARTS = 2  # number of tries to start a replica, after which the deployment has failed


def arguments(loaded: Loaded) -> dict[str, Any]:
    """Return a configuration as JSON data, from which a replica restores it."""
    found = loaded.engine.model_dump(mode="json", exclude_unset=True)
    if loaded.sampling:
        found["sampling"] = dict(loaded.sampling)
    found["server"] = loaded.server.model_dump(mode="json", exclude_unset=True)
    return found


def facts(loaded: Loaded) -> dict[str, Any]:
    """Return the version and the files of the model, in which all replicas of a deployment must agree.

    A deployment with other facts is a new version, to which Serve updates the replicas."""
    return {"version": minivllm.__version__, "files": model_files(loaded.engine.model)}


def check_facts(loaded: Loaded, expected: Mapping[str, Any]) -> None:
    """Raise ConfigError if this machine has another version of minivllm, or other files of the model."""
    if minivllm.__version__ != expected["version"]:
        here = f"minivllm {minivllm.__version__} is installed here, and the server runs {expected['version']}"
        raise ConfigError(f"{here}; install the same version on all nodes")
    if sizes(model_files(loaded.engine.model)) != sizes(expected["files"]):
        raise ConfigError(f"the files of {loaded.engine.model} differ from those of the server; copy the same files")


def sizes(files: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of files, because copies on other machines have other times."""
    return {name: size for name, (size, _) in files.items()}


def most_replicas(loaded: Loaded) -> int:
    """Return the largest number of replicas."""
    server = loaded.server
    return max(server.replicas, int(server.autoscaling.get("max_replicas", 0)))


def resources(loaded: Loaded, gpus: float) -> dict[str, float]:
    """Return the resources of a replica in a cluster with ``gpus`` GPUs.

    All GPUs of a replica are on one node, because the replica is one actor."""
    engine = loaded.engine
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and gpus > 0)
    size = engine.tensor_parallel_size
    return {"num_cpus": 1, "num_gpus": size} if on_gpu else {"num_cpus": size}


def check_room(loaded: Loaded, nodes: Mapping[str, Mapping[str, float]]) -> None:
    """Raise ConfigError if nodes (name -> resources) have no places for the replicas that start at once."""
    gpus = sum(have.get("GPU", 0) for have in nodes.values())
    need = {"CPU" if name == "num_cpus" else "GPU": n for name, n in resources(loaded, gpus).items()}
    places = {name: int(min(have.get(kind, 0) // n for kind, n in need.items())) for name, have in nodes.items()}
    total, wanted = sum(places.values()), loaded.server.replicas
    if total >= wanted:
        return
    each = " and ".join(f"{n:g} {kind}" for kind, n in need.items())
    have = "; ".join(
        f"{name} has {' and '.join(f'{nodes[name].get(kind, 0):g} {kind}' for kind in need)}, so {places[name]}"
        for name in nodes
    )
    advice = f"use at most --replicas {total}" if total else "lower tensor_parallel_size or use device=cpu"
    raise ConfigError(
        f"server.replicas={wanted}: {wanted} places are needed, each with {each} of one node, and the Ray cluster has "
        f"{total}: {have or 'no node that is alive'}; add nodes, or {advice}"
    )


def deployment_options(loaded: Loaded, gpus: float) -> dict[str, Any]:
    """Return the options of Ray Serve's deployment: the resources, limits and number of its replicas."""
    server, engine = loaded.server, loaded.engine
    inside = min(engine.max_num_seqs + server.max_queue, server.max_inside)
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": resources(loaded, gpus),
        "max_ongoing_requests": inside,
        "graceful_shutdown_timeout_s": server.drain_timeout,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": HEALTH_PERIOD,
        "health_check_timeout_s": HEALTH_TIMEOUT,
        "max_constructor_retry_count": STARTS,
    }
    if server.router == "session":
        options["request_router_config"] = {"request_router_class": SESSIONS}
    if not server.autoscaling:
        return options | {"num_replicas": server.replicas}
    target = {"min_replicas": server.replicas, "target_ongoing_requests": engine.max_num_seqs}
    return options | {"autoscaling_config": target | dict(server.autoscaling)}


def run_file(loaded: Loaded) -> dict[str, Any]:
    """Return the configuration for ``serve run`` and ``serve deploy``, for a file in YAML."""
    server = loaded.server
    args = arguments(loaded)
    # Ray Serve listens on its own address and runs in its own cluster, so these settings are left out
    for name in ("host", "port", "ray_address"):
        args["server"].pop(name, None)
    application = {"name": NAME, "route_prefix": "/", "import_path": BUILDER, "args": args}
    return {"http_options": {"host": server.host, "port": server.port}, "applications": [application]}
