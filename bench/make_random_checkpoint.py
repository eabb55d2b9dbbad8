"""Writes a random model as a Hugging Face directory: weights that mean nothing in the sizes that speed depends on.

    python bench/make_random_checkpoint.py DIRECTORY [--family llama --layers 22 --hidden 2048 ...]
    penstock bench batch DIRECTORY

The defaults are the sizes of TinyLlama, 1.1 billion weights, or of the smallest GPT-2, 124 million. Numbers are normal
with a deviation of 0.02, from a seed, in bfloat16, one file a layer. The tokenizer knows single bytes only: a
vocabulary must hold these 256 and two marks.
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

__all__ = ["GPT2Sizes", "Sizes", "main", "write_checkpoint"]

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
        _check_vocabulary(self.vocabulary)

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


@dataclass(frozen=True, slots=True)
class GPT2Sizes:
    """The sizes of a GPT-2, whose head is its embedding."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 3072
    vocabulary: int = 50257
    positions: int = 1024

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise SystemExit(f"heads ({self.heads}) must divide hidden ({self.hidden})")
        _check_vocabulary(self.vocabulary)

    def config(self) -> dict[str, object]:
        """What `config.json` says."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_inner": self.inner,
            "n_positions": self.positions,
            "vocab_size": self.vocabulary,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": BYTES,
            "eos_token_id": BYTES + 1,
            "torch_dtype": "bfloat16",
        }

    def shards(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Names and shapes of tensors, file by file; projections have their inputs first."""
        tables = {"wte.weight": (self.vocabulary, self.hidden), "wpe.weight": (self.positions, self.hidden)}
        yield {f"transformer.{name}": shape for name, shape in tables.items()}
        for layer in range(self.layers):
            name = f"transformer.h.{layer}"
            shapes: dict[str, tuple[int, ...]] = {}
            for norm in ("ln_1", "ln_2"):
                shapes |= {f"{name}.{norm}.{part}": (self.hidden,) for part in ("weight", "bias")}
            for projection, inputs, outputs in (
                ("attn.c_attn", self.hidden, 3 * self.hidden),
                ("attn.c_proj", self.hidden, self.hidden),
                ("mlp.c_fc", self.hidden, self.inner),
                ("mlp.c_proj", self.inner, self.hidden),
            ):
                shapes |= {f"{name}.{projection}.weight": (inputs, outputs), f"{name}.{projection}.bias": (outputs,)}
            yield shapes
        yield {f"transformer.ln_f.{part}": (self.hidden,) for part in ("weight", "bias")}


FAMILIES: dict[str, type[Sizes | GPT2Sizes]] = {"llama": Sizes, "gpt2": GPT2Sizes}


def _check_vocabulary(size: int) -> None:
    if size < BYTES + 2:
        raise SystemExit(f"vocabulary must be at least {BYTES + 2}, for every byte and two marks")


def write_checkpoint(directory: Path, sizes: Sizes | GPT2Sizes, seed: int = 0) -> None:
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
        tensors = {key: _random(key, shape, randomness) for key, shape in shapes.items()}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _random(name: str, shape: tuple[int, ...], randomness: torch.Generator) -> Tensor:
    """Ones for the weight of a norm, small normal numbers for a matrix or a bias."""
    if len(shape) == 1 and name.endswith(".weight"):
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
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--seed", type=int, default=0)
    for name in Sizes.__slots__:
        known = [f"{getattr(of(), name)} of a {family}" for family, of in FAMILIES.items() if name in of.__slots__]
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default: {', '.join(known)}")
    options = vars(parser.parse_args())
    directory, family, seed = options.pop("directory"), options.pop("family"), options.pop("seed")
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() - set(FAMILIES[family].__slots__):
        raise SystemExit(f"a {family} must not be given --{name.replace('_', '-')}")
    write_checkpoint(directory, FAMILIES[family](**given), seed)


if __name__ == "__main__":
    main()
