"""Writes a random Llama as a Hugging Face directory: weights that mean nothing in the sizes that speed depends on.

    python bench/make_random_checkpoint.py DIRECTORY [--layers 22 --hidden 2048 ...]
    penstock bench batch DIRECTORY

The defaults are the sizes of TinyLlama, 1.1 billion weights. Numbers are normal with a deviation of 0.02, from a seed,
in bfloat16, one file a layer. The tokenizer knows single bytes only: a vocabulary must hold these 256 and two marks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm

__all__ = ["Sizes", "main", "write_checkpoint"]

BYTES, BEGIN, END = 256, "<s>", "</s>"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a Llama."""

    hidden: int = 2048
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    inner: int = 5632
    vocabulary: int = 32000
    positions: int = 2048

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise SystemExit(f"heads ({self.heads}) must divide hidden ({self.hidden}), and kv-heads the heads")
        if self.vocabulary < BYTES + 2:
            raise SystemExit(f"vocabulary must be at least {BYTES + 2}, for every byte and two marks")

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values, of all heads."""
        return self.hidden // self.heads * self.kv_heads

    def config(self) -> dict[str, object]:
        """What `config.json` says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": BYTES,
            "eos_token_id": BYTES + 1,
            "torch_dtype": "bfloat16",
        }

    def shards(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Names and shapes of tensors, file by file."""
        yield {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            yield {
                f"{name}.input_layernorm.weight": (self.hidden,),
                f"{name}.self_attn.q_proj.weight": (self.hidden, self.hidden),
                f"{name}.self_attn.k_proj.weight": (self.kv_width, self.hidden),
                f"{name}.self_attn.v_proj.weight": (self.kv_width, self.hidden),
                f"{name}.self_attn.o_proj.weight": (self.hidden, self.hidden),
                f"{name}.post_attention_layernorm.weight": (self.hidden,),
                f"{name}.mlp.gate_proj.weight": (self.inner, self.hidden),
                f"{name}.mlp.up_proj.weight": (self.inner, self.hidden),
                f"{name}.mlp.down_proj.weight": (self.hidden, self.inner),
            }
        yield {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocabulary, self.hidden)}


def write_checkpoint(directory: Path, sizes: Sizes, seed: int = 0) -> None:
    """Write everything that a loader looks for into `directory`, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(sizes.config(), indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(directory)
    randomness = torch.Generator().manual_seed(seed)
    shards = list(sizes.shards())
    places: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(tqdm(shards, desc="Writing", unit="file", disable=None), start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {key: _random(shape, randomness) for key, shape in shapes.items()}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _random(shape: tuple[int, ...], randomness: torch.Generator) -> Tensor:
    """Ones for a norm, small normal numbers for a matrix."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, generator=randomness).mul_(0.02).bfloat16()


def _write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (BEGIN, END)])
    tokenizer.save(str(directory / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Write a checkpoint in the sizes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    defaults = Sizes()
    for name in Sizes.__slots__:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(defaults, name), help=f"default {getattr(defaults, name)}")
    options = vars(parser.parse_args())
    directory, seed = options.pop("directory"), options.pop("seed")
    write_checkpoint(directory, Sizes(**options), seed)


if __name__ == "__main__":
    main()
