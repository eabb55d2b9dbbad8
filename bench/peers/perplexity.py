"""Measures the quality of llama.cpp's formats: `llama-perplexity` scores them against our float32 logits, same tokens.

`llama-perplexity --kl-divergence` compares a model with a file of base logits, which carries the tokens too. We write
that file, so reference, tokens, chunks and scored positions are ours; the arithmetic is llama.cpp's (log probabilities
in 16 bits; tokens less likely than e^-16 are left out). The file takes 2 bytes for each scored position and each token
of the vocabulary: 25 MB for a chunk of 512 and a vocabulary of 49152.

Layout (llama.cpp, `tools/perplexity/perplexity.cpp`), little-endian: `_logits_`, int32 context, vocabulary, number of
chunks; int32 tokens of all chunks; for each scored position what `exec.divergence.sixteen_bit_log_probs` returns.
"""

from __future__ import annotations

import math
import re
import statistics
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from peers.contenders import Absent, not_installed, split_name
from peers.models import gguf
from peers.process import NotInstalledError, program, run
from penstock.bench.quality import Chunks, Quality, Reference
from penstock.contract.errors import ConfigError, EngineFault
from penstock.exec.divergence import sixteen_bit_log_probs, sixteen_bit_nll

__all__ = ["DEFAULT_PEERS", "find_peer_model", "perplexity_command", "read_perplexity", "score_peer", "write_base"]

DEFAULT_PEERS = ("llama.cpp", "llama.cpp:F32", "llama.cpp:Q8_0", "llama.cpp:Q4_0")
"""The file as it is; F32, which checks that both engines mean the same by float32; and the usual quantised formats."""

_FIGURES = {
    "kl_mean": r"Mean +KLD: *(\S+) ± *(\S+)",
    "kl_median": r"Median +KLD: *(\S+)",
    "kl_p99": r"99\.0% +KLD: *(\S+)",
    "kl_p999": r"99\.9% +KLD: *(\S+)",
    "kl_max": r"Maximum +KLD: *(\S+)",
    "same_top": r"Same top p: *(\S+) ± *(\S+) %",
    "perplexity": r"Mean PPL\(Q\) *: *(\S+)",
    "reference_perplexity": r"Mean PPL\(base\) *: *(\S+)",
    "log_ratio": r"Mean ln\(PPL\(Q\)/PPL\(base\)\) *: *(\S+) ± *(\S+)",
}
"""Patterns of the figures that are read, by their names in `Quality`."""

_BASE_TOLERANCE = 0.001
"""Largest allowed difference between the logarithms of the base's perplexity as written and as read."""


def find_peer_model(name: str, folder: Path, model: Path) -> Path | Absent:
    """Find the file that a peer is scored on: `model`, or the model in the width that `name` carries.

    Raises:
        ConfigError: there is no such peer or width, or the peer is not llama.cpp.
    """
    engine, width = split_name(name)
    if engine != "llama.cpp":
        raise ConfigError("peer", f"{engine} cannot tell its quality; only llama.cpp can")
    if not model.is_file():
        return Absent(name, "reads GGUF files only, and the model is a directory")
    try:
        program(folder, "llama.cpp", "llama-perplexity")
        return gguf(folder, model, width) if width else model
    except NotInstalledError as missing:
        return not_installed(name, missing)


def write_base(reference: Reference, target: Path, advance: Callable[[], object]) -> float:
    """Write the reference's logits as `llama-perplexity` reads them; `advance` is called after each chunk.

    Returns:
        The perplexity that the file holds: below the reference's own if some tokens are too unlikely for the format.
    """
    chunks = reference.chunks
    tokens = list(chain.from_iterable(chunks.tokens))
    nll: list[float] = []
    with target.open("wb") as base:
        for index, chunk in enumerate(chunks.tokens):
            following = chunk[chunks.first + 1 :]
            for piece, logits in reference.pieces(index):
                if not base.tell():
                    base.write(b"_logits_" + struct.pack("<3i", chunks.context, logits.shape[1], len(chunks.tokens)))
                    base.write(struct.pack(f"<{len(tokens)}i", *tokens))
                base.write(sixteen_bit_log_probs(logits))
                nll += sixteen_bit_nll(logits, following[piece])
            advance()
    return math.exp(statistics.fmean(nll))


def perplexity_command(name: str, folder: Path, model: Path, base: Path, context: int, threads: int) -> list[str]:
    """Return the argument vector that scores `model`; keys and values are in float32 if the weights are."""
    cache = ["--cache-type-k", "f32", "--cache-type-v", "f32"] if name.endswith(":F32") else []
    sizes = ["-c", str(context), "-b", str(context), "-t", str(threads), "-tb", str(threads)]
    what = ["-m", str(model), "--kl-divergence", "--kl-divergence-base", str(base)]
    return [str(program(folder, "llama.cpp", "llama-perplexity")), *what, *sizes, *cache]


def score_peer(
    name: str,
    folder: Path,
    model: Path,
    base: Path,
    base_perplexity: float,
    chunks: Chunks,
    threads: int,
    execute: Callable[[Sequence[str]], str] = run,
) -> Quality:
    """Run llama.cpp on the base logits.

    Args:
        name: as in `find_peer_model`.
        folder: the directory of peers.
        model: what `find_peer_model` returned.
        base: what `write_base` wrote.
        base_perplexity: what `write_base` returned; llama.cpp must read the same.
        chunks: the chunks of the text.
        threads: compute threads.
        execute: runs a command and returns what it printed.

    Raises:
        EngineFault: llama.cpp failed, or its figures cannot be understood.
    """
    printed = execute(perplexity_command(name, folder, model, base, chunks.context, threads))
    found = read_perplexity(printed, name, model.stat().st_size, chunks.positions)
    if abs(math.log(found.reference_perplexity / base_perplexity)) > _BASE_TOLERANCE:
        theirs = found.reference_perplexity
        raise EngineFault(f"{name} read a perplexity of {theirs} from base logits that have {base_perplexity}")
    return found


def read_perplexity(printed: str, name: str, weight_bytes: int, positions: int) -> Quality:
    """Read the figures that `llama-perplexity --kl-divergence` ends with.

    Raises:
        EngineFault: a figure is missing; llama-perplexity prints none for fewer than 100 positions.
    """
    figures: dict[str, float] = {}
    for figure, pattern in _FIGURES.items():
        match = re.search(pattern, printed)
        if match is None:
            raise EngineFault(f"{name} printed no {figure}: {printed[-300:].strip()!r}")
        unit = 100 if figure == "same_top" else 1
        for key, value in zip((figure, f"{figure.removesuffix('_mean')}_error"), match.groups(), strict=False):
            figures[key] = float(value) / unit
    return Quality(name=name, weight_bytes=weight_bytes, positions=positions, **figures)
