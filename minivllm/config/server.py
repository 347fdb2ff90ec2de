"""The ``[server]`` table of a configuration: addresses, access and limits of ``minivllm serve``.

It contains no secrets, because a configuration is printed, compared and recorded.  It names a file that contains the
keys.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from minivllm.config.base import Strict, refuse
from minivllm.config.cluster import check_cluster
from minivllm.errors import shown

_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[?[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}\]?")

# the values of the header Origin that browsers send
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")
_LONGEST_NAME = 256  # largest number of characters of a served name


class ServerConfig(Strict):
    """The options of the server.  Sizes are in bytes, times in seconds."""

    model_config = ConfigDict(allow_inf_nan=False)

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0: all networks")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free port, which the log reports")
    uds: str | None = Field(None, min_length=1, description="path of a Unix socket to listen on, instead of a port")
    ssl_certfile: str | None = Field(None, description="PEM file with the certificate (chain) for https")
    ssl_keyfile: str | None = Field(
        None, description="PEM file with the key of the certificate, if that is another file"
    )
    ssl_ca_certs: str | None = Field(
        None, description="PEM file with the authorities that sign certificates of clients"
    )
    ssl_cert_reqs: Literal[0, 1, 2] = Field(0, description="certificates of clients: 0 ignored, 1 optional, 2 required")
    ssl_ciphers: str | None = Field(None, description="ciphers of TLS 1.2, in OpenSSL's notation")
    served_model_name: list[str] = Field([], description="names of the model in requests; empty: the model's own name")
    api_key_file: str | None = Field(
        None, description="file with an API key per line; requests must then have one of them"
    )
    root_path: str = Field("", description="path of the server behind a proxy")
    allowed_origins: list[str] = Field(
        [], description="web sites whose pages may send requests from a browser; '*': all"
    )
    allowed_hosts: list[str] = Field(
        [], description="accepted host names in requests; '*.NAME': all subdomains, '*': all"
    )
    admin: bool = Field(
        False,
        description="enable /start_profile, /stop_profile, /reset_prefix_cache, /debug/state, /cache/..., the field "
        "taps, lora_dir, weights_dir, /pause, /resume, /update_weights, /sleep, /wake_up, /weights",
    )
    page: bool = Field(True, description="serve the page at / (chat and live engine) and the page at /docs (API)")
    live_interval: float = Field(0.25, ge=0.1, description="time between two states of the engine on open pages")
    max_live_sockets: int = Field(16, ge=0, description="largest number of open pages that show the live engine")
    lora_modules: list[str] = Field(
        [], max_length=4096, description="adapters to serve, each as NAME=FOLDER; requests send the name as model"
    )
    lora_dir: str | None = Field(None, description="folder within which operators may load adapters while it runs")
    weights_dir: str | None = Field(
        None, description="folder within which operators name folders of new weights, for /update_weights"
    )
    prefix_dir: str | None = Field(None, description="folder of the files of exported prefixes, for /cache/...")
    steering_dir: str | None = Field(None, description="folder of vectors NAME.npy that taps may add")
    tool_parser: str = Field(
        "auto",
        min_length=1,
        description="format of reasoning and tool calls in the text of the model; auto: by the chat template",
    )
    reasoning_parser: str | None = Field(
        None, min_length=1, description="format with the tags of the reasoning, if tool_parser has none; vLLM's names"
    )
    responses_dir: str | None = Field(
        None, min_length=1, description="folder in which responses are stored; None: in memory, until the server ends"
    )
    max_responses: int = Field(1000, ge=0, description="stored responses of one API key; more: the oldest are dropped")
    max_responses_bytes: int = Field(
        64 << 20, ge=0, description="bytes of the stored responses of one API key together"
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="format of the log on standard error; auto: text on a terminal, else a JSON line per event"
    )
    log_level: Literal["debug", "info", "warning"] = Field(
        "info", description="lowest level of log events; debug includes requests of /health"
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest body of a request; above: status 413")
    max_header_bytes: int = Field(
        32 << 10, ge=1024, description="largest total size of a request's headers; above: status 431"
    )
    max_headers: int = Field(100, ge=8, description="largest number of headers of a request; above: status 431")
    max_n: int = Field(128, ge=1, le=128, description="largest n of a request")
    max_batch: int = Field(256, ge=1, description="largest number of prompts of a request")
    max_inputs: int = Field(
        2048, ge=1, description="largest number of texts of a request to /v1/embeddings, /v1/score or /v1/rerank"
    )
    max_branches: int = Field(
        1024, ge=1, description="largest number of branches of a request: prompts times max(n, best_of, beam_width)"
    )
    max_request_cost: int | None = Field(
        None, ge=0, description="largest cost of a request in tokens (see Fair shares); above: status 400; 0: no limit"
    )
    template_seconds: float = Field(
        2, gt=0, description="CPU time for the chat template of a request; above: status 400"
    )
    template_mb: int = Field(
        256, ge=16, description="memory in MB for the chat template of a request; above: status 400"
    )
    max_stop: int = Field(
        16, ge=0, le=16, description="largest number of stop strings of a request, of at most 256 characters each"
    )
    max_logprobs: int = Field(20, ge=0, description="largest number of log-probabilities per token")
    max_socket_requests: int = Field(64, ge=1, description="running requests of a WebSocket; above: status 429")
    max_queue: int = Field(
        256,
        ge=0,
        description="waiting prompts of an API key (or address), besides max_num_seqs running; above: status 429",
    )
    max_inside: int = Field(
        4096,
        ge=1,
        description="running and waiting prompts of all keys; above: status 429 for keys that already have some",
    )
    header_timeout: float = Field(10, gt=0, description="time to receive the headers of a request")
    body_timeout: float = Field(30, gt=0, description="time to receive the body of a request; later: status 408")
    idle_timeout: float = Field(60, gt=0, description="time after which a connection without a request is closed")
    write_timeout: float = Field(
        30, gt=0, description="time after which the request of a client that reads nothing is aborted"
    )
    request_timeout: float = Field(
        3600, gt=0, description="time for a complete answer; later: status 408, or an error in the stream"
    )
    ping_interval: float = Field(20, gt=0, description="time between pings of a WebSocket, and time to answer a ping")
    keep_alive: float = Field(15, gt=0, description="time between comments in a stream without tokens")
    stuck_after: float = Field(
        120, gt=0, description="time after which a step of the engine ends the server, exit status 7"
    )
    stats_interval: float = Field(10, ge=0, description="time between log events about throughput; 0: none")
    restart: int = Field(0, ge=0, le=1000, description="number of times that a dead engine is started again")
    replicas: int = Field(1, ge=1, le=64, description="engines, each in a process with a KV cache of its own")
    router: str = Field(
        "least-tokens", min_length=1, description="plug-in that chooses the replica of a request, for replicas above 1"
    )
    router_options: dict[str, Any] = Field({}, description="options of the router")
    replica_retries: int = Field(
        3, ge=0, le=1000, description="number of times that a request without a token moves from a dead replica"
    )
    cluster: Literal["local", "ray"] = Field(
        "local", description="local: replicas are processes of this machine; ray: deployments of Ray Serve"
    )
    ray_address: str | None = Field(
        None, min_length=1, description="Ray cluster to join, host:port or auto; None: start one on this machine"
    )
    autoscaling: dict[str, Any] = Field(
        {},
        description="options of Ray Serve's autoscaling, such as max_replicas; {}: the number of replicas is fixed",
    )
    drain_timeout: float = Field(30, ge=0, description="time for running requests to end after SIGTERM")

    @field_validator("allowed_hosts")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        """Return the accepted host names unchanged.  ValueError if one has a scheme, a port or a path."""
        for name in names:
            if not _HOST.fullmatch(name):
                raise ValueError(
                    f"{name!r}: expected a host name or an address without scheme, port or path; *.NAME; or *"
                )
        return names

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        """Return the accepted origins unchanged.  ValueError for a text that no browser sends."""
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{shown(origin)}: expected an origin as browsers send it, such as https://a.example or "
                    "http://localhost:3000, without a path; or *"
                )
        return origins

    @field_validator("served_model_name")
    @classmethod
    def _check_served(cls, names: list[str]) -> list[str]:
        """Return the served names unchanged.  ValueError for one that is empty, too long or not printable."""
        for name in names:
            if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
                raise ValueError(f"{shown(name)}: expected a name of 1 to {_LONGEST_NAME} printable characters")
        return names

    @field_validator("root_path")
    @classmethod
    def _check_root(cls, path: str) -> str:
        """Return the path unchanged.  ValueError if it cannot be the beginning of a request's path."""
        if path and (not path.startswith("/") or path.endswith("/")):
            raise ValueError(f"{shown(path)}: expected a path that begins with / and does not end with it, as /llm")
        return path

    def __init__(self, **values: Any) -> None:
        """Set the options and check that none contradicts another.  ConfigError if one does."""
        super().__init__(**values)
        address = [name for name in ("host", "port") if name in self.model_fields_set]
        if self.uds is not None and address:
            refuse("uds", f"uds together with server.{address[0]}: set a Unix socket or an address, not both")
        check_cluster(self)
        for name in ("router", "router_options", "replica_retries"):
            if self.replicas == 1 and not self.autoscaling and name in self.model_fields_set:
                refuse(name, f"{name} without server.replicas above 1: set both, or neither")
        if self.replicas > 1 and "restart" in self.model_fields_set:
            refuse(
                "restart", "restart together with server.replicas above 1, which are always started again: remove it"
            )
        if self.steering_dir is not None and not self.admin:
            refuse("steering_dir", "steering_dir without server.admin: set both, or neither")
        for name in ("lora_dir", "weights_dir"):
            if getattr(self, name) is not None and not self.admin:
                refuse(name, f"{name} without server.admin: set both, or neither")
        names = [module.partition("=")[0] for module in self.lora_modules]
        for number, module in enumerate(self.lora_modules):
            name, _, folder = module.partition("=")
            if not name or not folder or len(name) > 256:
                refuse(f"lora_modules.{number}", f"lora_modules: {module[:80]!r}: expected NAME=FOLDER")
            if name in (*names[:number], *self.served_model_name):
                refuse(f"lora_modules.{number}", f"lora_modules: the name {name[:80]!r} is there twice")
        if self.prefix_dir is not None and not self.admin:
            refuse("prefix_dir", "prefix_dir without server.admin: set both, or neither")
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "ssl_cert_reqs"):
                if getattr(self, name):
                    refuse(name, f"{name} without server.ssl_certfile: set both, or neither")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            refuse(
                "ssl_cert_reqs", f"ssl_cert_reqs={self.ssl_cert_reqs} without server.ssl_ca_certs: set both, or neither"
            )
        if self.ssl_ca_certs is not None and not self.ssl_cert_reqs:
            refuse(
                "ssl_ca_certs",
                "ssl_ca_certs without server.ssl_cert_reqs: set it to 1 or 2; 0 ignores certificates of clients",
            )
