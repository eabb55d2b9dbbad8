"""The files of a LoRA adapter, whatever their format: which modules it updates, and by which factors.

Decides what is read of an adapter, and which format a path is in. Does not know the adapter's model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.weights.source import open_binary

__all__ = ["AdapterFiles", "Factors", "digest_of"]

MOST_FILE_BYTES = 16 << 30
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter adds to one module: `scale * B @ A` is added to its weight.

    Attributes:
        module: the module's name, as in the model's Hugging Face checkpoint.
        down: name in the file of the tensor of A, `[rank, K]`.
        up: name in the file of the tensor of B, `[N, rank]`.
        shapes: shapes of A and B.
        scale: the factor on `B @ A`.
    """

    module: str
    down: str
    up: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    scale: float

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return self.shapes[0][0]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An opened adapter.

    Attributes:
        path: the directory or the file.
        file: the file with its tensors, for messages.
        factors: factors by module, in the order of the modules' names.
        digest: hex digits that identify the contents of its files.
        read_tensor: fills a float32 tensor with the numbers of a stored one, by its name.
    """

    path: Path
    file: str
    factors: Mapping[str, Factors]
    digest: str
    read_tensor: Callable[[str, Tensor], None]

    def read(self, factors: Factors) -> tuple[Tensor, Tensor]:
        """A and B of a module, float32; B is not scaled.

        Raises:
            ModelFileError: the file became shorter, or a number is infinite or NaN.
        """
        down, up = (torch.empty(shape) for shape in factors.shapes)
        for name, numbers in ((factors.down, down), (factors.up, up)):
            self.read_tensor(name, numbers)
            if not bool(torch.isfinite(numbers).all()):
                raise ModelFileError(self.file, name, "holds numbers that are infinite or NaN")
        return down, up


def digest_of(files: Iterable[Path]) -> str:
    """A hash of the contents of files, in their order.

    Raises:
        ModelFileError: a file cannot be read, or is too large.
    """
    digest = hashlib.blake2b(digest_size=32)
    for path in files:
        with open_binary(path) as stream:
            size = stream.seek(0, 2)
            if size > MOST_FILE_BYTES:
                raise ModelFileError(
                    str(path), "", f"has {size} bytes; an adapter's file has at most {MOST_FILE_BYTES}"
                )
            stream.seek(0)
            digest.update(size.to_bytes(8, "little"))
            while piece := stream.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()


def check_shapes(file: str, module: str, down: tuple[int, ...], up: tuple[int, ...]) -> None:
    """Make sure that both factors are matrices of one rank.

    Raises:
        ModelFileError: they are not.
    """
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
        raise ModelFileError(file, module, f"has factors of shapes {down} and {up}, not [r, K] and [N, r]")
