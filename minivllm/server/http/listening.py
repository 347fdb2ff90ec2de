"""Bind the listening socket (TCP or Unix), load the TLS files, and return the server's URL."""

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

MOST_PATH = 107  # largest size in bytes of the path of a Unix socket (sun_path of Linux without the final 0)


def bind(server: ServerConfig) -> socket.socket:
    """Return a socket that is bound to the server's address and does not listen yet.

    Raise ResourceError if the address is in use or not available, ConfigError for an unusable path of a Unix socket.
    """
    if server.uds is not None:
        return _bind_path(server.uds)
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((server.host, server.port))
    except OSError as exc:
        bound.close()
        problem = f"cannot listen on {server.host}:{server.port}: {exc.strerror or exc}"
        raise ResourceError(f"{problem}; choose another --port or --host") from exc
    bound.set_inheritable(False)
    return bound


def _bind_path(path: str) -> socket.socket:
    """Return a Unix socket bound to a path.  ConfigError for a path that is too long or is another file; ResourceError
    if it cannot be bound or another program listens there.

    A socket file without a listener, which a killed server has left, is replaced.  No other file is."""
    if len(os.fsencode(path)) > MOST_PATH:
        raise ConfigError(f"server.uds: {path[:80]}...: expected a path of at most {MOST_PATH} bytes")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"server.uds={path!r}: the file there is not a socket; choose another path")
        if _answers(path):
            raise ResourceError(f"cannot listen on {path}: another program listens there; choose another --uds")
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
    """Return whether a program listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # no permission to connect, or the program is too busy to accept
            return True
    return True


def release(bound: socket.socket, server: ServerConfig) -> None:
    """Close the listening socket and remove the file of a Unix socket."""
    bound.close()
    if server.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(server.uds)


def url_of(server: ServerConfig, bound: socket.socket) -> str:
    """Return the server's URL, such as ``http://127.0.0.1:8000``, ``https://[::1]:8000`` or ``unix:/run/a.sock``."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{os.path.abspath(server.uds or '')}"
    host, port = bound.getsockname()[:2]
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls(server: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS settings, or None if the server has no certificate.  Raise ConfigError for unusable files."""
    if server.ssl_certfile is None:
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(server, name)
        if path is not None:  # OpenSSL would wait for ever on a FIFO
            check(path, SMALL, name=f"server.{name}={shown(path)}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        files = f"server.ssl_certfile={server.ssl_certfile!r}"
        key = "; give the key as --ssl-keyfile, or put it into the same file"
        if server.ssl_keyfile is not None:
            files += f" and server.ssl_keyfile={server.ssl_keyfile!r}"
        if server.ssl_keyfile:
            key = ""
        raise ConfigError(f"{files}: expected a certificate and its key as PEM: {_reason(exc)}{key}") from exc
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    if server.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(server.ssl_ca_certs)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"server.ssl_ca_certs={server.ssl_ca_certs!r}: expected PEM: {_reason(exc)}") from exc
    if server.ssl_ciphers is not None:
        try:
            context.set_ciphers(server.ssl_ciphers)
        except ssl.SSLError as exc:
            name = f"server.ssl_ciphers={server.ssl_ciphers!r}"
            raise ConfigError(f"{name}: OpenSSL has none of these ciphers; `openssl ciphers` lists them") from exc
    return context


def _no_password() -> str:
    """Raise ValueError in place of a passphrase for the key.  Otherwise OpenSSL would read one from the terminal."""
    raise ValueError("the key has a passphrase; expected a key without one (openssl pkey -in KEY -out PLAIN)")


def _reason(exc: Exception) -> str:
    """Return the cause of an error of a TLS file in plain words."""
    if isinstance(exc, ssl.SSLError):
        words = (exc.reason or "no PEM").lower().replace("_", " ")
        if words in ("no certificate assigned", "key values mismatch"):
            return "the key belongs to another certificate"
        return "the file contains no PEM" if words == "no pem" else words
    return getattr(exc, "strerror", None) or str(exc)
