"""The ``[server]`` table of a configuration: where ``minivllm serve`` listens, who may ask, every limit at the door.

Secrets are no part of it: a configuration is shown, compared and recorded.  It names a file that holds the keys.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from minivllm.config.base import Strict, refusal
from minivllm.validation import FieldFault

_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[?[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}\]?")


class ServerConfig(Strict):
    """Sizes are in bytes, times in seconds."""

    model_config = ConfigDict(allow_inf_nan=False)

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0: every network")
    port: int = Field(8000, ge=0, le=65535, description="0: any that is free, which the log then names")
    uds: str | None = Field(None, min_length=1, description="path of a Unix socket to listen on, instead of a port")
    ssl_certfile: str | None = Field(None, description="PEM: serve https with this certificate (chain)")
    ssl_keyfile: str | None = Field(None, description="PEM: its key, if that is not in the same file")
    ssl_ca_certs: str | None = Field(None, description="PEM: who signs the certificates of clients")
    ssl_cert_reqs: Literal[0, 1, 2] = Field(0, description="certificates of clients: 0 none, 1 if there is one, 2 must")
    ssl_ciphers: str | None = Field(None, description="ciphers of TLS 1.2, as OpenSSL writes them")
    served_model_name: list[str] = Field([], description="names that requests may use; none: the model's own")
    api_key_file: str | None = Field(None, description="a file with one key a line; requests then need one of them")
    root_path: str = Field("", description="the path under which a proxy shows the server")
    allowed_origins: list[str] = Field([], description="web pages that may ask from a browser; '*': all")
    allowed_hosts: list[str] = Field(
        [], description="names that the server is asked for by; '*.NAME': all below, '*': all"
    )
    admin: bool = Field(
        False, description="offer /start_profile, /stop_profile, /reset_prefix_cache, /debug/state and the field taps"
    )
    steering_dir: str | None = Field(None, description="a folder of vectors NAME.npy that operators' taps may add")
    tool_parser: str = Field("hermes", min_length=1, description="how calls of tools are written in this model's text")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="of the log on standard error; auto: text on a terminal, else JSON, a line an event"
    )
    log_level: Literal["debug", "info", "warning"] = Field("info", description="debug has polls of /health as well")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="of a request's body; more: 413")
    max_header_bytes: int = Field(32 << 10, ge=1024, description="of a request's headers together; more: 431")
    max_headers: int = Field(100, ge=8, description="headers of a request; more: 431")
    max_n: int = Field(128, ge=1, le=128, description="n of a request")
    max_batch: int = Field(256, ge=1, description="prompts of a request")
    max_branches: int = Field(
        1024, ge=1, description="branches of a request: prompts times the largest of n, best_of and beam_width"
    )
    max_request_cost: int | None = Field(
        None, ge=0, description="tokens that a request may cost (see Shares); more: 400; 0: no bound"
    )
    template_seconds: float = Field(2, gt=0, description="of CPU time for the chat template of a request; more: 400")
    template_mb: int = Field(256, ge=16, description="of memory for it; more: 400")
    max_stop: int = Field(16, ge=0, le=16, description="stop strings of a request, of at most 256 characters each")
    max_logprobs: int = Field(20, ge=0, description="log-probabilities a token")
    max_socket_requests: int = Field(64, ge=1, description="requests that run at once on a WebSocket; more: 429")
    max_queue: int = Field(
        256, ge=0, description="prompts of a key (or address) that may wait beside max_num_seqs that run; more: 429"
    )
    max_inside: int = Field(4096, ge=1, description="prompts of all keys together that may run or wait; more: 429")
    header_timeout: float = Field(10, gt=0, description="for the headers of a request to come")
    body_timeout: float = Field(30, gt=0, description="for the body of a request to come; later: 408")
    idle_timeout: float = Field(60, gt=0, description="that a connection may stay open without a request")
    write_timeout: float = Field(30, gt=0, description="that a reader may take nothing before its request is aborted")
    request_timeout: float = Field(3600, gt=0, description="for a whole answer; later: 408, or an error in the stream")
    ping_interval: float = Field(20, gt=0, description="between pings to a WebSocket, and for each to be answered")
    keep_alive: float = Field(15, gt=0, description="between comments in a stream that has nothing to say")
    stuck_after: float = Field(120, gt=0, description="that a step of the engine may take; longer: it is ended, exit 7")
    stats_interval: float = Field(10, ge=0, description="between lines of the log about throughput; 0: none")
    restart: int = Field(0, ge=0, le=1000, description="times that an engine which has ended is started again")
    drain_timeout: float = Field(30, ge=0, description="for running requests to end after SIGTERM")

    @field_validator("allowed_hosts")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not _HOST.fullmatch(name):
                raise ValueError(f"{name!r}: want a host name or an address without scheme, port or path; *.NAME; or *")
        return names

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        both = [name for name in ("host", "port") if name in self.model_fields_set]
        if self.uds is not None and both:
            raise refusal([FieldFault("uds", f"uds beside server.{both[0]}: want a Unix socket or an address")])
        if self.steering_dir is not None and not self.admin:
            raise refusal([FieldFault("steering_dir", "steering_dir without server.admin: want both")])
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "ssl_cert_reqs"):
                if getattr(self, name):
                    raise refusal([FieldFault(name, f"{name} without server.ssl_certfile: want both")])
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            what = f"ssl_cert_reqs={self.ssl_cert_reqs}: want server.ssl_ca_certs too, who signs them"
            raise refusal([FieldFault("ssl_cert_reqs", what)])
        if self.ssl_ca_certs is not None and not self.ssl_cert_reqs:
            what = "ssl_ca_certs without server.ssl_cert_reqs: want 1 or 2; with 0 nobody is asked"
            raise refusal([FieldFault("ssl_ca_certs", what)])
