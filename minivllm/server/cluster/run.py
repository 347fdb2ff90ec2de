"""Run ``minivllm serve --cluster ray``: join or start a Ray cluster, deploy the replicas, and watch them.

SIGHUP            read the configuration again and update the replicas, one share after the other
SIGTERM, SIGINT   remove the application, whose replicas end their requests; exit with 0
Ray stops, or the application fails to run: exit with an error
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, EngineDeadError, ResourceError, describe_error
from minivllm.plugins.executor.ray_launcher import OBJECTS, TEMPORARY, check_address, refused
from minivllm.server import logs
from minivllm.server.http.auth import check_keys
from minivllm.server.http.listening import bind
from minivllm.server.serve import check_config

from . import plan

if TYPE_CHECKING:
    from minivllm.config import Loaded

LOOK = 0.5  # seconds between two looks at the application
GONE = 5.0  # seconds without an answer of the cluster after which it counts as stopped
RUNNING, BROKEN = "RUNNING", ("DEPLOY_FAILED", "UNHEALTHY", "NOT_STARTED", "DELETING")


def check_installed() -> None:
    """Raise ConfigError if Ray Serve is not installed or cannot be imported."""
    missing = importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None
    if missing:
        raise ConfigError("cluster=ray: Ray is not installed. Do: pip install 'minivllm[ray-serve]'")
    try:
        import ray.serve  # noqa: F401
    except ImportError as e:
        text = f"cluster=ray: Ray Serve cannot be imported ({e}). Do: pip install 'minivllm[ray-serve]'"
        raise ConfigError(text) from e


def serve_on_ray(loaded: Loaded, keys: Sequence[str], reload: Callable[[], Loaded]) -> int:
    """Serve on a Ray cluster until a signal comes, and return the exit code.

    ConfigError if Ray is missing or has no room, ResourceError if the cluster or the address cannot be used, and
    EngineDeadError if Ray stops or the replicas cannot run.
    """
    check_keys(keys, loaded.server)
    check_config(loaded)
    prepare(loaded)
    check_installed()
    bound = bind(loaded.server)  # a port in use is reported before a cluster is started
    host, port = bound.getsockname()[:2]
    bound.close()
    with cluster(loaded) as ray, stopping() as signals:
        nodes = {node["NodeManagerHostname"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        plan.check_room(loaded, nodes)
        server = ServeApplication(ray, host, port)
        try:
            server.deploy(loaded, keys)
            server.wait(signals)
            if not signals.end.is_set():
                url = f"http://{host}:{port}"
                logs.event(
                    "serving", sentence=f"ready at {url}; Ctrl-C ends it", url=url, replicas=loaded.server.replicas
                )
            while not signals.end.wait(LOOK):
                if signals.update.is_set():
                    signals.update.clear()
                    server.update(reload, keys, signals)
                server.check()
        finally:
            server.remove()
    return 0


def prepare(loaded: Loaded) -> None:
    """Set the environment variables that Ray reads at its import."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not loaded.server.ray_address and "RAY_AUTH_MODE" not in os.environ:
        # without a token in the environment, Ray would write one to the user's home folder
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class Signals:
    """``end`` is set by SIGTERM and SIGINT, ``update`` by SIGHUP."""

    def __init__(self) -> None:
        self.end, self.update = threading.Event(), threading.Event()


@contextlib.contextmanager
def stopping() -> Iterator[Signals]:
    """Handle the signals within the context, in place of Ray's handlers.  Yield the events that they set: ``end``
    (SIGTERM, SIGINT) and ``update`` (SIGHUP)."""
    found = Signals()
    events = {signal.SIGTERM: found.end, signal.SIGINT: found.end, signal.SIGHUP: found.update}
    before = {number: signal.signal(number, lambda *_, event=event: event.set()) for number, event in events.items()}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def cluster(loaded: Loaded) -> Iterator[Any]:
    """Join the cluster at ``server.ray_address``, or start one here that ends with the context.  Yield the module
    ``ray``.  ResourceError if the cluster refuses or cannot start."""
    address = loaded.server.ray_address
    if address:
        check_address(address)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {"address": address}
        if not address:
            size = plan.most_replicas(loaded) * loaded.engine.tensor_parallel_size
            options = {"address": "local", "num_cpus": max(size, os.cpu_count() or 1), "include_dashboard": False}
            options |= {"object_store_memory": OBJECTS, "_temp_dir": folder}
            options |= {"num_gpus": 0} if loaded.engine.device == "cpu" else {}
        import ray

        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as e:  # the library may raise any exception
            raise ResourceError(refused(address or "", e)) from e
        try:
            yield ray
        finally:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.shutdown()


