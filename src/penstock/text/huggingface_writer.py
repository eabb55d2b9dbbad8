"""Writes a tokenizer directory in Hugging Face layout, for programs that use transformers' `AutoTokenizer`.

Decides which files to write. If a model has a `tokenizer_config.json`, the publisher's own files are copied; otherwise
files are written from the parsed tokenizer. `tokenizer_config.json` then holds the chat template, where every release
of transformers finds it, and names the class that loads `tokenizer.json` unchanged. `generation_config.json` lists all
tokens that end a text, because `tokenizer_config.json` can name only one; so `read_huggingface` reads the same model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.contract.model import GgufVocabulary, HuggingFaceText, TextFiles
from penstock.text.gguf_tokenizer import read_gguf
from penstock.text.huggingface import read_huggingface
from penstock.text.tokenizer_parts import TokenizerParts

__all__ = ["write_tokenizer"]

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "generation_config.json",
    "config.json",  # names the class where tokenizer_config.json does not
)


def write_tokenizer(files: TextFiles, directory: Path) -> None:
    """Write a directory that transformers' `AutoTokenizer.from_pretrained` and `--tokenizer` read.

    Args:
        files: the text half of a model's files.
        directory: new or empty.

    Raises:
        ModelFileError: the model's tokenizer cannot be read; nothing is written.
        ConfigError: the directory is not empty, or cannot be written.
    """
    parts = read_gguf(files) if isinstance(files, GgufVocabulary) else read_huggingface(files)
    _check_empty(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if isinstance(files, HuggingFaceText) and (Path(files.directory) / "tokenizer_config.json").is_file():
            _copy(Path(files.directory), directory)
        else:
            _write(parts, directory)
    except OSError as error:
        raise ConfigError("DIR", f"{directory} cannot be written: {error.strerror}") from error


def _check_empty(directory: Path) -> None:
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError("DIR", f"{directory} is not empty; name a new directory, nothing is overwritten")


def _copy(source: Path, directory: Path) -> None:
    for name in _COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, directory / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _write(parts: TokenizerParts, directory: Path) -> None:
    (directory / "tokenizer.json").write_text(parts.backend.to_str(pretty=True), encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **parts.special_tokens,
    }
    if parts.template is not None:
        settings["chat_template"] = parts.template.source
    _write_json(directory / "tokenizer_config.json", settings)
    bos = {"bos_token_id": parts.bos} if parts.bos >= 0 else {}
    _write_json(directory / "generation_config.json", bos | {"eos_token_id": sorted(parts.eos)})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
