"""Adapters beside projections: what PEFT computes, and the bits that each row has alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from tiny_adapters import adapter_of, linear_modules, load_with_adapters, merged_logits, write_adapter
from tiny_checkpoints import VARIANTS, _reference, write_checkpoint

from needs import COMPILED
from penstock.contract.plan import Admit, Row
from penstock.contract.sampling import SamplingSpec
from penstock.exec.batch import SlotTables
from penstock.exec.runner import paged_attend
from penstock.exec.state_store import StateStore
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.loading import LoadedModel
from penstock.nn.adapters import AdaptedTokens, Adapter, sites_of, taking_adapters
from penstock.nn.compiled import CompiledExecutor
from penstock.nn.lowering import Gated, lower_layers
from penstock.nn.operations import Adapt, Linear
from penstock.nn.reference import ReferenceExecutor

compiled = pytest.mark.skipif(not native.available(), reason=COMPILED)

FAMILIES = [
    "llama",
    "qwen2",
    "phi3",
    "gpt2",
    "gemma2",
    "qwen3_moe",
    "granitemoehybrid",
    "lfm2",
    "starcoder2",
    "gemma3_text",
]
KEPT: list[TemporaryDirectory] = []
RANKS = (1, 3, 8, 16)
LENGTHS = (9, 1, 23, 5, 2, 17, 1, 4)


def folder() -> Path:
    KEPT.append(TemporaryDirectory())
    return Path(KEPT[-1].name)


@cache
def checkpoint(family: str) -> Path:
    fused = {"intermediate_size": 96} if family in ("llama", "qwen2", "gemma2") else {}  # gates in whole panels
    return write_checkpoint(folder(), family, VARIANTS[family][0], **fused)


@cache
def loaded_of(family: str, dtype: str = "float32", **options: object) -> LoadedModel:
    return load_with_adapters(checkpoint(family), dtype, threads=2, **options)


@cache
def adapter_folder(family: str, rank: int, seed: int) -> Path:
    modules = linear_modules(loaded_of(family).program)
    return write_adapter(folder(), modules, rank, seed=seed)


def some_adapters(family: str, loaded: LoadedModel) -> list[Adapter]:
    """Eight adapters, of four different ranks."""
    return [adapter_of(loaded, adapter_folder(family, RANKS[seed % 4], seed)) for seed in range(8)]


def hidden(executor, loaded: LoadedModel, rows: list[tuple[list[int], Adapter | None]]) -> list[torch.Tensor]:
    """The hidden states of prompts, computed in one step; those of one adapter must be neighbours."""
    kv = loaded.kv_store(64, 16)
    tables, states = SlotTables(len(rows), 64, 16), StateStore(loaded.program.states, len(rows), 0, loaded.device)
    planned, adapted, at = [], [], 0
    for slot, (tokens, adapter) in enumerate(rows):
        blocks = tuple(range(4 * slot, 4 * slot + 4))
        admit = Admit(slot, str(slot), tuple(tokens), blocks, 0, SamplingSpec((("temperature", 0),)), 0)
        tables.admit(admit)
        states.admit(admit)
        planned.append(Row(slot, 0, len(tokens), (), True))
        tables.advance(planned[-1])
        if adapter is not None:
            if adapted and adapted[-1].adapter is adapter:
                adapted[-1] = adapted[-1]._replace(end=at + len(tokens))
            else:
                adapted.append(AdaptedTokens(at, at + len(tokens), adapter))
        at += len(tokens)
    batch = tables.batch(planned, loaded.device)
    carried = (states.states, states.runs(planned)) if loaded.program.states else ()
    attend = paged_attend(kv, batch, executor.backend, *carried)
    with torch.inference_mode():
        made = executor.forward(batch.token_ids, batch.positions, attend, adapted)
    return list(made.split([len(tokens) for tokens, _ in rows]))


def prompts(loaded: LoadedModel) -> list[list[int]]:
    vocab = loaded.shape.vocab_size
    return [[(5 * i + 11 * length + 3) % vocab for i in range(length)] for length in LENGTHS]


# ---- the numbers


@compiled
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_computes_what_it_does_in_the_weights(family):
    loaded = loaded_of(family)
    assert isinstance(loaded.model, CompiledExecutor)
    path, tokens = adapter_folder(family, 8, 0), prompts(loaded)[2]
    adapter = adapter_of(loaded, path)
    [with_it], [without] = (hidden(loaded.model, loaded, [(tokens, each)]) for each in (adapter, None))
    reference = _reference(checkpoint(family), torch.float32)
    expected = merged_logits(reference, path, tokens)
    plain = merged_logits(reference, None, tokens)
    found = loaded.model.logits(with_it)
    assert (expected - plain).abs().max() > 0.02 * plain.abs().max(), "an adapter of no effect shows nothing"
    assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    assert (loaded.model.logits(without) - plain).abs().max() < 1e-4 * max(1.0, float(plain.abs().max()))


@pytest.mark.parametrize("family", FAMILIES[:4])
def test_torch_computes_the_same_numbers(family, monkeypatch):
    monkeypatch.setenv("PENSTOCK_ISA", "torch")
    loaded = load_with_adapters(checkpoint(family), threads=1)
    assert isinstance(loaded.model, ReferenceExecutor)
    modules = linear_modules(loaded.program)
    path, tokens = write_adapter(folder(), modules, 8, seed=3), prompts(loaded)[2]
    [made] = hidden(loaded.model, loaded, [(tokens, adapter_of(loaded, path))])
    expected = merged_logits(_reference(checkpoint(family), torch.float32), path, tokens)
    assert (loaded.model.logits(made) - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


@compiled
@pytest.mark.parametrize("settings", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 3.0, "down_proj": 31}}, {}])
def test_scales_and_ranks_of_modules_are_heeded(settings):
    loaded = loaded_of("llama")
    modules = linear_modules(loaded.program)
    modules = {name: size for name, size in modules.items() if not name.endswith("k_proj")}
    path = write_adapter(folder(), modules, 4, seed=9, ranks={"v_proj": 7, "up_proj": 2}, **settings)
    tokens = prompts(loaded)[0]
    [made] = hidden(loaded.model, loaded, [(tokens, adapter_of(loaded, path))])
    expected = merged_logits(_reference(checkpoint("llama"), torch.float32), path, tokens)
    assert (loaded.model.logits(made) - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


_GGUF_NAMES = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


def as_gguf(directory: Path, path: Path, heads: dict[str, int], alpha: float) -> Path:
    """The adapter as llama.cpp's conversion writes it: rows of queries and keys alternate between halves of a head."""
    writer = GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, numbers in sorted(load_file(directory / "adapter_model.safetensors").items()):
        layer, _, module = name.removeprefix("base_model.model.model.layers.").partition(".")
        module, _, factor = module.removesuffix(".weight").rpartition(".")
        if factor == "lora_B" and module in heads:
            parts = numbers.view(heads[module], 2, -1, numbers.shape[1])
            numbers = parts.transpose(1, 2).reshape(numbers.shape)
        writer.add_tensor(f"blk.{layer}.{_GGUF_NAMES[module]}.weight.{factor.lower()}", numbers.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@compiled
def test_an_adapter_has_the_same_bits_from_a_gguf_file(tmp_path):
    loaded = loaded_of("llama")
    directory, shape, tokens = adapter_folder("llama", 8, 0), loaded.shape, prompts(loaded)[2]
    heads = {"self_attn.q_proj": shape.num_heads, "self_attn.k_proj": shape.num_kv_heads}
    paths = directory, as_gguf(directory, tmp_path / "adapter.gguf", heads, alpha=8.0)
    made = [hidden(loaded.model, loaded, [(tokens, adapter_of(loaded, path))])[0] for path in paths]
    assert torch.equal(*made)


# ---- the bits


FORMS = [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8"), ("float32", "int4")]


@compiled
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "granitemoehybrid", "lfm2"])
@pytest.mark.parametrize(("dtype", "quantization"), FORMS)
def test_each_row_of_many_adapters_has_the_bits_that_it_has_alone(family, dtype, quantization):
    loaded = loaded_of(family, dtype, quantization=quantization)
    adapters = [None, *some_adapters(family, loaded)[:7]]
    rows = list(zip(prompts(loaded), adapters, strict=True))
    together = hidden(loaded.model, loaded, rows)
    for row, made in zip(rows, together, strict=True):
        [alone] = hidden(loaded.model, loaded, [row])
        assert torch.equal(made, alone)
    seen = {tuple(each[0].tolist()) for each in together}
    assert len(seen) == len(together), "every row is another"


