"""A CUDA device that is not there: tensors that say they lie on it, are computed on the CPU, and mix like real ones.

Real ones do not mix: a function of tensors on different devices is an error, except for numbers (tensors of no
dimension on the host), copies, and indices. So code that runs here has no such mix-up, nor does it read a device's
tensor as if it were the host's. Which kernels a real device has, and how they round, is not tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["CUDA", "MixedDevices", "Pretended", "pretend_cuda"]

CUDA = torch.device("cuda", 0)

_COPIES = {"copy_", "to"}
_TAKES_HOST_INDICES = {"__getitem__", "index_put", "index_put_"}
_HOST_ONLY = {"numpy", "__array__"}


class MixedDevices(RuntimeError):
    """A function was given tensors of the host and of the device."""


class Pretended(Tensor):
    """A tensor on the device; its numbers are `held`, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held):
        size = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = Tensor._make_wrapper_subclass(cls, held.shape, **size, device=CUDA)
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _computed(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called below torch's Python functions")


class _Device(TorchFunctionMode):
    """Intercepts functions that make tensors on the device from operands none of which is on it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return _computed(function, args, kwargs or {})


@contextmanager
def pretend_cuda() -> Iterator[torch.device]:
    """Inside the `with`, torch has such a device: `torch.device("cuda", 0)`."""
    with _Device():
        yield CUDA


def _computed(function, args, kwargs):
    name = getattr(function, "__name__", "")
    operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    pretended = [each for each in operands if isinstance(each, Pretended)]
    if name == "__get__" and pretended:  # of an attribute
        facts = {Tensor.device.__get__: CUDA, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}
        if function in facts:
            return facts[function]
    there = bool(pretended)
    if pretended:
        _check(name, args, operands)
    if name == "cpu":
        there = False
    if name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
        there, args = isinstance(args[1], Pretended), (args[0], args[1].dtype)
    asked = kwargs.get("device")
    devices = [each for each in args[1:] if isinstance(each, torch.device)] + ([asked] if asked is not None else [])
    for each in devices:
        there = torch.device(each).type == "cuda"
    if there and name == "to" and not pretended:
        args = (args[0].clone(), *args[1:])  # else host and device would share memory
    if devices and any(torch.device(each).type == "cuda" for each in devices):
        args, kwargs = tree_map(_on_host, (args, kwargs))
        kwargs = {**kwargs, "device": torch.device("cpu")} if asked is not None else kwargs
    lacking = name == "scaled_dot_product_attention"  # the CPU has none of the device's kernels for it
    with torch._C.DisableTorchFunction(), sdpa_kernel([SDPBackend.MATH]) if lacking else nullcontext():
        made = function(*tree_map(_held, args), **tree_map(_held, kwargs))
    if not there:
        return made.clone() if name in ("cpu", "to") and pretended and isinstance(made, Tensor) else made
    owners = {id(each.held): each for each in pretended}
    return tree_map_only(Tensor, lambda tensor: owners[id(tensor)] if id(tensor) in owners else Pretended(tensor), made)


def _check(name, args, operands):
    if name in _HOST_ONLY:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if name in _COPIES:
        return
    if name == "__setitem__":
        index, value = args[1:]
        by_index = any(isinstance(each, list | Tensor) for each in (index if isinstance(index, tuple) else (index,)))
        if not by_index or not isinstance(value, Tensor):
            return
        operands = [args[0], value]
    if name in _TAKES_HOST_INDICES:
        operands = [args[0], *args[2:]]
    if any(isinstance(each, Tensor) and not isinstance(each, Pretended) and each.dim() for each in operands) or (
        not isinstance(operands[0], Pretended) and name in _TAKES_HOST_INDICES
    ):
        raise MixedDevices(f"{name}: {[(tuple(each.shape), str(each.device)) for each in operands]}")


def _held(value):
    return value.held if isinstance(value, Pretended) else value


def _on_host(value):
    return torch.device("cpu") if isinstance(value, torch.device) else value
