"""Refuse requests that another site's web page makes a browser send to this server.

    DNS rebinding   the page's owner lets a name of theirs resolve to this machine: the ``Host`` header has that name
    cross-site      a form, an image or ``fetch``: the browser names the page's site in ``Origin`` and
                    ``Sec-Fetch-Site`` (Fetch Metadata).  For content that no form can send, such as JSON, it first
                    sends a preflight request (CORS)

These checks protect the users of browsers only.  Any other client can send the headers of its choice.
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
NAMES = 256  # number of host names whose check is cached
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # HTTP methods that change no state
HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::[0-9]{1,5})?")
# ends of names that no public DNS has (RFC 6761, 6762, 8375, ICANN's .internal; .lan and .svc by custom)
PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".lan", ".svc")
JSON_EXPECTED = "expected Content-Type: application/json (with curl: -H 'Content-Type: application/json')"


def values(headers: Headers, name: bytes) -> list[str]:
    """Return all values of the header with a name, which must be in lower case."""
    return [value.decode("latin-1") for key, value in headers if key == name]


def is_loopback(host: str) -> bool:
    """Return whether a host name or an IP address is a loopback one."""
    address = _address(host)
    if address is not None:
        return address.is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an IP address, or None if it is a name."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if found.version == 6 else found


class Hosts:
    """The names that the ``Host`` header of a request may have.

    Loopback names, the address that the connection was made to, and the names in ``allowed`` are always accepted.
    In ``allowed``, ``*.example.com`` means all names below example.com and ``*`` means every name.
    If ``allowed`` is empty and the server does not listen on loopback alone, more names are accepted.  With API keys
    these are all names, since a page has no key.  Without keys these are all IP addresses and all names that no public
    DNS has, because neither can be used for DNS rebinding.
    """

    def __init__(self, allowed: Iterable[str], listens: str, keys: bool) -> None:
        self.allowed = frozenset(name.lower().strip("[]") for name in allowed)
        self._below = tuple(name[1:] for name in self.allowed if name.startswith("*."))
        more = not self.allowed and not is_loopback(listens.lower())
        self._all, self._private = "*" in self.allowed or (more and keys), more and not keys
        self._own = {listens.lower(), socket.gethostname().lower()}
        self._serves = lru_cache(NAMES)(self._is_served)  # cached, because most clients use one name

    def check(self, headers: Headers, reached: str = "", version: str = "1.1") -> None:
        """Check the ``Host`` header of a request.  ``reached`` is the address that the connection was made to.

        Raise ApiError: 400 if there is no header, several or a malformed one, 403 if the name is not accepted.
        Only versions of HTTP before 1.1 may leave the header out.
        """
        hosts = values(headers, b"host")
        if not hosts and version in ("1.0", "0.9"):
            return
        if len(hosts) != 1:
            raise ApiError(400, f"{len(hosts)} Host headers: expected one, a name or an address and perhaps a port")
        found = HOST.fullmatch(hosts[0])
        if found is None:
            host = printable(hosts[0], 100)
            raise ApiError(400, f"Host: {host}: expected a name or an address and perhaps a port")
        name = found[1].lower().strip("[]").removesuffix(".")
        if not self._serves(name, reached):
            name = printable(name, 100)
            problem = f"Host: {name} is not a name of this server"
            raise ApiError(403, f"{problem}; if it should be, start the server with --allowed-hosts {name}")

    def _is_served(self, name: str, reached: str) -> bool:
        """Return whether a name or an address is accepted."""
        if self._all or is_loopback(name) or name in self.allowed or name.endswith(self._below):
            return True
        address = _address(name)
        if address is not None:
            return self._private or address == _address(reached)
        return self._private and ("." not in name or name.endswith(PRIVATE) or name in self._own)


def check_origin(headers: Headers, allowed: Sequence[str]) -> None:
    """Raise ApiError (403) for a request from a page of another origin, unless ``allowed`` has the origin or '*'.

    ``Sec-Fetch-Site``, which no page can set, decides if it is present, since it is right even if a proxy has changed
    ``Host``.  Otherwise ``Origin`` is compared with ``Host``.  Old browsers, and all browsers for plain HTTP to other
    machines, send only ``Origin``.
    """
    origins, sites = values(headers, b"origin"), values(headers, b"sec-fetch-site")
    if "*" in allowed or (origins and all(origin in allowed for origin in origins)):
        return
    if sites:
        own = all(site in ("same-origin", "none") for site in sites)
    else:
        hosts = [host.lower() for host in values(headers, b"host")]
        own = all([_netloc(origin)] == hosts for origin in origins)
    if not own:
        origin = printable(origins[0], 100) if origins else "another site"
        raise ApiError(403, f"Origin: {origin} is not this server's; expected an origin in allowed_origins")


def from_page(headers: Headers) -> bool:
    """Return whether a request may come from a page: browsers send ``Origin`` or ``Sec-Fetch-Site`` with each POST."""
    return bool(values(headers, b"origin") or values(headers, b"sec-fetch-site"))


def check_preflight(headers: Headers, allowed: Sequence[str]) -> None:
    """Raise ApiError (403) for a preflight request if no origin is allowed.

    With a preflight request, a browser asks whether a page of another origin may send its request.  It never has an API
    key, so it is answered before the key is checked.
    """
    origins = values(headers, b"origin")
    if not allowed and origins and values(headers, b"access-control-request-method"):
        raise not_allowed(origins[0])


def not_allowed(origin: str, why: str = "") -> ApiError:
    """Return the error for a preflight request of an origin that is not allowed.  ``why`` is a reason, "" for none."""
    origin = printable(origin, 100)
    reason = f" ({printable(why, 200)})" if why else ""
    problem = f"pages of Origin: {origin} may not send requests to this server{reason}"
    return ApiError(403, f"{problem}; if they should, start the server with --allowed-origins {origin}")


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def is_json(kind: str) -> bool:
    """Return whether a ``Content-Type`` is JSON."""
    kind = kind.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def check_json(headers: Headers) -> None:
    """Raise ApiError (415) for a body that is not declared as JSON.

    A page can send other content types without a preflight request.
    """
    lengths = values(headers, b"content-length")
    empty = all(length.strip() in ("", "0") for length in lengths)
    if empty and not values(headers, b"transfer-encoding"):
        return
    kinds = values(headers, b"content-type")
    if not kinds:
        raise ApiError(415, f"the Content-Type is missing; {JSON_EXPECTED}")
    if not all(map(is_json, kinds)):
        raise ApiError(415, f"the Content-Type is {printable(kinds[0], 100) or 'empty'}; {JSON_EXPECTED}")
