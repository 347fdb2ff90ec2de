"""Garbage collections scan no objects of a start, and all objects once an engine is closed or deleted."""

from __future__ import annotations

import gc
import weakref

import pytest

from minivllm import LLM, AsyncLLM
from minivllm.frontend import garbage
from minivllm.frontend.garbage import exclude_present
from minivllm.testing.tiny import tiny_dir

OPTIONS = dict(dtype="float32", device="cpu", num_kvcache_blocks=8, max_model_len=32, skip_tokenizer_init=True)


class Cycle:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Let engines of other tests exclude nothing."""
    monkeypatch.setattr(garbage, "_excluded", set())
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def scanned(one) -> bool:
    """Return whether collections scan an object."""
    return any(other is one for other in gc.get_objects())


def freed(ref) -> bool:
    """Return whether the object of a weak reference is freed by a collection at the latest."""
    gc.collect()
    return ref() is None


@pytest.mark.parametrize("ends", ["closed", "deleted"])
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_collections_scan_no_objects_of_a_start_until_the_engine_ends(tmp_path, kind, ends):
    tiny_dir(tmp_path, "qwen3")
    garbage_before = weakref.ref(Cycle())
    llm = kind(model=str(tmp_path), **OPTIONS)
    engine = weakref.ref(llm.engine)
    assert garbage_before() is None and not scanned(llm.engine) and not scanned(llm)
    later = Cycle()
    assert scanned(later)
    if ends == "closed" or kind is AsyncLLM:  # its thread runs until it is closed
        llm.close()
        assert scanned(llm.engine)
    del llm
    assert freed(engine) and gc.get_freeze_count() == 0


class Owner:
    pass


def test_the_end_of_one_of_several_engines_includes_all_objects():
    """Garbage of that engine is among the objects that are excluded for the others."""
    owners = [Owner(), Owner()]
    ends = [exclude_present(owner) for owner in owners]
    cycle = weakref.ref(kept := Cycle())
    third = Owner()
    ends.append(exclude_present(third))
    del kept
    assert not freed(cycle)
    ends[0]()
    assert freed(cycle) and gc.get_freeze_count() == 0
    fourth = Owner()
    exclude_present(fourth)
    for end in ends:  # of engines since whose end others have started
        end()
    assert not scanned(fourth)
    del fourth
    assert gc.get_freeze_count() == 0


def test_objects_that_the_program_has_excluded_itself_stay_so():
    own = Cycle()
    gc.freeze()
    later = Cycle()
    owner = Owner()
    end = exclude_present(owner)
    assert not scanned(own) and scanned(later)
    end()
    assert not scanned(own)


def test_nothing_is_collected_or_excluded_if_the_program_collects_by_itself():
    gc.disable()
    cycle = weakref.ref(Cycle())
    exclude_present(Owner())
    assert cycle() is not None and gc.get_freeze_count() == 0
