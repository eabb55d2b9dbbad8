"""Writes GGUF files of a checkpoint in the formats that people download, by llama.cpp's own quantiser.

    python bench/make_random_checkpoint.py CHECKPOINT
    python bench/make_quantised.py CHECKPOINT FOLDER [--format Q4_K_M --format Q6_K ...]
    python bench/compare.py FOLDER/CHECKPOINT-Q4_K_M.gguf --ours file --peer llama.cpp --peer ik_llama.cpp

The checkpoint is converted once (see `peers.write_gguf`) to FOLDER/CHECKPOINT-BF16.gguf, which stays. llama.cpp must be
installed; `python bench/compare.py --install --peer llama.cpp` does that.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from peers.process import NotInstalledError, program, run
from peers.write_gguf import write_gguf
from penstock.contract.errors import EngineFault
from penstock.weights.locate import default_cache_dir

__all__ = ["FORMATS", "main", "make_quantised"]

FORMATS = {
    "Q4_K_M": (),
    "Q5_K_M": (),
    "Q6_K": (),
    "IQ4_XS": (),
    "MXFP4": ("--tensor-type", "attn_=mxfp4", "--tensor-type", "ffn_=mxfp4"),
    "MXFP4_MOE": (),
}
"""Formats, with the quantiser's options. It has no MXFP4 for models without experts: its MXFP4_MOE, in which all but
experts is Q8_0, is told to take the matrices of layers too."""

_WORDS = {"MXFP4": "MXFP4_MOE"}
"""What the quantiser calls a format, where it is another word."""


def make_quantised(checkpoint: Path, folder: Path, formats: list[str], quantiser: Path) -> list[Path]:
    """Write `<checkpoint>-<format>.gguf` for each format, where it is not there.

    Raises:
        EngineFault: the quantiser failed.
        ValueError: the checkpoint cannot be written as GGUF.
    """
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
            run([str(quantiser), *FORMATS[name], str(plain), str(partial), _WORDS.get(name, name)])
            partial.replace(target)
        made.append(target)
    return made


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
        quantiser = program(peers, "llama.cpp", "llama-quantize")
        made = make_quantised(options.checkpoint, options.folder, options.formats or ["Q4_K_M"], quantiser)
    except NotInstalledError as missing:
        hint = "run: python bench/compare.py --install --peer llama.cpp"
        raise SystemExit(f"llama-quantize is not installed in {peers}; {hint}") from missing
    except (EngineFault, OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    for path in made:
        print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
