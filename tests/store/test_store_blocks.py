"""Blocks in files: what is read is what was written, or nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_harness import BYTES, SIZE, body_of, fill, open_store, save_of

from penstock.store import BlockStore, clear, folders, open_folder
from penstock.store.folders import block_files

HARNESS = Path(__file__).parent / "store_harness.py"
KILLS = [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.deep)]


def test_what_is_written_is_found_and_read(tmp_path):
    store = open_store(tmp_path)
    assert store.read(save_of(1).key) is None
    fill(store, range(1, 4))
    keys = [save_of(number).key for number in range(1, 6)]
    assert store.leading(keys) == 3
    assert store.leading(keys[3:]) == 0
    for number in range(1, 4):
        assert store.read(save_of(number).key) == body_of(number)
    origin, body = store.origin(keys[1])
    assert origin == (keys[1], keys[0], 2, tuple(range(2, 2 + SIZE)))
    assert body == body_of(2)


def test_a_block_that_is_there_is_not_written_again(tmp_path):
    store = open_store(tmp_path)
    assert store.write(save_of(1), body_of(1)) > BYTES
    assert store.write(save_of(1), body_of(2)) == 0
    assert store.read(save_of(1).key) == body_of(1)


def test_another_process_finds_it(tmp_path):
    fill(open_store(tmp_path), range(1, 3))
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "from store_harness import *;"
        "print(bytes(open_store(Path(sys.argv[1])).read(save_of(2).key)) == body_of(2))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(HARNESS.parent)], capture_output=True, check=True
    )
    assert found.stdout.strip() == b"True"


def test_blocks_of_another_contract_are_not_found(tmp_path):
    fill(open_store(tmp_path), range(1, 3))
    for other in (open_store(tmp_path, isa="other"), open_store(tmp_path, block_bytes=BYTES + 64)):
        assert not other.has(save_of(1).key)
        assert other.read(save_of(1).key) is None
    assert {folder.facts["isa"] for folder in folders(tmp_path)} == {"any", "other"}
    assert sum(folder.size()[0] for folder in folders(tmp_path)) == 2


def test_a_file_under_a_wrong_name_is_no_block(tmp_path):
    """Neither where another key leads to it, nor in another contract's folder."""
    store = open_store(tmp_path)
    other = open_store(tmp_path, isa="other")
    fill(store, range(1, 3))
    one, two = (Path(store._file(save_of(number).key)) for number in (1, 2))
    two.write_bytes(one.read_bytes())
    foreign = Path(other._file(save_of(1).key))
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(one.read_bytes())
    assert store.read(save_of(2).key) is None
    assert other.read(save_of(1).key) is None
    assert not two.exists()
    assert not foreign.exists()


def test_a_flipped_byte_is_a_miss(tmp_path):
    """Of 1,000 blocks, each with one byte changed somewhere, none is read, and none is left."""
    store, rng = open_store(tmp_path, block_bytes=256), random.Random(1)
    for number in range(1000):
        store.write(save_of(number), body_of(number, 256))
    length = store.folder.form.file_bytes
    for number in range(1000):
        path = Path(store._file(save_of(number).key))
        content = bytearray(path.read_bytes())
        content[number if number < length else rng.randrange(length)] ^= rng.randrange(1, 256)
        path.write_bytes(content)
    assert [store.read(save_of(number).key) for number in range(1000)] == [None] * 1000
    assert store.damaged == 1000
    assert not list(block_files(store.folder.path))


@given(st.data())
def test_what_is_cut_or_added_is_a_miss(tmp_path_factory, data):
    store = open_store(tmp_path_factory.mktemp("store"), block_bytes=64)
    store.write(save_of(1), body_of(1, 64))
    path = Path(store._file(save_of(1).key))
    whole = path.read_bytes()
    length = data.draw(st.integers(0, 2 * len(whole)).filter(lambda count: count != len(whole)))
    path.write_bytes((whole + whole)[:length])
    assert store.read(save_of(1).key) is None
    assert not path.exists()
    store.write(save_of(1), body_of(1, 64))
    assert store.read(save_of(1).key) == body_of(1, 64)


@pytest.mark.parametrize("kills", KILLS)
def test_kills_while_writing_leave_whole_blocks_and_others_none(kills, tmp_path):
    """A reader, meanwhile or afterwards, finds a block as it was written or not at all."""
    size, rng = 400_000, random.Random(2)
    store, wrong, right = open_store(tmp_path, block_bytes=size), 0, 0
    for kill in range(kills):
        first = 1000 * kill
        writer = subprocess.Popen(
            [sys.executable, str(HARNESS), str(tmp_path), str(first), str(size)], stdout=subprocess.PIPE
        )
        writer.stdout.readline()
        until = time.monotonic() + rng.uniform(0.0, 0.03)
        while time.monotonic() < until:
            store.read(save_of(first).key)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        for number in range(first, first + 1000):
            content = store.read(save_of(number).key)
            wrong += content is not None and content != body_of(number, size)
            right += content is not None
        for entry in block_files(store.folder.path):
            os.unlink(entry.path)
    assert wrong == store.damaged == 0
    assert right > kills / 2


def test_a_disk_that_takes_no_more_leaves_nothing_behind(tmp_path):
    """A limit on the size of files stands for a full disk: the write ends in the middle."""
    program = (
        "import resource, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "from store_harness import *;"
        "store = open_store(Path(sys.argv[1]));"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000));\n"
        "try: store.write(save_of(1), body_of(1))\n"
        "except OSError as error: print(error.errno)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(HARNESS.parent)], capture_output=True, check=True
    )
    assert found.stdout.strip()
    store = open_store(tmp_path)
    assert not store.has(save_of(1).key)
    assert not list((store.folder.path / "tmp").iterdir())


def test_others_cannot_read_it(tmp_path):
    store = open_store(tmp_path / "store")
    fill(store, range(1))
    path = Path(store._file(save_of(0).key))
    assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


def test_a_folder_says_what_is_in_it_and_can_be_cleared(tmp_path):
    fill(open_store(tmp_path), range(3))
    fill(open_store(tmp_path, isa="other"), range(2))
    (tmp_path / "lost+found").mkdir()
    one = next(folder for folder in folders(tmp_path) if folder.facts["isa"] == "any")
    assert one.size() == (3, 3 * one.form.file_bytes)
    assert one.facts["model"] == "tiny"
    assert clear(tmp_path, one) == 3
    assert clear(tmp_path) == 2
    assert list(folders(tmp_path)) == []
    assert list(folders(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("other", [{"isa": "x"}, {"model": "y"}])
def test_the_contract_is_all_facts(tmp_path, other):
    same = open_folder(tmp_path, {"isa": "any", "model": "tiny"}, SIZE, BYTES)
    assert open_folder(tmp_path, {"model": "tiny", "isa": "any"}, SIZE, BYTES) == same
    assert open_folder(tmp_path, {"model": "tiny", "isa": "any", **other}, SIZE, BYTES).path != same.path
    assert open_folder(tmp_path, {"model": "tiny", "isa": "any"}, SIZE + 1, BYTES).path != same.path
    assert BlockStore(same).folder.form.contract != b""


def test_a_writer_goes_on_where_its_folder_was_cleared(tmp_path):
    store = open_store(tmp_path)
    fill(store, range(2))
    clear(tmp_path)
    assert store.read(save_of(0).key) is None
    fill(store, range(5, 7))
    assert store.read(save_of(6).key) == body_of(6)
    assert next(folders(tmp_path)) == store.folder
