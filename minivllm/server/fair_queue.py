"""A queue in which owners take turns: whoever has many in it waits for the own ones, not others for them.

    owner "a"   a1 a2 a3 a4 ...        pop: a1, b1, c1, a2, c2, a3, ...
    owner "b"   b1
    owner "c"   c1 c2

An *owner* is an API key, or an address where no key is needed (``owner_of``): whose budget something is.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

T = TypeVar("T")
NETWORK = 64  # leading bits of an IPv6 address that one client has: the rest is its own to choose


class FairQueue(Generic[T]):
    """Items by number.  First come, first served among those of an owner; owners in turn, first the one that was served
    longest ago.  Every operation takes constant time, however many wait (``pop`` with ``but``: one step an owner).

    Invariant: an owner in ``_lanes`` has an item; ``_owner`` has the numbers of all items.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, OrderedDict[int, T]] = OrderedDict()
        self._owner: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def push(self, owner: str, number: int, item: T) -> None:
        """``number`` is that of no other item here."""
        self._lanes.setdefault(owner, OrderedDict())[number] = item
        self._owner[number] = owner

    def pop(self, but: Container[str] = ()) -> tuple[str, int, T] | None:
        """(owner, number, item) of whose turn it is, those ``but`` left out; None if nobody else waits."""
        owner = next((one for one in self._lanes if one not in but), None) if but else next(iter(self._lanes), None)
        if owner is None:
            return None
        lane = self._lanes[owner]
        number, item = lane.popitem(last=False)
        del self._owner[number]
        if lane:
            self._lanes.move_to_end(owner)
        else:
            del self._lanes[owner]
        return owner, number, item

    def remove(self, number: int) -> T | None:
        """The item leaves without having had its turn; None if it is not here."""
        owner = self._owner.pop(number, None)
        if owner is None:
            return None
        item = self._lanes[owner].pop(number)
        if not self._lanes[owner]:
            del self._lanes[owner]
        return item

    def clear(self) -> None:
        self._lanes.clear()
        self._owner.clear()


def owner_of(tenant: str, client: object) -> str:
    """Whose budget a request is: the key's name, else the address of ``client``, ASGI's (host, port) or None."""
    if tenant:
        return tenant
    host = str(client[0]) if isinstance(client, (tuple, list)) and client else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a socket in the file system has none
        return f"address {host[:64]}"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return f"address {address.ipv4_mapped}"
        return f"address {ipaddress.ip_network((address, NETWORK), strict=False).network_address}"
    return f"address {address}"
