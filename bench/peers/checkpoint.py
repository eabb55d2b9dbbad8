"""Writes a GGUF file's model as a directory of bfloat16 safetensors, for engines that read nothing else.

Run as a script by an interpreter that has transformers and gguf, never imported: it uses nothing of Penstock, so that
Penstock has no part in reading what the other engines compute on. The weights are the file's blocks, dequantised.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Read a file and write a directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="A GGUF file.")
    parser.add_argument("target", type=Path, help="The directory to write.")
    options = parser.parse_args()
    torch, transformers = import_module("torch"), import_module("transformers")
    folder, place = str(options.model.parent), {"gguf_file": options.model.name}
    plain = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=plain, **place
    )
    model.hf_quantizer = None  # or it would restore the quantised form: the weights are plain numbers by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(options.target))
    transformers.AutoTokenizer.from_pretrained(folder, **place).save_pretrained(str(options.target))


if __name__ == "__main__":
    main()
