"""Converts the model to the formats that other engines read: once, by their own tools, and keeps it beside them.

llama-quantize makes other bit widths, transformers a directory of bfloat16, and optimum-intel OpenVINO's format, whose
weights it rounds itself. A file gets its final name, which tells what it was made from, once it is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from peers.process import NotInstalledError, program, run

__all__ = ["EXPORTED_WIDTHS", "GGUF_WIDTHS", "checkpoint", "convert", "exported", "gguf", "transformers_python"]

GGUF_WIDTHS = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1")
"""Bit widths that a GGUF file can be converted to, the widest first."""

EXPORTED_WIDTHS = {"fp16": ("fp16",), "int8": ("int8",), "int4": ("int4", "--group-size", "64")}
"""Bit widths of weights that OpenVINO's own exporter writes, as its options: groups must divide a layer's width."""

_WRITE_CHECKPOINT = Path(__file__).with_name("checkpoint.py")


def gguf(folder: Path, model: Path, width: str) -> Path:
    """Return the GGUF file in another bit width.

    Raises:
        NotInstalledError: llama-quantize is missing.
        EngineFault: llama-quantize failed.
    """
    quantize = program(folder, "llama.cpp", "llama-quantize", "to convert the model")
    return convert(quantize, model, width, folder / "models")


def convert(quantize: Path, model: Path, width: str, target_folder: Path) -> Path:
    """Convert the file to another bit width."""

    def make(partial: Path) -> None:
        run([str(quantize), "--allow-requantize", str(model), str(partial), width])

    return _made_once(model, target_folder, f"{width}.gguf", make)


def checkpoint(folder: Path, model: Path) -> Path:
    """Return the model as a directory of safetensors: the directory itself, or a GGUF file's numbers in bfloat16.

    Raises:
        NotInstalledError: transformers is missing.
        EngineFault: the conversion failed.
    """
    if model.is_dir():
        return model
    python = transformers_python(folder)

    def make(partial: Path) -> None:
        run([str(python), "-P", str(_WRITE_CHECKPOINT), str(model), str(partial)])

    return _made_once(model, folder / "models", "bf16", make)


def exported(folder: Path, model: Path, width: str) -> Path:
    """Return the model in OpenVINO's format, with weights in one of `EXPORTED_WIDTHS`.

    Raises:
        NotInstalledError: optimum-intel or transformers is missing.
        EngineFault: the conversion failed.
    """
    python, source = program(folder, "optimum-intel"), checkpoint(folder, model)

    def make(partial: Path) -> None:
        what = [
            "--model",
            str(source),
            "--task",
            "text-generation-with-past",
            "--weight-format",
            *EXPORTED_WIDTHS[width],
        ]
        run([str(python), "-m", "optimum.commands.optimum_cli", "export", "openvino", *what, str(partial)])

    return _made_once(model, folder / "models", f"openvino-{width}", make)


def transformers_python(folder: Path) -> Path:
    """Find an interpreter with transformers: its own environment's, or ours if that happens to have the packages.

    Raises:
        NotInstalledError: there is neither.
    """
    try:
        return program(folder, "transformers")
    except NotInstalledError:
        if any(find_spec(package) is None for package in ("transformers", "accelerate", "gguf")):
            raise
        return Path(sys.executable)


def _made_once(model: Path, target_folder: Path, ending: str, make: Callable[[Path], None]) -> Path:
    """Make a file or directory from `model`, unless it exists; `make` is given a name to write to."""
    status = model.stat()
    digest = hashlib.sha256(f"{model.resolve()}/{status.st_size}/{status.st_mtime_ns}".encode()).hexdigest()[:8]
    target = target_folder / f"{model.stem if model.is_file() else model.name}.{digest}.{ending}"
    if target.exists():
        return target
    target_folder.mkdir(parents=True, exist_ok=True)
    partial = target_folder / f"{target.name}.{os.getpid()}.partial"
    try:
        make(partial)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if partial.is_file():
            partial.unlink()
    return target
