"""Steps captured as CUDA graphs; without a device, a double computes them again in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from tiny_adapters import linear_modules, write_adapter
from tiny_checkpoints import VARIANTS, write_checkpoint, write_lettered

from penstock import LLM, SamplingParams, loading
from penstock.kernels.step_cache import StepCache
from penstock.models import gguf_dialect, load
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.packing import WeightFormat

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from penstock.kernels.cuda_backend import CudaBackend  # noqa: E402
from penstock.nn import captured  # noqa: E402

CAPTURED = ["llama", "gemma2", "gemma3_text", "qwen3", "gpt2", "phi3"]


class Again:
    """Captures graphs that compute once more; counts captures and replays."""

    captured = replayed = 0

    def __call__(self, work):
        out = work()
        type(self).captured += 1

        def replay():
            type(self).replayed += 1
            out.copy_(work())

        return out, replay


@pytest.fixture
def captures(monkeypatch):
    Again.captured = Again.replayed = 0
    if DEVICE == "cpu":
        monkeypatch.setattr(captured, "_SIZES", (1, 3, 12))  # the interpreter is slow at each token
        monkeypatch.setattr(captured, "_Graphs", Again)
        monkeypatch.setattr(loading, "open_backend", lambda *_: CudaBackend(torch.device("cpu")))
    return Again


def answers(model, adapter="", **options):
    prompts = [[5, 9, 7, 11, 4, 8, 6], [8], [9, 9, 5] * 6]
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=1.0, seed=3, max_tokens=4, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=0),
    ]
    sizes = {"kv_cache_memory": 1 << 22, "max_model_len": 64, "max_num_batched_tokens": 12, "max_num_seqs": 4}
    with LLM(str(model), dtype="float32", kv_store="off", **sizes, **options) as llm:
        made = llm.generate(prompts, params, adapter=adapter, use_tqdm=False)
    return [(each.outputs[0].token_ids, [of[token].logprob for token, of in zip(
        each.outputs[0].token_ids, each.outputs[0].logprobs, strict=True)]) for each in made]  # fmt: skip


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")  # of numpy, in rows that fill up
def test_steps_with_adapters_are_computed_by_the_reference_on_the_same_device(tmp_path, captures, monkeypatch):
    (tmp_path / "model").mkdir()
    model = write_lettered(tmp_path / "model", "llama", VARIANTS["llama"][0])
    files = open_model(model, gguf_dialect)
    modules = linear_modules(load(files.config, Binder(files.source, torch.float32, "cpu", "m"), "m"))
    lora = {"poet": str(write_adapter(tmp_path / "poet", modules, 8))}
    device = {"device": DEVICE} if DEVICE == "cuda" else {}
    if DEVICE == "cpu":  # where steps of one size share a block table, which tells steps apart on a device
        monkeypatch.setattr(StepCache, "get", lambda cache, step, key, make: make())
    made = [answers(model, adapter, lora=lora, **device) for adapter in ("poet", ["", "poet", ""], "")]
    if DEVICE == "cpu":
        monkeypatch.undo()
    monkeypatch.setenv("PENSTOCK_ISA", "torch")
    expected = [answers(model, adapter, lora=lora, device="cpu") for adapter in ("poet", ["", "poet", ""], "")]
    assert made[0] != made[2]
    alone = [made[2][0], made[0][1], made[2][2]]
    if DEVICE == "cuda":  # torch's products on a CPU round differently for each shape
        assert made[1] == alone
    for ours, theirs in ((made[1], alone), *zip(made, expected, strict=True)):
        for (tokens, scores), (other, wanted) in zip(ours, theirs, strict=True):
            assert tokens == other
            assert scores == pytest.approx(wanted, abs=2e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")  # of numpy, in rows that fill up
@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", CAPTURED)
def test_captured_steps_answer_as_the_reference_does(family, tmp_path, captures, monkeypatch):
    model = write_lettered(tmp_path, family, VARIANTS[family][0])
    device = {"device": DEVICE} if DEVICE == "cuda" else {}
    made = answers(model, **device)
    if DEVICE == "cpu":
        assert 0 < captures.captured <= 4
        assert captures.replayed
        monkeypatch.undo()
    monkeypatch.setenv("PENSTOCK_ISA", "torch")
    expected = answers(model, device="cpu")
    assert [tokens for tokens, _ in made] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(made, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


def program_of(family, tmp_path):
    directory = write_checkpoint(tmp_path, family, VARIANTS[family][0])
    files = open_model(directory, gguf_dialect)
    binder = Binder(files.source, torch.float32, "cpu", str(directory), weight_format=WeightFormat.DENSE)
    return load(files.config, binder, str(directory))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_moe", "Experts waits for the device"),
        ("lfm2", "ShortConvolution waits for the device"),
        ("deepseek_v2", "ProjectHeads waits for the device"),
    ],
)
def test_programs_that_wait_for_the_device_are_not_captured(family, reason, tmp_path):
    program = program_of(family, tmp_path)
    assert captured.why_not_captured(program) == reason
    backend = CudaBackend(torch.device(DEVICE))
    assert not isinstance(loading.executor(program, torch.float32, backend), captured.CapturedExecutor)


@pytest.mark.parametrize("family", CAPTURED)
def test_families_of_plain_layers_are_captured(family, tmp_path):
    program = program_of(family, tmp_path)
    backend = CudaBackend(torch.device(DEVICE))
    assert isinstance(loading.executor(program, torch.float32, backend), captured.CapturedExecutor)
