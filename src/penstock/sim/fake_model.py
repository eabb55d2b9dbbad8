"""A language model without weights: the next token, and each hidden state, is a hash of everything before it.

Decides what is right: `golden` computes an answer from the tokens alone, with no memory, blocks or batch, so that the
answers of a runner with a KV memory can be compared with it. Does not know plans.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence

from penstock.contract.embedding import Pooling
from penstock.contract.sampling import SamplingSpec

__all__ = [
    "START",
    "carry",
    "cell",
    "golden",
    "golden_embedding",
    "pooled_places",
    "hidden_state",
    "log_probability",
    "next_token",
    "seen",
    "vector",
]

CELL_BITS = 63
START = 1
"""The recurrent state before the first token."""
_FINITE = 0xBFFF_FFFF_BFFF_FFFF


def cell(token: int, position: int, adapter: str = "") -> int:
    """The value in the fake KV memory for `token` at `position`: a different one for any two that a test will meet."""
    return (token * 1_000_003 + position * 7_919 + 1 + (zlib.crc32(adapter.encode()) << 24)) % (1 << CELL_BITS)


def carry(state: int, cells: Sequence[int]) -> int:
    """The recurrent state after `cells`, the KV of the positions that follow `state`."""
    for each in cells:
        state = (state * 6_364_136_223_846_793_005 + each) % (1 << CELL_BITS)
    return state


def next_token(cells: Sequence[int], vocab_size: int, sampling: SamplingSpec, choice: int) -> int:
    """The token after a prefix whose KV is `cells`; random choices differ by seed and choice, as real ones do."""
    seed = int(sampling.get("seed", 0))
    message = struct.pack(f"<{len(cells) + 2}q", seed % (1 << CELL_BITS), choice, *cells)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") % vocab_size


def log_probability(token: int) -> float:
    """The log probability of a chosen token: a different number for each token."""
    return -1.0 / (1 + token)


def seen(cells: Sequence[int], window: int | None) -> Sequence[int]:
    """The part of a prefix that its last position sees."""
    return cells if window is None else cells[-window:]


def hidden_state(cells: Sequence[int]) -> int:
    """The hidden state at the last position of a prefix whose KV is `cells`: a number that stands for a vector."""
    message = struct.pack(f"<{len(cells)}q", *cells)
    return int.from_bytes(hashlib.blake2b(message, digest_size=6).digest(), "little")


def golden_embedding(
    prompt: Sequence[int], pooling: Pooling, window: int | None = None, stateful: bool = False
) -> bytes:
    """The embedding of `prompt`, computed without any KV memory; here a mean is the sum of all hidden states."""
    cells = [cell(token, position) for position, token in enumerate(prompt)]
    ends = pooled_places(pooling, 0, len(cells))
    return vector(sum(hidden_state(_known(cells[:end], window, stateful)) for end in ends))


def pooled_places(pooling: Pooling, start: int, end: int) -> range:
    """The pooled positions of `[start, end)`, each given as the number of positions up to and including it."""
    if pooling is Pooling.CLS:
        return range(1, 2 if start == 0 else 1)
    return range(end if pooling is Pooling.LAST else start + 1, end + 1)


def vector(pooled: int) -> bytes:
    """An embedding of two float32 numbers, both finite: the top bit of their exponents is not set."""
    return (pooled & _FINITE).to_bytes(8, "little")


def golden(
    prompt: Sequence[int],
    count: int,
    vocab_size: int,
    sampling: SamplingSpec,
    choice: int = 0,
    window: int | None = None,
    stateful: bool = False,
    adapter: str = "",
) -> tuple[int, ...]:
    """The `count` tokens that follow `prompt`, computed without any KV memory; stop rules are ignored.

    With `stateful`, the model carries a recurrent state besides its KV, and the tokens depend on it too.
    """
    tokens = list(prompt)
    cells = [cell(token, position, adapter) for position, token in enumerate(tokens)]
    for _ in range(count):
        tokens.append(next_token(_known(cells, window, stateful), vocab_size, sampling, choice))
        cells.append(cell(tokens[-1], len(cells), adapter))
    return tuple(tokens[len(prompt) :])


def _known(cells: Sequence[int], window: int | None, stateful: bool) -> Sequence[int]:
    """What the last position sees of its prefix, followed by the recurrent state, if any."""
    return [*seen(cells, window), carry(START, cells)] if stateful else seen(cells, window)
