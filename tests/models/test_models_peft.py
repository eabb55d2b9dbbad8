"""What PEFT itself computes with an adapter, and with one that it saved."""

from __future__ import annotations

import pytest
import torch
from test_models_adapters import checkpoint, hidden, prompts
from tiny_adapters import adapter_of, load_with_adapters

from needs import COMPILED
from penstock.kernels import native

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=COMPILED),
    pytest.mark.filterwarnings("ignore"),  # its own
]

CASES = [
    ("llama", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    (
        "llama",
        {"target_modules": r".*\.(k|down)_proj", "alpha_pattern": {"k_proj": 3}, "rank_pattern": {"down_proj": 9}},
    ),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ("gemma2", {"target_modules": ["q_proj", "o_proj", "gate_proj"], "layers_to_transform": [1]}),
    ("mistral3", {"target_modules": r".*language_model.*\.(q|o|up)_proj"}),
    ("qwen3_5_text", {"target_modules": ["q_proj", "in_proj_qkv", "out_proj"]}),
    ("granitemoehybrid", {"target_modules": ["in_proj", "out_proj", "q_proj"]}),
]


@pytest.mark.parametrize(("family", "settings"), CASES, ids=[f"{family}-{at}" for at, (family, _) in enumerate(CASES)])
def test_within_1e_4_of_peft_in_float32(family, settings, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if family == "mistral3" else AutoModelForCausalLM
    base = kind.from_pretrained(checkpoint(family), dtype=torch.float32).eval()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=6, lora_alpha=12, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    loaded = load_with_adapters(checkpoint(family), threads=1)
    tokens = prompts(loaded)[2]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].float()
        with model.disable_adapter():
            plain = model(input_ids=torch.tensor([tokens])).logits[0].float()
    [made] = hidden(loaded.model, loaded, [(tokens, adapter_of(loaded, tmp_path))])
    scale = max(1.0, float(expected.abs().max()))
    assert (expected - plain).abs().max() > 0.01 * scale
    assert (loaded.model.logits(made) - expected).abs().max() < 1e-4 * scale
