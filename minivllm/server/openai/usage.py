"""What a request wants to be told of its usage: tokens in a stream, and joules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm.server.errors import ApiError

if TYPE_CHECKING:
    from .generate import Service


def stream_options(body: Any) -> tuple[bool, bool]:
    """(usage at the end, usage in every chunk).  ApiError (400) for options of a stream where none was asked for."""
    options = body.stream_options
    if body.include_energy and body.stream and not (options and options.include_usage):
        what = "include_energy: want stream_options.include_usage beside it in a stream, whose usage it is a part of"
        raise ApiError(400, what, "include_energy")
    if options is None:
        return False, False
    if not body.stream:
        raise ApiError(400, "stream_options: want it only with stream=true", "stream_options")
    every = bool(options.continuous_usage_stats) and options.include_usage is not False
    return bool(options.include_usage) or every, every


def asks_energy(service: Service, body: Any) -> bool:
    """ApiError (400) where joules are asked for and no counter is read."""
    if body.include_energy and not service.client.info.energy:
        what = "include_energy: this server counts no joules; want it started with --set energy=on"
        raise ApiError(400, what, "include_energy")
    return bool(body.include_energy)
