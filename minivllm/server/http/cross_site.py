"""What a web page of somebody else could make a browser send to this server, and how such a request is told apart.

    DNS rebinding   a name of the page's owner that suddenly means this machine: the ``Host`` is that name
    cross-site      a form, an image or ``fetch``: the browser says where it comes from, in ``Origin`` and
                    ``Sec-Fetch-Site`` (Fetch Metadata), and asks beforehand (CORS) for what no form can send, as JSON

Who is no browser sends no ``Origin`` and any ``Host`` it likes; what is checked here does not stop it, and need not.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from minivllm.server.errors import ApiError, printable

Headers = Sequence[tuple[bytes, bytes]]
NAMES = 256  # of hosts that are remembered, each with what it is answered
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing
HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::[0-9]{1,5})?")
# what names end with that no public DNS has (RFC 6761, 6762, 8375, ICANN's .internal; .lan and .svc by custom)
PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".lan", ".svc")
JSON_WANTED = "want Content-Type: application/json (with curl: -H 'Content-Type: application/json')"


def values(headers: Headers, name: bytes) -> list[str]:
    """All values of a header, whose names are in lower case."""
    return [value.decode("latin-1") for key, value in headers if key == name]


def is_loopback(host: str) -> bool:
    """Whether a name or an address means the machine that asks."""
    address = _address(host)
    return host == "localhost" or host.endswith(".localhost") if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if found.version == 6 else found


class Hosts:
    """The names under which the server may be asked for.

    Always: loopback names, the address that a connection came to, and ``allowed``, in which ``*.example.com`` stands
    for all names below it and ``*`` for everything.  If ``allowed`` is empty and the server listens to more than
    loopback, also: with keys every name, since a page has no key; without keys every IP address and every name that
    no public DNS has, neither of which can be rebound.
    """

    def __init__(self, allowed: Iterable[str], listens: str, keys: bool) -> None:
        self.allowed = frozenset(name.lower().strip("[]") for name in allowed)
        self._below = tuple(name[1:] for name in self.allowed if name.startswith("*."))
        more = not self.allowed and not is_loopback(listens.lower())
        self._all, self._private = "*" in self.allowed or (more and keys), more and not keys
        self._own = {listens.lower(), socket.gethostname().lower()}
        self._serves = lru_cache(NAMES)(self._looked_up)  # most clients ask for one name

    def check(self, headers: Headers, reached: str = "", version: str = "1.1") -> None:
        """ApiError: 400 for no ``Host``, several or a malformed one, 403 for one that is not served.  ``reached``: the
        address that the connection came to."""
        given = values(headers, b"host")
        if not given and version in ("1.0", "0.9"):
            return
        found = HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None:
            said = f"Host: {printable(given[0], 100)}" if len(given) == 1 else f"{len(given)} Host headers"
            raise ApiError(400, f"{said}: want one, a name or an address and perhaps a port")
        name = found[1].lower().strip("[]").removesuffix(".")
        if not self._serves(name, reached):
            name = printable(name, 100)
            raise ApiError(403, f"Host: {name} is no name of this server; if it is, want --allowed-hosts {name}")

    def _looked_up(self, name: str, reached: str) -> bool:
        if self._all or is_loopback(name) or name in self.allowed or name.endswith(self._below):
            return True
        address = _address(name)
        if address is not None:
            return self._private or address == _address(reached)
        return self._private and ("." not in name or name.endswith(PRIVATE) or name in self._own)


def check_origin(headers: Headers, allowed: Sequence[str]) -> None:
    """ApiError (403) for a request that a page of another origin makes, unless ``allowed`` has it, or '*'.

    ``Sec-Fetch-Site``, which no page can set, decides where it is there: it is right behind a proxy that changes
    ``Host`` as well.  Older browsers, and plain HTTP to other machines, have ``Origin`` alone."""
    origins, sites = values(headers, b"origin"), values(headers, b"sec-fetch-site")
    if "*" in allowed or (origins and all(one in allowed for one in origins)):
        return
    if sites:
        own = all(site in ("same-origin", "none") for site in sites)
    else:
        host = [one.lower() for one in values(headers, b"host")]
        own = all([_netloc(one)] == host for one in origins)
    if not own:
        who = printable(origins[0], 100) if origins else "another site"
        raise ApiError(403, f"Origin: {who} is not this server's; want one that allowed_origins has")


def check_preflight(headers: Headers, allowed: Sequence[str]) -> None:
    """Raise ApiError (403) for the question of a browser whether a page of another origin may send a request, where
    no origin may: it carries no key, so nothing else of it is looked at."""
    origins = values(headers, b"origin")
    if not allowed and origins and values(headers, b"access-control-request-method"):
        raise not_allowed(origins[0])


def not_allowed(origin: str, why: str = "") -> ApiError:
    """Return the answer to a page's question whether it may send a request, which it may not."""
    who = printable(origin, 100)
    what = f"pages of Origin: {who} may not ask this server" + (f" ({printable(why, 200)})" if why else "")
    return ApiError(403, f"{what}; if they should, want --allowed-origins {who}")


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def is_json(kind: str) -> bool:
    """Whether a ``Content-Type`` is JSON's."""
    kind = kind.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def check_json(headers: Headers) -> None:
    """ApiError (415) for a body that is not declared to be JSON: a page may send other types without asking first."""
    length = values(headers, b"content-length")
    if not values(headers, b"transfer-encoding") and all(one.strip() in ("", "0") for one in length):
        return
    kinds = values(headers, b"content-type")
    if not kinds or not all(map(is_json, kinds)):
        said = f"is {printable(kinds[0], 100) or 'empty'}" if kinds else "is missing"
        raise ApiError(415, f"the Content-Type {said}; {JSON_WANTED}")
