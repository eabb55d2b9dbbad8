"""Publishes what the prefix cache holds, for routers that send a prompt where its beginning is cached.

The protocol is vLLM's: `messages` writes batches, `publisher` sends them and sends them again to whoever missed some.
"""

from penstock.kv_events.messages import MEDIUM, block_hash, encoder
from penstock.kv_events.publisher import KvEventPublisher

__all__ = ["MEDIUM", "KvEventPublisher", "block_hash", "encoder"]
