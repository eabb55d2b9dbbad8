"""Files in which a server saves what must survive its end."""

from penstock.journal.answer_journal import AnswerJournal
from penstock.journal.model_digest import model_digest
from penstock.journal.stream_journal import StreamJournal

__all__ = ["AnswerJournal", "StreamJournal", "model_digest"]
