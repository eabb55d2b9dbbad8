"""What a server writes down to survive its own end."""

from penstock.journal.model_digest import model_digest
from penstock.journal.stream_journal import StreamJournal

__all__ = ["StreamJournal", "model_digest"]
