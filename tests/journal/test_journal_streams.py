"""The journal: what is written survives the process that wrote it, and no trouble with its file reaches a request."""

from __future__ import annotations

import asyncio
import logging
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.contract.journal import BegunStream
from penstock.contract.memory import MemoryReport, RunnerFacts
from penstock.journal import StreamJournal, model_digest
from penstock.journal.model_digest import ANSWERING

MODEL = b"m" * 32


def begun(number: int, tenant: str = "t") -> BegunStream:
    return BegunStream(f"cmpl-{number:032x}", tenant, bytes([number % 256]) * 32, 1_700_000_000 + number)


def opened(directory: Path, **options: int) -> StreamJournal:
    journal = StreamJournal(directory, **options)
    journal.model = MODEL
    return journal


def add(journal: StreamJournal, *streams: BegunStream) -> None:
    async def write() -> None:
        for stream in streams:
            await journal.add(stream)

    asyncio.run(write())


def find_all(journal: StreamJournal, *numbers: int) -> list[BegunStream | None]:
    async def read() -> list[BegunStream | None]:
        return [await journal.find(begun(number).id) for number in numbers]

    return asyncio.run(read())


def find(journal: StreamJournal, number: int) -> BegunStream | None:
    return find_all(journal, number)[0]


def test_what_is_written_is_found_also_after_a_new_start(tmp_path):
    journal = opened(tmp_path / "a" / "b")
    add(journal, begun(1), begun(2, ""), begun(2, "other"))
    assert [find(journal, number) for number in (1, 2, 3)] == [begun(1), begun(2, ""), None]
    journal.close()
    again = opened(tmp_path / "a" / "b")
    assert [find(again, number) for number in (1, 2, 3)] == [begun(1), begun(2, ""), None]
    again.close()


def test_a_stream_of_another_model_says_so(tmp_path):
    journal = opened(tmp_path)
    add(journal, begun(1))
    journal.close()
    again = StreamJournal(tmp_path)
    again.model = b"n" * 32
    found = find(again, 1)
    assert found is not None
    assert not found.same_model
    again.close()


def test_only_the_latest_are_kept_and_the_file_does_not_grow(tmp_path):
    journal = opened(tmp_path, most=50)
    add(journal, *map(begun, range(100)))
    size = used(tmp_path)
    add(journal, *map(begun, range(100, 1000)))
    assert [find(journal, number) is None for number in (0, 949, 950, 999)] == [True, True, False, False]
    assert used(tmp_path) < size + 100_000
    journal.close()


def used(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if not path.name.endswith("-wal"))


def test_only_its_owner_can_read_it(tmp_path):
    opened(tmp_path / "new").close()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new" / "streams.sqlite").stat().st_mode) == 0o600


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from penstock.contract.journal import BegunStream
from penstock.journal import StreamJournal
journal = StreamJournal(Path(sys.argv[1]))
journal.model = b"m" * 32
async def write():
    for number in range(300):
        await journal.add(BegunStream(f"cmpl-{number:032x}", "t", bytes([number % 256]) * 32, 1_700_000_000 + number))
        print(number, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(write())
"""


def test_what_was_written_survives_a_process_that_is_killed(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stdout.split()[-1] == "299"
    journal = opened(tmp_path)
    assert find_all(journal, *range(300)) == [begun(number) for number in range(300)]
    journal.close()


FULL = """
import asyncio, logging, resource, sys
from pathlib import Path
from penstock.contract.journal import BegunStream
from penstock.journal import StreamJournal
logging.basicConfig(format="%(message)s")
journal = StreamJournal(Path(sys.argv[1]))
def stream(number):
    return BegunStream(f"cmpl-{number:032x}", "t", bytes(32), number)
async def write():
    await journal.add(stream(0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    for number in range(1, 500):
        await journal.add(stream(number))
    print(await journal.find(stream(0).id) == stream(0), await journal.find(stream(499).id), await journal.find("x"))
asyncio.run(write())
journal.close()
"""


def test_a_disk_that_takes_no_more_is_one_line_in_the_log_and_no_error(tmp_path):
    ended = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, check=True, text=True)
    assert ended.stdout.split() == ["True", "None", "None"]
    (line,) = ended.stderr.splitlines()
    assert line.startswith("the journal is given up, new streams will not survive the end of this server: ")


def test_a_file_that_breaks_while_it_is_used_is_no_error_of_a_request(tmp_path, caplog):
    journal = opened(tmp_path)
    add(journal, begun(1))
    journal._thread.submit(journal._connection.close).result()  # as if the file were gone: nothing works any more
    with caplog.at_level(logging.ERROR, logger="penstock.journal"):
        assert find(journal, 1) is None
        add(journal, begun(2), begun(3))
    assert sum("given up" in record.message for record in caplog.records) == 1
    journal.close()


def test_two_servers_do_not_share_one(tmp_path):
    journal = opened(tmp_path)
    with pytest.raises(ConfigError, match=r"journal: .*streams\.sqlite is in use by another server"):
        StreamJournal(tmp_path)
    journal.close()
    opened(tmp_path).close()


@pytest.mark.parametrize("content", [b"no database" * 500, b"SQLite format 3\0" + bytes(100)])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path, content):
    (tmp_path / "streams.sqlite").write_bytes(content)
    with pytest.raises(ConfigError, match=r"journal: .*streams\.sqlite .*move it away"):
        StreamJournal(tmp_path)
    assert (tmp_path / "streams.sqlite").read_bytes() == content


def test_another_version_or_program_is_refused(tmp_path):
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / "streams.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="is no journal of this version"):
        StreamJournal(tmp_path)
    (tmp_path / "streams.sqlite").unlink()
    with sqlite3.connect(tmp_path / "streams.sqlite") as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    theirs = (tmp_path / "streams.sqlite").read_bytes()
    with pytest.raises(ConfigError, match="is no journal of this version"):
        StreamJournal(tmp_path)
    assert (tmp_path / "streams.sqlite").read_bytes() == theirs


def test_a_directory_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"journal: .* cannot be written to"):
        StreamJournal(tmp_path / "file")


def test_the_digest_follows_from_all_that_changes_answers_and_from_nothing_else():
    def digest(model: bytes = b"m", most: int = 64, **options: object) -> bytes:
        memory = MemoryReport.__new__(MemoryReport)
        config = EngineConfig(**options)
        return model_digest(RunnerFacts(config, memory, 9, 9, None, looks_ahead=False, model_digest=model), most)

    plain = digest()
    assert plain == digest() == digest(max_num_seqs=3, threads=2, prefix_caching=False, record="x")
    options = [{"dtype": "float32"}, {"quantization": "int8"}, {"tokenizer": "x"}, {"device": "cpu"}]
    others = [digest(b"n"), digest(most=65), *(digest(**each) for each in options)]
    assert len({plain, *others}) == 1 + len(others)
    assert set(ANSWERING) < set(EngineConfig.__dataclass_fields__)
