"""Check the options of servers on a Ray cluster."""

from __future__ import annotations

from typing import Any

from minivllm.config.base import refuse

# option -> reason why a server on Ray does not use it
UNUSED = {
    "uds": "Ray Serve listens on a port",
    "ssl_certfile": "Ray Serve listens without TLS; put a proxy before it",
    "router_options": "the routers of Ray Serve have no options of minivllm",
    "replica_retries": "Ray Serve sends a request to one replica",
    "restart": "a replica always starts its engine again",
    "admin": "a request of an operator would reach one replica of several",
    "responses_dir": "the requests of a conversation reach different replicas",
    "max_responses": "the requests of a conversation reach different replicas",
}
ONLY = ("ray_address", "autoscaling")
ROUTERS = ("least-tokens", "session")  # routers for which Ray Serve has an equivalent


def check_cluster(server: Any) -> None:
    """Raise ConfigError for options of a ``ServerConfig`` that contradict its option ``cluster``."""
    given = server.model_fields_set
    if server.cluster == "local":
        for name in ONLY:
            if name in given:
                refuse(name, f"{name} without server.cluster=ray: set both, or neither")
        return
    for name, why in UNUSED.items():
        if name in given and getattr(server, name) != type(server).model_fields[name].default:
            refuse(name, f"{name} together with server.cluster=ray: {why}; remove it")
    if server.router not in ROUTERS:
        why = f"Ray Serve chooses the replica of a request; expected {' or '.join(ROUTERS)}"
        refuse("router", f"router={server.router!r} together with server.cluster=ray: {why}")
    most = server.autoscaling.get("max_replicas")
    if server.autoscaling and (type(most) is not int or most < server.replicas):
        expected = f"expected max_replicas, a number of at least server.replicas={server.replicas}"
        refuse("autoscaling", f"autoscaling={server.autoscaling}: {expected}")
    if "min_replicas" in server.autoscaling:
        refuse("autoscaling", "autoscaling.min_replicas: use server.replicas, which is the smallest number")
