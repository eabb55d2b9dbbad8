"""Writes a random model as a Hugging Face directory: meaningless weights in the sizes that speed depends on.

    python bench/make_random_checkpoint.py DIRECTORY [--family gemma2 --layers 18 --hidden 2048 --set head_dim=256 ...]
    python bench/make_random_checkpoint.py DIRECTORY --config FILE.json
    penstock bench batch DIRECTORY

A family is any `model_type` that transformers builds. Settings without an option have transformers' defaults for the
family, except that a Llama has the sizes of TinyLlama, 1.1 billion weights; `--set` sets anything else that
`config.json` may hold, and `--config` starts from a file in place of the defaults. Matrices are normal numbers with a
deviation of 0.02, from a seed, in bfloat16, named as transformers names them in files; at most one file of them is in
memory. The tokenizer knows single bytes only: a vocabulary must hold these 256 and two special tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

__all__ = ["configure", "main", "shapes_of", "write_checkpoint"]

BYTES, BEGIN, END = 256, "<s>", "</s>"
FILE_BYTES = 1 << 29
SIZES = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "inner": "intermediate_size",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_inner": "moe_intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
}
"""Options, and their names in `config.json` in most families."""

TINY_LLAMA = {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
}
DEFAULTS: dict[str, dict[str, Any]] = {"llama": TINY_LLAMA}
SPELLED: dict[str, dict[str, str]] = {"gpt2": {"intermediate_size": "n_inner"}}
"""Families that use another name for a size without declaring it in transformers."""
UNDECLARED: dict[str, set[str]] = {"qwen3_moe": {"head_dim"}}
"""Settings that a family reads if they are given, but for which it declares no default."""


def configure(family: str, settings: Mapping[str, Any]) -> PreTrainedConfig:
    """The config of a family with some settings.

    Raises:
        SystemExit: the settings do not make a model.
    """
    default = AutoConfig.for_model(family)
    known = default.to_dict().keys() | UNDECLARED.get(family, set())
    spelled = default.attribute_map | SPELLED.get(family, {})
    given = {spelled.get(name, name): value for name, value in settings.items()}
    for name in given:
        if name not in known:
            raise SystemExit(f"a {family} must not be given {name}")
    marks = {"bos_token_id": BYTES, "eos_token_id": BYTES + 1, "pad_token_id": None, "dtype": "bfloat16"}
    try:
        config = AutoConfig.for_model(family, **DEFAULTS.get(family, {}) | given | marks)
    except (StrictDataclassError, ValueError) as error:
        raise SystemExit(f"sizes must fit each other: {error}") from error
    if config.vocab_size < BYTES + 2:
        raise SystemExit(f"the vocabulary must be at least {BYTES + 2}, for every byte and two marks")
    return config


def shapes_of(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by their names in files; of tied tensors only the first.

    Raises:
        SystemExit: the sizes do not make a model.
    """
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            raise SystemExit(f"sizes must make a model: {error}") from error
    config.architectures = [type(model).__name__]
    held = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    tensors = revert_weight_conversion(model, {name: tensor.detach() for name, tensor in held.values()})
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def write_checkpoint(directory: Path, config: PreTrainedConfig, seed: int = 0) -> None:
    """Create `directory`, and write everything into it that a loader looks for."""
    shapes = shapes_of(config)
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    _write_tokenizer(directory)
    randomness = torch.Generator().manual_seed(seed)
    files = list(_files(shapes))
    places: dict[str, str] = {}
    total = 2 * sum(map(_count, shapes.values()))
    with tqdm(total=total, desc="Writing", unit="B", unit_scale=True, disable=None) as bar:
        for number, names in enumerate(files, start=1):
            file = f"model-{number:05}-of-{len(files):05}.safetensors"
            tensors = {}
            for name in names:
                tensors[name] = _random(name, shapes[name], randomness)
                bar.update(tensors[name].nbytes)
            save_file(tensors, directory / file, metadata={"format": "pt"})
            places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Names in order, split so that no file holds more than `FILE_BYTES`."""
    names: list[str] = []
    held = 0
    for name, shape in shapes.items():
        size = 2 * _count(shape)
        if names and held + size > FILE_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


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


def _setting(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`, in which the value is JSON or a word."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> None:
    """Write a checkpoint in the sizes that the command line gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", help='a `model_type`; default: that of --config, or "llama"')
    parser.add_argument("--config", type=Path, help="a `config.json` to begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", dest="settings")
    for option, name in SIZES.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, help=f"`{name}`")
    options = vars(parser.parse_args())
    base = {} if options["config"] is None else json.loads(options["config"].read_text(encoding="utf-8"))
    family = options["family"] or base.get("model_type", "llama")
    if family not in _families():
        raise SystemExit(f"--family must be a `model_type` of a causal model that transformers knows, not {family!r}")
    for written in ("model_type", "architectures", "transformers_version", "torch_dtype"):
        base.pop(written, None)
    sizes = {name: options[option] for option, name in SIZES.items() if options[option] is not None}
    config = configure(family, base | sizes | dict(options["settings"]))
    write_checkpoint(options["directory"], config, options["seed"])


def _families() -> set[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


if __name__ == "__main__":
    main()