@compiled
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_an_adapter_have_the_bits_of_a_model_that_takes_none(family):
    for dtype in ("float32", "bfloat16"):
        loaded = loaded_of(family, dtype)
        one = adapter_of(loaded, adapter_folder(family, 8, 0))
        tokens = prompts(loaded)
        plain = hidden(loaded.model, loaded, [(each, None) for each in tokens])
        beside = hidden(loaded.model, loaded, [*((each, None) for each in tokens[:-1]), (tokens[-1], one)])
        for made, expected in zip(beside[:-1], plain[:-1], strict=True):
            assert torch.equal(made, expected)
        assert not torch.equal(beside[-1], plain[-1])


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_threads_change_no_bit(dtype, count):
    """With 1 adapter of many tokens, and with 8 of a few."""
    loaded = loaded_of("llama", dtype)
    adapters = some_adapters("llama", loaded)[:count]
    rows = [(tokens, adapters[at * count // 8]) for at, tokens in enumerate(prompts(loaded))]
    by_threads = []
    for threads in (1, 2, 3):
        on = loaded.on(CpuBackend("", threads))
        by_threads.append(hidden(on.model, on, rows))
        few = [(tokens[:1], adapter) for tokens, adapter in rows]  # a step that is not shared out
        by_threads[-1] += hidden(on.model, on, few)
    for others in by_threads[1:]:
        assert all(map(torch.equal, others, by_threads[0]))


@compiled
def test_operation_by_operation_the_same_kernels_give_the_same_bits():
    loaded = loaded_of("llama")
    rows = list(zip(prompts(loaded), [None, *some_adapters("llama", loaded)[:7]], strict=True))
    one_by_one = ReferenceExecutor(loaded.program, torch.float32, loaded.backend)
    for made, expected in zip(hidden(one_by_one, loaded, rows), hidden(loaded.model, loaded, rows), strict=True):
        assert torch.equal(made, expected.to(made.dtype))


# ---- the program


def test_a_program_takes_adapters_behind_every_projection_of_known_modules():
    program = loaded_of("llama").program
    adapting = taking_adapters(program)
    assert [each for each in adapting.operations() if not isinstance(each, Adapt)] == list(program.operations())
    sites = [each for each in adapting.operations() if isinstance(each, Adapt)]
    assert [each.site for each in sites] == list(range(len(sites_of(program))))
    assert len(sites) == 4 * program.shape.num_layers
    before = None
    for operation in adapting.operations():
        if isinstance(operation, Adapt):
            assert isinstance(before, Linear)
            assert (operation.out, operation.x, operation.modules) == (before.out, before.x, before.modules)
        before = operation


@compiled
def test_only_a_program_that_takes_adapters_leaves_gates_apart():
    program = loaded_of("llama").program
    gated = [each for layer in lower_layers(program) for each in layer if isinstance(each, Gated)]
    apart = [each for layer in lower_layers(taking_adapters(program)) for each in layer if isinstance(each, Gated)]
    assert gated
    assert not apart


@compiled
def test_what_does_not_fit_a_program_is_refused_before_anything_is_computed():
    llama, other = loaded_of("llama"), loaded_of("gpt2")
    foreign = adapter_of(other, adapter_folder("gpt2", 8, 0))
    with pytest.raises(ValueError, match="adapter"):
        hidden(llama.model, llama, [(prompts(llama)[0], foreign)])
