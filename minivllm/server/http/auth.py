"""API keys: read from a file, compared in constant time.  Which key it was separates tenants; no key is ever logged.

The routes of ``--admin`` want the operator's: ``MINIVLLM_ADMIN_KEY``, or the only key there is.  Where there is none,
or there are several (of several users), they want a token that is made, and told, at the start.
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
    """One key a line; empty lines and lines that begin with # do not count.  ConfigError if it holds none."""
    name = f"server.api_key_file={shown(path)}"
    lines = files.read_given(path, name=name).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"{name}: holds no key; want one a line")
    return keys


def admin_token(server: ServerConfig, keys: Sequence[str], given: str = "") -> str | None:
    """What the routes of ``--admin`` want: ``given``, which is ``MINIVLLM_ADMIN_KEY``, or a new token; None if any key
    will do, since there is one, or if there are no such routes.  ConfigError if others than this machine could ask
    without a key."""
    if not server.admin or (len(set(keys)) == 1 and not given):
        return None
    if not keys and not given and not is_loopback(server.host.lower()):
        what = f"server.admin without a key on server.host={server.host!r}"
        raise ConfigError(
            f"{what}: want a key (--api-key, {ENVIRONMENT}, --api-key-file, {ADMIN}), or --host 127.0.0.1"
        )
    return given or secrets.token_urlsafe(24)


class ApiKeys:
    """The keys that are accepted; none: everybody is."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Mapping[bytes, bytes]) -> str | None:
        """A name for the key of ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; '' where none is needed, None if
        there is none or a wrong one.  It takes as long whichever key is right."""
        if not self._digests:
            return ""
        given = headers.get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        digest, found = _digest(key), None
        for number, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = f"key-{number}"
        return found if key else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
