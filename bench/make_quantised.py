"""Writes a checkpoint as GGUF files in the formats that people download, with llama.cpp's own quantiser.

    python bench/make_random_checkpoint.py CHECKPOINT
    python bench/make_quantised.py CHECKPOINT FOLDER [--format Q4_K_M --format Q6_K ...]
    python bench/compare.py FOLDER/CHECKPOINT-Q4_K_M.gguf --ours file --peer llama.cpp --peer ik_llama.cpp

The checkpoint is converted once (see `peers.write_gguf`) to FOLDER/CHECKPOINT-BF16.gguf, which is kept. llama.cpp must
be installed; `python bench/compare.py --install --peer llama.cpp` installs it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from peers.process import NotInstalledError, program, run
from peers.write_gguf import write_gguf
from penstock.bench.quality import CORPUS
from penstock.contract.errors import EngineFault
from penstock.weights.locate import default_cache_dir

__all__ = ["FORMATS", "NEED_IMPORTANCE", "main", "make_quantised"]

_MXFP4 = ("--tensor-type", "attn_=mxfp4", "--tensor-type", "ffn_=mxfp4")
_PLAIN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")
_UNEVEN = ("IQ4_NL", "IQ4_XS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4_MOE")
NEED_IMPORTANCE = ("IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
"""Formats that the quantiser writes only with an importance matrix, or that nobody publishes without one."""

_TERNARY = {f"{kind}_IN_3": ("--tensor-type", rf"blk\.1[0-2]\.ffn_={kind.lower()}") for kind in ("TQ1_0", "TQ2_0")}

FORMATS = {**dict.fromkeys((*_PLAIN, *_UNEVEN, *NEED_IMPORTANCE), ()), "MXFP4": _MXFP4, **_TERNARY}
"""Formats, with the quantiser's options. The quantiser has no MXFP4 for models without experts, so its MXFP4_MOE, which
leaves all but experts in Q8_0, is told to convert the matrices of layers too. A model that was not trained for three
values generates nonsense with them: TQ1_0_IN_3 and TQ2_0_IN_3 use them only in the MLPs of layers 10 to 12; the rest is
Q8_0."""

_WORDS = {"MXFP4": "MXFP4_MOE", **dict.fromkeys(_TERNARY, "Q8_0")}
"""The quantiser's name for a format, where it differs from ours."""

_IMPORTANCE_CHUNKS = 16


def make_quantised(checkpoint: Path, folder: Path, formats: list[str], peers: Path) -> list[Path]:
    """Write `<checkpoint>-<format>.gguf` for each format, unless the file is there.

    Args:
        checkpoint: a Hugging Face directory.
        folder: where files are written.
        formats: keys of `FORMATS`.
        peers: the folder of the peers.

    Raises:
        NotInstalledError: llama.cpp's quantiser or its importance-matrix program is missing.
        EngineFault: one of these programs failed.
        ValueError: the checkpoint cannot be written as GGUF.
    """
    quantiser = program(peers, "llama.cpp", "llama-quantize")
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / f"{checkpoint.name}-BF16.gguf"
    if not plain.exists():
        partial = plain.with_suffix(".partial")
        write_gguf(checkpoint, partial)
        partial.replace(plain)
    made = []
    for name in formats:
        target = folder / f"{checkpoint.name}-{name}.gguf"
        if not target.exists():
            partial = target.with_suffix(".partial")
            options = [*FORMATS[name]]
            if name in NEED_IMPORTANCE:
                options += ["--imatrix", str(_importance(plain, peers))]
            run([str(quantiser), *options, str(plain), str(partial), _WORDS.get(name, name)])
            partial.replace(target)
        made.append(target)
    return made


def _importance(plain: Path, peers: Path) -> Path:
    """The file beside a model with its importance matrix; llama.cpp computes it on our corpus if it is not there."""
    target = plain.with_suffix(".imatrix")
    if not target.exists():
        partial = target.with_suffix(".partial")
        counter = program(peers, "llama.cpp", "llama-imatrix")
        text = ["-f", str(CORPUS), "--chunks", str(_IMPORTANCE_CHUNKS), "-c", "512"]
        run([str(counter), "-m", str(plain), *text, "-o", str(partial)])
        partial.replace(target)
    return target


def main() -> None:
    """Write the files that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a Hugging Face directory")
    parser.add_argument("folder", type=Path, help="where the files are written")
    parser.add_argument("--format", action="append", choices=FORMATS, dest="formats", help="default: Q4_K_M")
    parser.add_argument("--peers-dir", type=Path, help="where llama.cpp is; by default in the cache")
    options = parser.parse_args()
    peers = options.peers_dir or default_cache_dir(os.environ) / "peers"
    try:
        made = make_quantised(options.checkpoint, options.folder, options.formats or ["Q4_K_M"], peers)
    except NotInstalledError as missing:
        hint = "run: python bench/compare.py --install --peer llama.cpp"
        raise SystemExit(f"llama-quantize or llama-imatrix is not installed in {peers}; {hint}") from missing
    except (EngineFault, OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    for path in made:
        print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
