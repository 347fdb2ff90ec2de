"""The leak test of the kit tells bounded caches, also caches that are emptied when they are full, from leaks."""

import pytest

from minivllm.testing.kept import Lasting


class Cached:
    """An instance with a cache that is emptied when it has ``most`` entries, and that keeps ``leak`` bytes a use."""

    def __init__(self, most, leak):
        self.most, self.leak = most, leak
        self.cache, self.kept = {}, []

    def use(self, number):
        if len(self.cache) >= self.most:
            self.cache.clear()
        self.cache[f"key {number}"] = "x" * 200 + str(number)
        if self.leak:
            self.kept.append("y" * self.leak + str(number))


class Suite(Lasting):
    def __init__(self, made):
        self.lasting = lambda: made

    def once_more(self, instance, number):
        instance.use(number)


@pytest.mark.parametrize("most", [20, 50, 256, 400])
def test_a_cache_that_is_emptied_when_full_is_no_leak(most):
    Suite(Cached(most, 0)).test_what_has_ended_leaves_nothing_behind()


@pytest.mark.parametrize("leak", [100, 400])
@pytest.mark.parametrize("most", [20, 50, 256, 400, 1 << 30])
def test_bytes_that_stay_are_found_beside_a_cache_that_is_emptied(most, leak):
    with pytest.raises(AssertionError, match=r"times more, after .* it holds .* bytes more"):
        Suite(Cached(most, leak)).test_what_has_ended_leaves_nothing_behind()
