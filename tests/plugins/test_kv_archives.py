"""Folders of a disk store and archives of prefixes that are damaged: they are refused or listed, and never read as
other data."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from urllib.parse import quote

import numpy as np
import pytest

from minivllm.cli import main
from minivllm.errors import ConfigError
from minivllm.plugins.kvstore import archive
from minivllm.plugins.kvstore.segments import SUFFIX, file_head, page_head

MODEL = "0" * 32
KEY = bytes(range(16))
PAGES = f"{MODEL}/r0of1-a{SUFFIX}"
NAME = f"{MODEL}/r0of1-{quote('fox')}.name"


def pages():
    """Return the bytes of a file with one page."""
    page = np.arange(64, dtype=np.uint8)
    return file_head(bytes(32)) + page_head(KEY, page)[0] + page.tobytes()


@pytest.fixture
def root(tmp_path):
    """A folder of a disk store with one model, one page and one prefix."""
    folder = tmp_path / "kv"
    (folder / MODEL).mkdir(parents=True)
    (folder / PAGES).write_bytes(pages())
    (folder / NAME).write_text(f'["{KEY.hex()}"]')
    (folder / MODEL / archive.ABOUT).write_text("a model")
    return folder


def packed(path, mode="w", **members):
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            archive._add(tar, name, data)
    return path


def test_an_archive_brings_the_prefix_to_another_folder(root, tmp_path):
    target = tmp_path / "fox.tar"
    assert archive.export(root, "fox", target) == 1
    assert archive.import_from(tmp_path / "there", target) == 1
    (found,) = archive.models(tmp_path / "there", verify=True)
    assert (found.about, found.names, found.pages, found.damaged, found.unusable) == ("a model", ("fox",), 1, 0, 0)


@pytest.mark.parametrize("content", [b"", b"{", b"3", b"[3]", b'["x"]', b'["0\xff"]', b"[" * 100_000])
def test_a_damaged_list_of_pages_is_refused_on_both_sides(root, tmp_path, content):
    (root / NAME).write_bytes(content)
    with pytest.raises(ConfigError, match=r"r0of1-fox.name: the list of the prefix's pages is damaged"):
        archive.export(root, "fox", tmp_path / "fox.tar")
    source = packed(tmp_path / "fox.tar", **{PAGES: pages(), NAME: content})
    with pytest.raises(ConfigError, match=r"fox.tar: the list of the prefix's pages is damaged"):
        archive.import_from(tmp_path / "there", source)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x1b[2J", b"x" * 100_000, None])
def test_a_damaged_description_is_shown_in_printable_characters(root, content, capsys):
    about = root / MODEL / archive.ABOUT
    about.unlink()
    about.write_bytes(content) if content is not None else about.mkdir()
    assert main(["cache", "verify", "--path", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "1 pages" in shown and "prefix fox" in shown and "\x1b" not in shown and len(shown) < 2000


def test_a_file_that_cannot_be_written_is_named(root, tmp_path):
    with pytest.raises(
        ConfigError, match=r"nowhere/fox.tar: cannot be written .*; expected a file in an existing fold"
    ):
        archive.export(root, "fox", tmp_path / "nowhere" / "fox.tar")
    source = packed(tmp_path / "fox.tar", **{PAGES: pages()})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"file/.*: cannot be written .*; expected a folder with enough room"):
        archive.import_from(tmp_path / "file", source)


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_a_compressed_archive_is_refused_because_its_members_have_no_bound(tmp_path, compression):
    source = packed(tmp_path / "fox.tar", f"w:{compression}", **{PAGES: pages() + bytes(50 << 20)})
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"cannot be read .*; expected a file of `minivllm cache export`"):
        archive.import_from(tmp_path / "there", source)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE])
def test_a_member_that_is_no_plain_file_is_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "fox.tar", "w") as tar:
        info = tarfile.TarInfo(PAGES)
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(ConfigError, match="is not of `minivllm cache export`"):
        archive.import_from(tmp_path / "there", tmp_path / "fox.tar")


def test_a_sparse_member_is_refused_because_it_may_be_larger_than_its_archive(tmp_path):
    info = tarfile.TarInfo(PAGES)
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    data = b"1\n0\n512\n".ljust(512, b"\0") + bytes(512)
    info.size = len(data)
    with tarfile.open(tmp_path / "fox.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(data))
    with pytest.raises(ConfigError, match="is not of `minivllm cache export`"):
        archive.import_from(tmp_path / "there", tmp_path / "fox.tar")
