"""Stored answers in the journal: the latest state survives, what is deleted is gone, no failure reaches a request."""

from __future__ import annotations

import asyncio
import logging
import signal
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from penstock.contract.errors import ConfigError
from penstock.contract.journal import KeptAnswer
from penstock.journal import AnswerJournal, StreamJournal

SECRET = b"the text that nobody may read any more "


def kept(number: int, content: bytes = b"{}", kind: str = "response") -> KeptAnswer:
    return KeptAnswer(kind, f"resp_{number:032x}", "t", content)


def ids(journal: AnswerJournal, kind: str = "response") -> list[int]:
    return [int(each.id.removeprefix("resp_"), 16) for each in journal.load(kind)]


def settle(journal: AnswerJournal) -> None:
    asyncio.run(journal.settled())


def written(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.iterdir())


def test_the_latest_state_of_each_is_found_after_a_new_start_the_last_written_last(tmp_path):
    with closing(AnswerJournal(tmp_path / "a" / "b")) as journal:
        journal.model = b"m"
        for number in (1, 2, 3):
            journal.put(kept(number, b"old"))
        journal.put(kept(1, "neu ü".encode()))
        journal.put(kept(1, b"chat", "completion"))
        journal.drop("response", kept(2).id)
        journal.delete("completion", kept(9).id)  # was never there
    with closing(AnswerJournal(tmp_path / "a" / "b")) as journal:
        journal.model = b"m"
        assert list(journal.load("response")) == [kept(3, b"old"), kept(1, "neu ü".encode())]
        assert list(journal.load("completion")) == [kept(1, b"chat", "completion")]
        assert list(journal.load("other")) == []
        journal.model = b"n"
        assert [each.same_model for each in journal.load("response")] == [False, False]


def test_what_comes_while_it_writes_is_written_together_and_of_each_only_the_latest(tmp_path):
    with closing(AnswerJournal(tmp_path)) as journal:
        go = threading.Event()
        journal._thread.submit(go.wait)  # a slow disk
        for state in range(1000):
            journal.put(kept(state % 3, b"%d" % state))
        assert len(journal._changes) == 3
        journal.drop("response", kept(0).id)
        go.set()
        settle(journal)
        assert [(each.id, each.content) for each in journal.load("response")] == [
            (kept(1).id, b"997"),
            (kept(2).id, b"998"),
        ]


def test_who_stops_waiting_does_not_keep_it_from_being_written(tmp_path):
    with closing(AnswerJournal(tmp_path)) as journal:
        go = threading.Event()
        journal._thread.submit(go.wait)
        journal.put(kept(1))

        async def impatient() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(journal.settled(), 0.01)

        asyncio.run(impatient())
        go.set()
        settle(journal)
        assert ids(journal) == [1]


