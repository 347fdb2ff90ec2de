"""API keys, from ``--api-key`` or else ``MINIVLLM_API_KEY``, and from a file.

They are compared in constant time and never logged.  Each key is a tenant of its own.

The operator's routes (``--admin``) require ``MINIVLLM_ADMIN_KEY``.  If that is not set, they require the server's only
API key.  If there is no API key or several, they require a token that the server generates and logs at its start.
Without any key this is allowed on a loopback host only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from minivllm import files
from minivllm.errors import ConfigError, shown

from .cross_site import is_loopback

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

ENVIRONMENT, ADMIN = "MINIVLLM_API_KEY", "MINIVLLM_ADMIN_KEY"


def read_keys(path: str) -> list[str]:
    """Read the API keys from a file with one key a line.  Empty lines and lines that begin with # are skipped.

    Raise ConfigError if the file has no key.
    """
    name = f"server.api_key_file={shown(path)}"
    lines = files.read_given(path, name=name).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"{name}: contains no key; expected one key a line")
    return keys


def check_keys(keys: Iterable[str], server: ServerConfig) -> None:
    """Raise ConfigError for a key that no request could have: a client sends it in a header, whose value has no control
    characters and no spaces at its ends, and whose size is limited.  The message does not contain the key."""
    # the other headers of a request need room too
    most = server.max_header_bytes // 2
    names = f"--api-key, {ENVIRONMENT}, {ADMIN} or a key of --api-key-file"
    for key in keys:
        size = len(key.encode())
        if size > most:
            advice = f"expected at most {most}, half of server.max_header_bytes"
            raise ConfigError(f"{names}: a key has {size} bytes; {advice}")
        if key != key.strip():
            raise ConfigError(f"{names}: a key begins or ends with a space, which headers lose; remove the space")
        if any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in key):
            raise ConfigError(f"{names}: a key contains a control character, which no header may have; remove it")


def admin_token(server: ServerConfig, keys: Sequence[str], admin_key: str = "") -> str | None:
    """Return the token that the operator's routes require: ``admin_key`` (``MINIVLLM_ADMIN_KEY``) or a new one.

    None means that the server's only API key is required, or that the operator's routes are disabled.
    Raise ConfigError if the routes could be reached from another machine and there is no key at all.
    """
    if not server.admin:
        return None
    if admin_key:
        return admin_key
    if len(set(keys)) == 1:
        return None
    if not keys and not is_loopback(server.host.lower()):
        problem = f"server.admin without a key on server.host={server.host!r}"
        options = f"--api-key, {ENVIRONMENT}, --api-key-file, {ADMIN}"
        raise ConfigError(f"{problem}: expected a key ({options}) or --host 127.0.0.1")
    return secrets.token_urlsafe(24)


class ApiKeys:
    """The accepted API keys.  Without any, every request is accepted.

    ``operator`` is the operator's key among them, None for none."""

    def __init__(self, keys: Iterable[str] = (), operator: str | None = None) -> None:
        unique = list(dict.fromkeys(keys))
        self._digests = [_digest(key.encode()) for key in unique]
        self._operator = f"key-{unique.index(operator)}" if operator in unique else None

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the name of a request's key, given as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``.

        Return "" if no key is required, and None if the key is missing or wrong.
        The time taken does not depend on which key matches.
        """
        if not self._digests:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        digest = _digest(key)
        found = None
        for number, accepted in enumerate(self._digests):
            if hmac.compare_digest(digest, accepted):
                found = f"key-{number}"
        return found if key else None

    def sees_all(self, tenant: str) -> bool:
        """Return whether a tenant may see the requests of all tenants: the operator, or the only tenant."""
        return len(self._digests) < 2 or tenant == self._operator

    def identity(self, tenant: str) -> str:
        """Return a text that identifies the key of a tenant even if other keys are added or removed.  "" without a key.

        It is not the key, and must not be shown, because a guessed key could be compared with it."""
        return self._digests[int(tenant.removeprefix("key-"))].hex() if tenant else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
