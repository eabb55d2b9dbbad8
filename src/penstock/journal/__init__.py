"""What a server writes down to survive its own end."""

from penstock.journal.answer_journal import AnswerJournal
from penstock.journal.model_digest import model_digest
from penstock.journal.stream_journal import StreamJournal

__all__ = ["AnswerJournal", "StreamJournal", "model_digest"]
