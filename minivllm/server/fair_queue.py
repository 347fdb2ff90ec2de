"""A queue in which owners (API keys or addresses) take turns.

An owner with many items does not delay the items of others.

    owner "a"   a1 a2 a3 a4 ...        pop: a1, b1, c1, a2, c2, a3, ...
    owner "b"   b1
    owner "c"   c1 c2

The *owner* of a request is its API key.  Without API keys it is the client's address (``owner_of``).
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

T = TypeVar("T")
NETWORK = 64  # bits of the network part of an IPv6 address; a client can choose the other bits


class FairQueue(Generic[T]):
    """A queue of items, each with an owner and a unique number.

    The owner that was served longest ago comes next.  An owner's own items leave in the order in which they came.
    Every operation takes constant time, except that ``pop`` checks one owner after another against ``skip``.

    Invariant: each owner in ``_queues`` has at least one item, and ``_owner`` has the number of every item.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, OrderedDict[int, T]] = OrderedDict()
        self._owner: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def push(self, owner: str, number: int, item: T) -> None:
        """Add an item.  Its ``number`` must differ from those of all other items in the queue."""
        self._queues.setdefault(owner, OrderedDict())[number] = item
        self._owner[number] = owner

    def pop(self, skip: Container[str] = ()) -> tuple[str, int, T] | None:
        """Remove the next item and return (owner, number, item), or None if there is none.

        Owners in ``skip`` are left out.
        """
        owner = next((name for name in self._queues if name not in skip), None)
        if owner is None:
            return None
        queue = self._queues[owner]
        number, item = queue.popitem(last=False)
        del self._owner[number]
        if queue:
            self._queues.move_to_end(owner)
        else:
            del self._queues[owner]
        return owner, number, item

    def remove(self, number: int) -> T | None:
        """Remove the item with a number out of turn and return it, or None if the queue does not have it."""
        owner = self._owner.pop(number, None)
        if owner is None:
            return None
        item = self._queues[owner].pop(number)
        if not self._queues[owner]:
            del self._queues[owner]
        return item

    def clear(self) -> None:
        self._queues.clear()
        self._owner.clear()


def owner_of(tenant: str, client: object) -> str:
    """Return the owner of a request: the name of its API key, else its client's address.

    ``tenant`` is the name of the key, "" without one.  ``client`` is ASGI's (host, port) or None.
    An IPv6 address is shortened to its network, an IPv4 address inside IPv6 is unpacked.
    """
    if tenant:
        return tenant
    host = str(client[0]) if isinstance(client, (tuple, list)) and client else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # the client of a Unix socket has no IP address
        return f"address {host[:64]}"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return f"address {address.ipv4_mapped}"
        return f"address {ipaddress.ip_network((address, NETWORK), strict=False).network_address}"
    return f"address {address}"