@pytest.mark.parametrize("length", [40, 400_000])
def test_nothing_of_what_is_deleted_stays_in_any_file(tmp_path, length):
    text = (SECRET * (length // len(SECRET) + 1))[:length]
    with closing(AnswerJournal(tmp_path)) as journal:
        for number in range(20):
            journal.put(kept(number, b"%d " % number + b"other " * 50))
        for state in (b"first: ", b"second: "):  # the replaced state must go too
            journal.put(kept(7, state + text))
            settle(journal)
        assert SECRET[:30] in written(tmp_path)
        journal.delete("response", kept(7).id)
        settle(journal)
        assert SECRET[:30] not in written(tmp_path)
        assert b"other other" in written(tmp_path)
    assert SECRET[:30] not in written(tmp_path)


def test_what_makes_place_is_overwritten_and_its_pages_are_used_again(tmp_path):
    with closing(AnswerJournal(tmp_path)) as journal:
        for number in range(300):
            journal.put(kept(number, b"%d %s" % (number, SECRET * 500)))
            if number >= 10:
                journal.drop("response", kept(number - 10).id)
            settle(journal)
        assert ids(journal) == list(range(290, 300))
    assert b"100 " + SECRET not in written(tmp_path)
    assert len(written(tmp_path)) < 20 * 500 * len(SECRET)


def test_only_its_owner_can_read_it_also_where_it_was_open_to_others(tmp_path):
    folder = tmp_path / "new"
    AnswerJournal(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "answers.sqlite").chmod(0o644)
    with closing(AnswerJournal(folder)) as journal:
        journal.put(kept(1))
        settle(journal)
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from penstock.contract.journal import KeptAnswer
from penstock.journal import AnswerJournal
journal = AnswerJournal(Path(sys.argv[1]))
async def write():
    for number in range(100):
        journal.put(KeptAnswer("response", f"resp_{number:032x}", "t", b"x" * 10000))
        await journal.settled()
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(write())
"""


def test_what_has_settled_survives_a_process_that_is_killed(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with closing(AnswerJournal(tmp_path)) as journal:
        assert ids(journal) == list(range(100))


FULL = """
import asyncio, logging, resource, sys
from pathlib import Path
from penstock.contract.journal import KeptAnswer
from penstock.journal import AnswerJournal
logging.basicConfig(format="%(message)s")
journal = AnswerJournal(Path(sys.argv[1]))
def answer(number):
    return KeptAnswer("response", str(number), "t", bytes(1000))
async def write():
    journal.put(answer(0))
    await journal.settled()
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    for number in range(1, 300):
        journal.put(answer(number))
        await journal.settled()
    journal.delete("response", "0")
    await journal.settled()
asyncio.run(write())
print([each.id for each in journal.load("response")][0])
journal.close()
journal.put(answer(1))
"""


def test_a_disk_that_takes_no_more_is_one_line_in_the_log_and_no_error(tmp_path):
    ended = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, check=True, text=True)
    assert ended.stdout.split() == ["0"]
    (line,) = ended.stderr.splitlines()
    assert line.startswith("the journal is given up: answers that are stored from now on end with this server")
    assert "answers.sqlite" in line


def test_a_file_that_breaks_while_it_is_used_is_one_line_in_the_log(tmp_path, caplog):
    journal = AnswerJournal(tmp_path)
    journal._thread.submit(journal._connection.close).result()
    with caplog.at_level(logging.ERROR, logger="penstock.journal"):
        for number in range(3):
            journal.put(kept(number))
            settle(journal)
    assert len(caplog.records) == 1
    journal.close()


def test_a_file_that_is_none_or_anothers_is_refused_and_named(tmp_path):
    path = tmp_path / "answers.sqlite"
    path.write_bytes(b"no database" * 500)
    with pytest.raises(ConfigError, match=r"journal: .*answers\.sqlite .*move it away"):
        AnswerJournal(tmp_path)
    path.unlink()
    StreamJournal(tmp_path).close()
    (tmp_path / "streams.sqlite").rename(path)
    with pytest.raises(ConfigError, match=r"answers\.sqlite is no journal of this version"):
        AnswerJournal(tmp_path)
    path.unlink()
    with closing(AnswerJournal(tmp_path)), pytest.raises(ConfigError, match=r"answers\.sqlite is in use by another"):
        AnswerJournal(tmp_path)


def test_a_journal_from_before_there_were_answers_opens(tmp_path):
    StreamJournal(tmp_path).close()
    with closing(StreamJournal(tmp_path)), closing(AnswerJournal(tmp_path)) as journal:
        assert ids(journal) == []


def test_pages_that_are_damaged_are_refused_by_name(tmp_path):
    with closing(AnswerJournal(tmp_path)) as journal:
        for number in range(50):
            journal.put(kept(number, b"x" * 2000))
    path = tmp_path / "answers.sqlite"
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with (
        closing(AnswerJournal(tmp_path)) as journal,
        pytest.raises(ConfigError, match=r"answers\.sqlite cannot be used"),
    ):
        journal.load("response")