class ServeApplication:
    """The application of Ray Serve in a cluster, and its state."""

    def __init__(self, ray: Any, host: str, port: int) -> None:
        from ray import serve

        self.serve = serve
        self.loaded: Any = None  # the configuration of the replicas
        # in a cluster that others have started, the processes of Ray Serve may serve other applications, so they stay
        self.alone = not any(actor for actor in _serve_actors(ray))
        address, _, number = ray.get_runtime_context().gcs_address.rpartition(":")
        self.head = (address.strip("[]"), int(number))
        self.answered = time.monotonic()
        try:
            serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
        except Exception as e:  # the library may raise any exception
            raise ResourceError(f"Ray Serve cannot start: {describe_error(e)}") from e

    def deploy(self, loaded: Loaded, keys: Sequence[str]) -> None:
        """Begin to replace the replicas by replicas of a configuration.  ConfigError if Serve refuses the
        configuration."""
        from .deployment import application

        try:
            target = application(plan.arguments(loaded), keys)
            self.loaded = loaded
            target = self.serve.RunTarget(target=target, name=plan.NAME, route_prefix="/")
            self.serve.run_many([target], wait_for_applications_running=False)
        except (ValueError, TypeError) as e:
            raise ConfigError(f"Ray Serve refuses the deployment: {' '.join(str(e).split())[:400]}") from e

    def state(self) -> tuple[str, str]:
        """Return the status of the application and its explanation.  EngineDeadError if Ray has stopped."""
        self.check_head()
        try:
            found = self.serve.status().applications.get(plan.NAME)
        except Exception as e:  # the library may raise any exception
            raise EngineDeadError(f"Ray Serve does not answer: {describe_error(e)}") from e
        if found is None:
            return "NOT_STARTED", "the application was removed"
        return str(found.status.value), cause([one.message for one in found.deployments.values()] or [found.message])

    def check_head(self) -> None:
        """Raise EngineDeadError if the head of the cluster has not answered for a while.

        Ray's own calls would wait for a minute, and then end the process."""
        try:
            socket.create_connection(self.head, GONE).close()
            self.answered = time.monotonic()
        except OSError as e:
            if time.monotonic() - self.answered > GONE or isinstance(e, ConnectionRefusedError):
                raise EngineDeadError(f"the Ray cluster at {self.head[0]}:{self.head[1]} has stopped: {e}") from e

    def wait(self, signals: Signals) -> None:
        """Wait until all replicas run or a signal arrives.  EngineDeadError if the replicas cannot run."""
        while not signals.end.is_set():
            status, why = self.state()
            if status == RUNNING:
                return
            if status in BROKEN[:2]:
                raise EngineDeadError(f"the replicas cannot run ({status}): {why}")
            signals.end.wait(LOOK)

    def update(self, reload: Callable[[], Loaded], keys: Sequence[str], signals: Signals) -> None:
        """Reload the configuration and update the replicas, or keep them if the configuration is wrong."""
        before = self.loaded
        try:
            loaded = reload()
            check_config(loaded)
            self.deploy(loaded, keys)
        except ConfigError as e:
            logs.event("not updated", logging.ERROR, f"the replicas stay as they are: {e}", reason=str(e))
            return
        try:
            self.wait(signals)
        except EngineDeadError as e:
            self.check_head()
            text = f"the update failed, and the replicas return to their configuration: {e}"
            logs.event("not updated", logging.ERROR, text, reason=str(e))
            self.deploy(before, keys)
            return
        logs.event("updated", sentence="all replicas have the configuration as it is now")

    def check(self) -> None:
        """Raise EngineDeadError if Ray has stopped, or the application was removed."""
        status, why = self.state()
        if status in ("NOT_STARTED", "DELETING"):
            raise EngineDeadError(f"the application of Ray Serve does not run: {why}")

    def remove(self) -> None:
        """Remove the application.  Its replicas first finish their requests."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            socket.create_connection(self.head, 1).close()
            self.serve.delete(plan.NAME)
            if self.alone:
                self.serve.shutdown()


def cause(messages: Sequence[str]) -> str:
    """Return the errors in messages of Ray Serve, which contain the tracebacks of replicas."""
    found = []
    for text in messages:
        errors = re.findall(r"^(?:\x1b\[\d+m)?(?:[\w.]*\.)?(\w+(?:Error|Exception): .*)", text, re.MULTILINE)
        found.append(errors[-1] if errors else " ".join(text.split())[-400:])
    return "; ".join(dict.fromkeys(found))


def _serve_actors(ray: Any) -> list[Any]:
    """Return the names of the actors of Ray Serve in the cluster."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [actor for actor in named if actor["namespace"] == "serve"]


def write_file(loaded: Loaded, path: str) -> None:
    """Write the configuration for ``serve run`` to a file in YAML."""
    import yaml

    check_config(loaded)
    text = "# serve run " + Path(path).name + "\n" + yaml.safe_dump(plan.run_file(loaded), sort_keys=False)
    Path(path).write_text(text, encoding="utf-8")
