"""The layers applied to a pooled vector: the `Dense` modules of sentence-transformers.

Decides which modules are supported (a linear layer in safetensors, followed by no activation or by tanh), and that
their numbers stay float32, whatever the format of the model's weights. Source:
https://sbert.net/docs/package_reference/sentence_transformer/models.html#sentence_transformers.models.Dense
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.kernels.linear import Weight
from penstock.kernels.native import Cpu
from penstock.weights.bind import Binder
from penstock.weights.embedding_config import read_modules
from penstock.weights.packing import WeightFormat
from penstock.weights.safetensors_files import load_json_object, open_safetensors

__all__ = ["EmbeddingLayer", "read_embedding_layers"]

_MOST_FEATURES = 1 << 20
_TANH = "torch.nn.modules.activation.Tanh"
_ACTIVATIONS = ("torch.nn.modules.linear.Identity", _TANH)
_KEYS = frozenset({"in_features", "out_features", "bias", "activation_function", "init_weight", "init_bias"})


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingLayer:
    """`activation(weight @ vector + bias)`, in float32.

    Attributes:
        weight: `[N, K]`.
        bias: `[N]`, or None.
        tanh: whether the activation is tanh; otherwise there is none.
        cpu: the compiled matmul kernels, whose order of additions is fixed; None for torch's.
    """

    weight: Weight
    bias: Tensor | None
    tanh: bool
    cpu: Cpu | None = None

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, vector: Tensor) -> Tensor:
        """`[K]` float64 to `[N]` float64."""
        out = self.weight.matmul(self.cpu, vector.float()[None], self.bias, None, torch.float32)[0]
        return (out.tanh() if self.tanh else out).double()


def read_embedding_layers(
    model: Path, width: int, device: torch.device, cpu: Cpu | None = None
) -> tuple[EmbeddingLayer, ...]:
    """The `Dense` modules of a model, in order; () for a model that has none.

    Args:
        model: its directory or file.
        width: width of the pooled vector.
        device: device of the vectors.
        cpu: see `EmbeddingLayer`.

    Raises:
        ModelFileError: a module is not supported, or does not fit the one before it.
    """
    modules, layers = read_modules(model), []
    for directory in () if modules is None else modules.dense:
        layers.append(_read_layer(directory, width, device, cpu))
        width = layers[-1].weight.outputs
    return tuple(layers)


def _read_layer(directory: Path, width: int, device: torch.device, cpu: Cpu | None) -> EmbeddingLayer:
    file = directory / "config.json"
    config = load_json_object(file)
    for key in config:
        if key not in _KEYS:
            raise ModelFileError(str(file), key, "is not implemented for a Dense module")
    outputs, activation = config.get("out_features"), config.get("activation_function", _TANH)
    if config.get("in_features") != width:
        raise ModelFileError(str(file), "in_features", f"must be {width}, as wide as what comes in")
    if not isinstance(outputs, int) or isinstance(outputs, bool) or not 1 <= outputs <= _MOST_FEATURES:
        raise ModelFileError(str(file), "out_features", f"must lie in 1..{_MOST_FEATURES}, got {outputs!r}")
    if activation not in _ACTIVATIONS:
        raise ModelFileError(
            str(file), "activation_function", f"{activation!r} is not implemented; {', '.join(_ACTIVATIONS)} are"
        )
    source = open_safetensors(directory)
    form = WeightFormat.DENSE if cpu is None else WeightFormat.F32
    binder = Binder(source, torch.float32, device, str(directory), weight_format=form, cpu=cpu)
    weight = binder.take_linear([("linear.weight", (outputs, width))])
    bias = binder.take("linear.bias", (outputs,)) if config.get("bias", True) is True else None
    binder.finish()
    return EmbeddingLayer(weight, bias, activation == _TANH, cpu)
