"""The compiled kernels as plain functions, on the instruction set and threads that a test chose last.

For tests that run one thing on every instruction set and number of threads. The code under test has no such memory:
there a backend is a value.
"""

from __future__ import annotations

from functools import partial

from penstock.kernels import native, native_attention, native_experts, native_peak, native_rows, native_sampler
from penstock.kernels import packed_linear as packed
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.torch_backend import TorchBackend


class _Chosen:
    def __init__(self):
        self.isa, self.threads = native.isas()[0] if native.available() else "torch", 1
        self.made = {}


_chosen = _Chosen()


def set_isa(name):
    """Choose an instruction set, or `torch` for the references."""
    if name not in ("torch", *native.isas()):
        raise ValueError(f"there are no kernels for {name} here")
    _chosen.isa = name


def set_threads(threads):
    _chosen.threads = threads
    backend()


def isa():
    return _chosen.isa


def threads():
    return _chosen.threads


def reset():
    """Restore the choice with which a test begins."""
    _chosen.__init__()


def backend():
    """The backend of what was chosen last; the same one for the same choice."""
    key = _chosen.isa, _chosen.threads
    if key not in _chosen.made:
        _chosen.made[key] = TorchBackend() if _chosen.isa == "torch" else CpuBackend(*key)
    return _chosen.made[key]


def cpu():
    """The backend's kernels; None for torch."""
    return None if _chosen.isa == "torch" else backend().cpu


def linear(x, weight, bias=None, residual=None, out_dtype=None):
    return weight.matmul(cpu(), x, bias, residual, out_dtype)


def embedding_rows(ids, weight, *dtype):
    return packed.embedding_rows(ids, weight, *dtype, cpu=cpu())


def _of(function, *arguments, **keywords):
    return function(cpu(), *arguments, **keywords)


packed_gated_linear = partial(_of, packed.packed_gated_linear)
rms_norm = partial(_of, native_rows.rms_norm)
layer_norm = partial(_of, native_rows.layer_norm)
add_rms_norm = partial(_of, native_rows.add_rms_norm)
silu_and_mul = partial(_of, native_rows.silu_and_mul)
gelu_new_and_mul = partial(_of, native_rows.gelu_new_and_mul)
gelu_and_mul = partial(_of, native_rows.gelu_and_mul)
clamped_swiglu_and_mul = partial(_of, native_rows.clamped_swiglu_and_mul)
gelu_new = partial(_of, native_rows.gelu_new)
gelu = partial(_of, native_rows.gelu)
relu = partial(_of, native_rows.relu)
rotate = partial(_of, native_rows.rotate)
write_kv = partial(_of, native_attention.write_kv)
rotate_and_write = partial(_of, native_attention.rotate_and_write)
paged_attention = partial(_of, native_attention.paged_attention)
choose = partial(_of, native_sampler.choose)
rule_out = partial(_of, native_sampler.rule_out)
route = partial(_of, native_experts.route)
gate_rows = partial(_of, native_experts.gate_rows)
compute = partial(_of, native_peak.compute)
read = partial(_of, native_peak.read)


class NativeExperts:
    """Experts that run on whatever is chosen when they are called."""

    def __init__(self, *arguments):
        self.arguments = arguments
        self.layer = native_experts.NativeExperts(cpu(), *arguments).layer

    def __call__(self, *operands):
        return native_experts.NativeExperts(cpu(), *self.arguments)(*operands)

    def run_into(self, *operands):
        return native_experts.NativeExperts(cpu(), *self.arguments).run_into(*operands)

    def scratch_bytes(self, rows):
        return cpu().expert_scratch_bytes(self.layer, rows)
