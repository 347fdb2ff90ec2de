"""The publication of a row's blocks: their entry into the prefix cache, so that later requests can share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .blocks import Salt
    from .cache import KVCache
    from .checkpoints import Checkpoints
    from .request import Seq

RUN = 4  # from this many blocks on, the blocks of a row enter the prefix cache in one call


def publish(cache: KVCache, rows: Iterable[tuple[int, int]]) -> None:
    """Enter the full blocks of rows into the prefix cache.  Each pair of ``rows`` has a slot and the number of its
    first tokens that are computed and collected."""
    for slot, done in rows:
        last = done // cache.block
        if last > cache.slots.prefix_published[slot]:
            _publish_row(cache, slot, last)
    for pool in cache.pools:
        pool.announce()


def _publish_row(cache: KVCache, slot: int, last: int) -> None:
    """Enter the blocks of a row with index below ``last`` into the prefix cache, except for those that are in it
    already."""
    s = cache.slots
    first = int(s.prefix_published[slot])
    seq = s.at(slot)
    salt = seq.request.salt
    tokens = s.tokens[slot, : last * cache.block]
    keys = cache.pools[0].keys_of(tokens, salt, seq.keys)
    whole = tokens.reshape(last, cache.block)
    if not _publish_run(cache, slot, first, salt, keys[first:last], whole[first:]):
        for i in range(first, last):
            if not _publish_index(cache, slot, i, salt, keys[i], whole[i]):
                # A block in use has the same key by chance, so the later blocks stay out of the
                # prefix cache too.
                break
    s.prefix_published[slot] = last
    if cache.tiers is not None:
        cache.tiers.published(slot, first, last)
    if cache.checkpoints is not None:
        _publish_states(cache, cache.checkpoints, slot, last)


def _publish_states(cache: KVCache, checkpoints: Checkpoints, slot: int, blocks: int) -> None:
    """Assign the row's checkpoints of recurrent states to its first ``blocks`` blocks.  A block gets none if it or an
    earlier block of the row is not in the prefix cache, because its key collided."""
    table = cache.slots.table[0, slot, :blocks]
    private = np.flatnonzero(cache.pools[0].key[table] == 0)
    if len(private):
        blocks = int(private[0])
    checkpoints.publish(slot, table, blocks)


def publish_tail(cache: KVCache, slot: int, seq: Seq) -> None:
    """Enter the partly filled last block of a sequence that ends into the prefix cache, so that a later prompt with the
    same beginning can copy the block.

    It is left out if the cache is full and such blocks are rarely used.  The last token was drawn but never computed,
    so it is not included."""
    s = cache.slots
    size = cache.block
    done = int(s.collected[slot]) - 1  # the last token was drawn, but its KV was not computed
    i, part = divmod(done, size)
    if not cache.partial or not part or done < seq.known:
        return
    if s.dropped[:, slot].any() or s.prefix_published[slot] < i:
        return
    lead = cache.pools[0]
    if not cache.tails.pays(full=not lead.free):
        return
    cache.tails.cached()
    salt = seq.request.salt
    tokens = s.tokens[slot, :done]
    # This call computes the missing keys of the full blocks; a forked branch has no keys yet.
    keys = lead.keys_of(tokens[: i * size], salt, seq.keys)
    row = np.full(size, -1, np.int32)
    row[:part] = tokens[i * size :]
    before = keys[i - 1] if i else lead.root(salt)[1]
    key = lead.hash_fn(before, row[:part].tobytes())
    _publish_index(cache, slot, i, salt, key, row)
    for pool in cache.pools:
        pool.announce()


def _parent_of(cache: KVCache, slot: int, i: int, salt: Salt) -> int | None:
    """Return the parent that the block at index ``i`` of a row has in the prefix cache: the block before it, or for the
    first block the root number of the salt.  None if the block before it is not in the prefix cache."""
    lead = cache.pools[0]
    if not i:
        return lead.root(salt)[0]
    parent = int(cache.slots.table[0, slot, i - 1])
    return parent if lead.published(parent) else None


def _publish_run(
    cache: KVCache, slot: int, first: int, salt: Salt, keys: list[int], tokens: np.ndarray
) -> bool:
    """Publish the blocks of a row from index ``first`` on at once, with these keys and tokens i32 [n, block].

    Return False without a change if they must be published one by one (see ``BlockPool.publish_run``)."""
    last = first + len(keys)
    if len(cache.pools) > 1 or len(keys) < RUN:
        return False
    parent = _parent_of(cache, slot, first, salt)
    if parent is None:
        return False
    blocks = cache.slots.table[0, slot, first:last]
    request = cache.slots.at(slot).request
    tenant = int(cache.slots.tenant[slot])
    session = 0
    kinds = None
    if request.turn is not None:
        session = request.turn.session
        kinds = [request.kind_of(i) for i in range(first, last)]
    lead = cache.pools[0]
    return lead.publish_run(blocks, parent, keys, tokens, first, tenant, session, kinds)


def _publish_index(
    cache: KVCache, slot: int, i: int, salt: Salt, key: int, row: np.ndarray
) -> bool:
    """Publish the blocks at index ``i`` of a row's tables in all KV groups, with the token ids ``row`` i32 [block].

    Return False if the block of the leading group or its parent stays unpublished.  The row's later blocks then stay
    unpublished too, because a published block needs a published parent."""
    lead = cache.pools[0]
    parent = _parent_of(cache, slot, i, salt)
    if parent is None:
        return False
    _publish_one(cache, 0, slot, i, parent, key, row)
    table = cache.slots.table[:, slot, i]
    block = int(table[0])
    if not lead.published(block):
        return False
    for g in range(1, len(cache.pools)):
        if table[g]:
            _publish_one(cache, g, slot, i, lead.follower_of(block), key, row)
    return True


def _publish_one(
    cache: KVCache, g: int, slot: int, i: int, parent: int, key: int, row: np.ndarray
) -> None:
    """Publish the block at index ``i`` of a row in KV group ``g``.  If an equal block is cached already, the row shares
    that block and releases its own."""
    pool = cache.pools[g]
    own = int(cache.slots.table[g, slot, i])
    if pool.published(own):
        return
    request = cache.slots.at(slot).request
    tenant = int(cache.slots.tenant[slot])
    session = 0
    kind = 0
    if request.turn is not None:
        session = request.turn.session
        kind = request.kind_of(i)
    cached = pool.publish(own, parent, key, row, i, tenant, session, kind)
    if cached != own:
        cache.duplicates = True
        shared = np.array([cached], np.int32)
        pool.share(shared)
        cache.append(g, slot, [i], shared)
        pool.release(np.array([own]))
