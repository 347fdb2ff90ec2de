"""Wrong stores in memory and in files with one fault each, and right ones."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np

from minivllm.core.interfaces.kvstore import KVStore
from minivllm.plugins.kvstore.disk import DiskStore
from minivllm.plugins.kvstore.options import DiskStoreOptions
from minivllm.registration.spec import Spec

SEAM = "kvstore"
BACK = "test_pages_come_back_as_they_were_stored"
TWICE = "test_a_page_that_is_there_is_not_stored_twice"
LIMIT = "test_the_limit_is_kept"
APART = "test_models_and_ranks_share_no_page"
NEXT = "test_durable_pages_are_found_by_the_next_store"
LOOK = "test_look_finds_pages_of_other_processes"
NAMES = "test_names_are_kept_until_they_are_forgotten"
TWO = "test_two_durable_stores_share_pages"
THREAD = "test_another_thread_may_use_a_store_than_the_one_that_made_it"
FAULTS = {
    "KeepsTheCallersMemory": (BACK,),
    "ReusesItsAnswer": (BACK,),
    "IgnoresDrops": (BACK, TWICE),
    "DropsTheFirst": (BACK,),
    "CutsPages": (BACK,),
    "ForgetsSizes": (BACK,),
    "StoresUnderAHash": (BACK,),
    "RefusesWhatIsThere": (TWICE,),
    "CountsWhatWasDropped": (LIMIT,),
    "RaisesWhenFull": (LIMIT,),
    "BoundToItsThread": (THREAD,),
    "OneForAllModels": (APART,),
    "OneForAllRanks": (APART,),
    "ForgetsAtTheEnd": (BACK, NEXT),
    "FindsAllModels": (NEXT,),
    "DeletesFilesOfOthers": (TWO,),
    "ForgetsNames": (NAMES,),
    "LooksAtItself": (LOOK,),
    "SaysItKeepsNames": (NAMES,),
    "WritesToFilesOfOthers": (TWO,),
}
RIGHT = ("Memory", "Files")


def spec(name, *features):
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", features=frozenset(features))


class Memory(KVStore):
    spec = spec("Memory")
    most = 1 << 20

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.pages, self.used = {}, 0

    @property
    def limit(self):
        return self.most

    def keys(self):
        return {key: page.nbytes for key, page in self.pages.items()}

    def put(self, key, page):
        if key in self.pages:
            return True
        if self.used + page.nbytes > self.most:
            return False
        self.pages[key] = page.copy()
        self.used += page.nbytes
        return True

    def get(self, key):
        return self.pages.get(key)

    def drop(self, keys):
        for key in keys:
            if key in self.pages:
                self.used -= self.pages.pop(key).nbytes


class KeepsTheCallersMemory(Memory):
    spec = spec("KeepsTheCallersMemory")

    def put(self, key, page):
        stored = super().put(key, page)
        self.pages[key] = page
        return stored


class ReusesItsAnswer(Memory):
    spec = spec("ReusesItsAnswer")

    def get(self, key):
        page = super().get(key)
        if page is None:
            return None
        if not hasattr(self, "answer"):
            self.answer = np.zeros(1 << 16, np.uint8)
        self.answer[: len(page)] = page
        return self.answer[: len(page)]


class IgnoresDrops(Memory):
    spec = spec("IgnoresDrops")

    def drop(self, keys):
        pass


class DropsTheFirst(Memory):
    spec = spec("DropsTheFirst")

    def drop(self, keys):
        super().drop(list(keys)[:1])


class CutsPages(Memory):
    spec = spec("CutsPages")

    def get(self, key):
        page = super().get(key)
        return None if page is None else page[:4096]


class ForgetsSizes(Memory):
    spec = spec("ForgetsSizes")

    def keys(self):
        return dict.fromkeys(self.pages, 4096)


class StoresUnderAHash(Memory):
    """Two keys of sixteen are taken for equal."""

    spec = spec("StoresUnderAHash")

    def put(self, key, page):
        return super().put(key[:1] + bytes([key[1] & 1]), page)

    def get(self, key):
        return super().get(key[:1] + bytes([key[1] & 1]))


class RefusesWhatIsThere(Memory):
    spec = spec("RefusesWhatIsThere")

    def put(self, key, page):
        return key not in self.pages and super().put(key, page)


class CountsWhatWasDropped(Memory):
    spec = spec("CountsWhatWasDropped")

    def drop(self, keys):
        used = self.used
        super().drop(keys)
        self.used = used


class RaisesWhenFull(Memory):
    spec = spec("RaisesWhenFull")

    def put(self, key, page):
        if not super().put(key, page):
            raise MemoryError("full")
        return True


ALL = {}


class OneForAllModels(Memory):
    spec = spec("OneForAllModels")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.pages = ALL.setdefault(ctx.rank, {})

    def close(self):
        ALL.clear()


class OneForAllRanks(Memory):
    spec = spec("OneForAllRanks")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.pages = ALL.setdefault(ctx.identity, {})

    def close(self):
        ALL.clear()


class Files(DiskStore):
    spec = spec("Files", "durable")

    def __init__(self, options, ctx):
        super().__init__(DiskStoreOptions(path=str(Path("kv").absolute()), bytes=4 << 20), ctx)


class ForgetsAtTheEnd(Files):
    spec = spec("ForgetsAtTheEnd", "durable")

    def close(self):
        for file in self.files.values():
            file.path.unlink(missing_ok=True)
        super().close()


class BoundToItsThread(Memory):
    spec = spec("BoundToItsThread")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.thread = threading.get_ident()

    def put(self, key, page):
        assert threading.get_ident() == self.thread, "made in another thread"
        return super().put(key, page)


class FindsAllModels(Files):
    spec = spec("FindsAllModels", "durable")

    def __init__(self, options, ctx):
        super().__init__(options, type(ctx)("ab" * 32, 0, 1))


class DeletesFilesOfOthers(Files):
    spec = spec("DeletesFilesOfOthers", "durable")

    def put(self, key, page):
        for file in self.files.values():
            if not file.owned:
                file.path.unlink(missing_ok=True)
                with file.path.open("wb") as emptied:
                    emptied.write(b"")
                os.truncate(f"/proc/self/fd/{file.fd}", 100)
        return super().put(key, page)


class ForgetsNames(Files):
    spec = spec("ForgetsNames", "durable")

    def close(self):
        for name in list(self.names()):
            self.mark(name, None)
        super().close()


class LooksAtItself(Files):
    spec = spec("LooksAtItself", "durable")

    def look(self):
        super().look()
        return self.keys()


class SaysItKeepsNames(Memory):
    spec = spec("SaysItKeepsNames")
    keeps_names = True


class WritesToFilesOfOthers(Files):
    spec = spec("WritesToFilesOfOthers", "durable")

    def put(self, key, page):
        for file in self.files.values():
            if not file.owned:
                os.pwrite(file.fd, page.tobytes(), 0)
                os.ftruncate(file.fd, 64)
        return super().put(key, page)
