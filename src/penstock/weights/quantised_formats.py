"""Builds a tensor source from a safetensors checkpoint and its config's quantisation settings."""

from __future__ import annotations

from penstock.contract.errors import ModelFileError
from penstock.weights.compressed_tensors import find_compressed
from penstock.weights.fp8_safetensors import find_fp8
from penstock.weights.integer_safetensors import find_integers
from penstock.weights.mxfp4_safetensors import Mxfp4Source
from penstock.weights.nf4_safetensors import find_nf4
from penstock.weights.quantisation_config import Quantisation
from penstock.weights.quantised_safetensors import QuantisedMatrices, QuantisedSource
from penstock.weights.safetensors_files import SafetensorsSource

__all__ = ["open_quantised"]


def open_quantised(plain: SafetensorsSource, scheme: Quantisation | None, file: str) -> Mxfp4Source | QuantisedSource:
    """The checkpoint's tensors, with the parts of each quantised matrix combined into one tensor.

    Args:
        plain: the files.
        scheme: the config's quantisation settings; None if it has none.
        file: the config, for errors.

    Raises:
        ModelFileError: the parts of a matrix do not fit each other, no matrix is stored in the config's format, or a
            matrix is quantised although the config does not say so.
    """
    if scheme is None:
        _refuse_unsaid(plain, file)
    if scheme is None or scheme.method == "mxfp4":
        return Mxfp4Source(plain)
    found = _find(plain, scheme)
    if not found.matrices:
        raise ModelFileError(
            file,
            "quantization_config",
            f"says {scheme.method}, but no matrix is stored so; take the key out if none is quantised",
        )
    return QuantisedSource(plain, found, scheme.unheeded)


def _refuse_unsaid(plain: SafetensorsSource, file: str) -> None:
    """Refuse quantised matrices without settings: old tools put them into separate files, which say less."""
    name = next((name for name in sorted(plain.names()) if name.endswith((".qweight", ".weight_packed"))), None)
    if name is not None:
        raise ModelFileError(
            file,
            "quantization_config",
            f"is missing, but {name} is quantised; put the settings of quantize_config.json or quant_config.json here,"
            ' with "quant_method": "gptq", "awq" or "compressed-tensors"',
        )


def _find(plain: SafetensorsSource, scheme: Quantisation) -> QuantisedMatrices:
    if scheme.method in ("gptq", "awq"):
        return find_integers(plain.stored, scheme)
    if scheme.method == "compressed-tensors":
        return find_compressed(plain.stored, scheme)
    return find_fp8(plain.stored, scheme) if scheme.method == "fp8" else find_nf4(plain.stored)
