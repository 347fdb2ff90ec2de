"""Where a server listens: a TCP address or a Unix socket, with TLS or without, and the URL by which it is reached."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from typing import TYPE_CHECKING

from minivllm.errors import ConfigError, ResourceError, shown
from minivllm.files import SMALL, check

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

MOST_PATH = 107  # bytes of the path of a Unix socket (sun_path of Linux, less its end)


def bind(server: ServerConfig) -> socket.socket:
    """A socket that is bound and does not listen yet.  ResourceError if the address cannot be had."""
    if server.uds is not None:
        return _bind_path(server.uds)
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((server.host, server.port))
    except OSError as exc:
        bound.close()
        what = f"cannot listen on {server.host}:{server.port}: {exc.strerror or exc}"
        raise ResourceError(f"{what}; choose another --port or --host") from exc
    bound.set_inheritable(False)
    return bound


def _bind_path(path: str) -> socket.socket:
    """A Unix socket.  What a server that was killed has left at the path is replaced, anything else is not."""
    if len(os.fsencode(path)) > MOST_PATH:
        raise ConfigError(f"server.uds: {path[:80]}...: want a path of at most {MOST_PATH} bytes")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"server.uds={path!r}: something that is no socket is there; choose another path")
        if _answers(path):
            raise ResourceError(f"cannot listen on {path}: another program does; choose another --uds")
        os.unlink(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
    except OSError as exc:
        bound.close()
        raise ResourceError(f"cannot listen on {path}: {exc.strerror or exc}; choose another --uds") from exc
    bound.set_inheritable(False)
    return bound


def _answers(path: str) -> bool:
    """Whether a program listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # no right to ask, or it is too busy to answer
            return True
    return True


def release(bound: socket.socket, server: ServerConfig) -> None:
    """Close the socket, if uvicorn has not; a Unix socket leaves nothing at its path."""
    bound.close()
    if server.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(server.uds)


def url_of(server: ServerConfig, bound: socket.socket) -> str:
    """``http://127.0.0.1:8000``, ``https://[::1]:8000``, ``unix:/run/minivllm.sock``."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{os.path.abspath(server.uds or '')}"
    host, port = bound.getsockname()[:2]
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls(server: ServerConfig) -> ssl.SSLContext | None:
    """What is served with TLS is served with; None without.  ConfigError for files that cannot be used."""
    if server.ssl_certfile is None:
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(server, name)
        if path is not None:  # OpenSSL would wait for a FIFO
            check(path, SMALL, name=f"server.{name}={shown(path)}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        files = " and ".join(
            f"server.{name}={value!r}"
            for name in ("ssl_certfile", "ssl_keyfile")
            if (value := getattr(server, name)) is not None
        )
        key = "" if server.ssl_keyfile else "; give the key as --ssl-keyfile, or put it into the same file"
        raise ConfigError(f"{files}: want a certificate and its key as PEM: {_reason(exc)}{key}") from exc
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    if server.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(server.ssl_ca_certs)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"server.ssl_ca_certs={server.ssl_ca_certs!r}: want PEM: {_reason(exc)}") from exc
    if server.ssl_ciphers is not None:
        try:
            context.set_ciphers(server.ssl_ciphers)
        except ssl.SSLError as exc:
            raise ConfigError(
                f"server.ssl_ciphers={server.ssl_ciphers!r}: OpenSSL knows none of them; `openssl ciphers` lists some"
            ) from exc
    return context


def _no_password() -> str:
    """Asked for the passphrase of a key: OpenSSL would ask at the terminal, where nobody may sit."""
    raise ValueError("the key has a passphrase; want one without (openssl pkey -in KEY -out PLAIN)")


def _reason(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError):
        words = (exc.reason or "no PEM").lower().replace("_", " ")
        if words in ("no certificate assigned", "key values mismatch"):
            return "the key is another certificate's"
        return "no PEM is in it" if words == "no pem" else words
    return getattr(exc, "strerror", None) or str(exc)
