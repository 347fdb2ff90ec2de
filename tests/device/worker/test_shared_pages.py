"""The estimate of what decoding rows save by reading a shared prefix once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from minivllm.core.interfaces.plan import NO_CHANGE, Delta
from minivllm.device.worker.shared_pages import SharedPages

BLOCK, SLOTS, COLUMNS = 64, 12, 40


def pages(least: int = 1) -> SharedPages:
    return SharedPages(0, SLOTS, COLUMNS, BLOCK, 1.0, least)


def table(*entries: tuple[int, int, int, int]) -> Delta:
    return Delta(table=np.array(entries, np.int32))


def fill(shared: SharedPages, slot: int, blocks: list[int], group: int = 0) -> None:
    shared.apply(table(*((group, slot, i, b) for i, b in enumerate(blocks))))


def plan(slots: list[int], tokens: int | list[int] = 700, q_len: int = 1) -> SimpleNamespace:
    rows = np.array(slots, np.int32)
    return SimpleNamespace(slots=rows, q_len=np.full(len(rows), q_len, np.int32), computed=np.zeros(len(rows)) + tokens)


def own(slot: int, n: int = 12) -> list[int]:
    return list(range(1000 * (slot + 1), 1000 * (slot + 1) + n))


@pytest.mark.parametrize("rows, same, counted", [(4, 4, 4), (6, 11, 6), (3, 8, 0), (5, 3, 0)])
def test_rows_count_if_at_least_four_share_256_tokens(rows, same, counted):
    shared = pages()
    for slot in range(rows):
        fill(shared, slot, [*range(1, 1 + same), *own(slot, 12 - same)])
    fill(shared, 9, own(9))
    assert shared.sharing(plan([9, *range(rows)])) == counted


def test_a_step_that_saves_less_than_the_back_end_wants_does_not_share():
    for least, counted in ((3 * 8 * BLOCK, 4), (3 * 8 * BLOCK + 1, 0)):
        shared = pages(least)
        for slot in range(4):
            fill(shared, slot, [*range(1, 12), *own(slot, 1)])
        assert shared.sharing(plan(range(4))) == counted, "11 blocks are more than 8 and less than 16"


def test_a_size_can_save_what_its_rows_share_at_the_deepest_depth():
    shared = pages(9 * 2048)
    assert shared.depths[-1] * BLOCK == 2048, "the table has 40 blocks"
    assert shared.can_save(10, 1 << 20) and not shared.can_save(9, 1 << 20)
    assert not shared.can_save(10, 2047) and shared.can_save(19, 2047), "contexts of 2047 tokens share at most 1024"
    assert not shared.can_save(1000, 255) and not pages().can_save(3, 1 << 20)
    for rows in (9, 10):
        shared = pages(9 * 2048)
        for slot in range(rows):
            fill(shared, slot, [*range(1, 33), *own(slot, 1)])
        assert shared.sharing(plan(range(rows), 2050)) == (rows if rows == 10 else 0)


def test_blocks_that_are_not_whole_and_blocks_of_other_groups_are_not_counted():
    shared = pages()
    for slot in range(5):
        fill(shared, slot, own(slot))
        fill(shared, slot, list(range(1, 13)), group=1)
    assert not shared.sharing(plan(range(5)))
    for slot in range(5):
        fill(shared, slot, list(range(1, 13)))
    assert shared.sharing(plan(range(5))) == 5 and not pages().sharing(plan(range(5)))
    assert not shared.sharing(plan([0, 1, 2, 3], 255)) and shared.sharing(plan([3, 1, 2, 0], 256)) == 4
    assert not shared.sharing(plan([0, 1, 2, 3, 4], q_len=2)), "rows of several tokens do not decode"


def test_rows_that_leave_and_blocks_that_are_replaced_change_the_estimate():
    shared = pages()
    for slot in range(5):
        fill(shared, slot, [*range(1, 12), *own(slot, 1)])
    step = plan(range(5))
    assert shared.sharing(step) == 5
    shared.apply(NO_CHANGE)
    shared.apply(table((0, 0, 12, 77)))
    assert shared.sharing(step) == 5
    shared.apply(table((0, 0, 7, 78)))
    assert shared.sharing(step) == 4, "eight blocks of four rows save more than four blocks of five"
    shared.apply(Delta(join=SimpleNamespace(slot=np.array([3, 4]))))
    assert shared.sharing(step) == 0 and not shared.pages[4].any(), "three rows are left"


def test_a_fork_gets_the_blocks_of_its_own_delta():
    shared = pages()
    fill(shared, 0, list(range(1, 10)))
    fill(shared, 3, own(3))
    for slot in (1, 2, 3):
        entries = np.array([(0, slot, i, i + 1) for i in range(9)], np.int32)
        shared.apply(Delta(fork=np.array([[0, slot, 1]], np.int32), table=entries))
    assert shared.sharing(plan(range(4))) == 4
