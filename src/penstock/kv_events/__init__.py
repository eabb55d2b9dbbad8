"""Publishes what the prefix cache holds, for routers that send a prompt to an engine that has its prefix cached.

The protocol is vLLM's: `messages` encodes batches; `publisher` sends them, and again to readers that missed some.
"""

from penstock.kv_events.messages import MEDIUM, block_hash, encoder
from penstock.kv_events.publisher import KvEventPublisher

__all__ = ["MEDIUM", "KvEventPublisher", "block_hash", "encoder"]
