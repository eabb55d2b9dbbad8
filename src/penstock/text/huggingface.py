"""Reads a tokenizer from a directory in Hugging Face layout.

Decides which file provides what. `tokenizer.json` has the vocabulary and the tokens added around a text
(`add_bos_token` is ignored, as in transformers); `tokenizer_config.json` has the special tokens' spellings;
`chat_template.jinja`, else `chat_template` in `tokenizer_config.json`, is the template. The end-of-sequence ids are
the union of `config.json`, `generation_config.json` and `tokenizer_config.json`, because checkpoints disagree and each
of these ids ends a text. Older formats (`tokenizer.model`, `vocab.json`) are not read: a conversion could differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.contract.errors import ModelFileError
from penstock.contract.model import HuggingFaceText
from penstock.text.tokenizer_parts import TemplateSource, TokenizerParts

__all__ = ["read_huggingface"]

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_huggingface(files: HuggingFaceText) -> TokenizerParts:
    """Read the directory's tokenizer.

    Raises:
        ModelFileError: `tokenizer.json` is missing, or a file is corrupt or contradicts another.
    """
    directory = Path(files.directory)
    backend = _read_backend(directory / "tokenizer.json")
    config_file = directory / "tokenizer_config.json"
    config = _read_json(config_file)
    special_tokens = _special_tokens(config, config_file)
    ids = _declare_special(backend, special_tokens, config_file)
    eos = _ids_in(directory / "config.json", "eos_token_id")
    eos += _ids_in(directory / "generation_config.json", "eos_token_id")
    bos = _ids_in(directory / "config.json", "bos_token_id")
    return TokenizerParts(
        file=str(directory / "tokenizer.json"),
        backend=backend,
        special_tokens=special_tokens,
        bos=ids.get("bos_token", bos[0] if bos else -1),
        eos=frozenset([*eos, ids["eos_token"]] if "eos_token" in ids else eos),
        template=_template(directory, config, config_file),
        tool_template=_tool_template(directory, config, config_file),
    )


def _read_backend(file: Path) -> Backend:
    if not file.is_file():
        raise ModelFileError(
            str(file),
            "",
            "is missing; of tokenizers only tokenizer.json is read. Loading the tokenizer with transformers'"
            " AutoTokenizer and calling save_pretrained writes it; --tokenizer names another directory",
        )
    try:
        backend = Backend.from_file(str(file))
        backend.encode("a text", add_special_tokens=True)  # a post-processor's errors show only in use
    except BaseException as error:
        # The library raises plain Exception, and for some damage PanicException, which derives from BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(str(file), "", f"is not a readable tokenizer: {' '.join(str(error).split())}") from error
    # A file may turn on truncation and padding; a prompt must be neither cut silently nor padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """The file's JSON object; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(str(file), "", f"is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(str(file), "", "must hold a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _ROLES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str):
            raise ModelFileError(str(file), name, "must be a string or an object with a string `content`")
        found[name] = text
    return found


def _declare_special(backend: Backend, special_tokens: Mapping[str, str], file: Path) -> dict[str, int]:
    """Make the named tokens special, as transformers does; return their ids by role."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    ids: dict[str, int] = {}
    for name, text in special_tokens.items():
        id_ = backend.token_to_id(text)
        if id_ is None and name in ("bos_token", "eos_token"):
            raise ModelFileError(str(file), name, f"{text!r} is not in the vocabulary of tokenizer.json")
        if id_ is None:
            continue
        ids[name] = id_
        if text not in special:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    return ids


def _ids_in(file: Path, key: str) -> list[int]:
    value = _read_json(file).get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(id_, int) or isinstance(id_, bool) or id_ < 0 for id_ in ids):
        raise ModelFileError(str(file), key, f"must be a token id or a list of them, got {value!r}")
    return ids


def _template(directory: Path, config: Mapping[str, Any], config_file: Path) -> TemplateSource | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _read_template(file)
    value = config.get("chat_template")
    if value is None:
        return None
    source = _default_of(value, config_file) if isinstance(value, list) else value
    if not isinstance(source, str):
        raise ModelFileError(str(config_file), "chat_template", "must be a string or a list of named templates")
    return TemplateSource(source, str(config_file), "chat_template")


def _tool_template(directory: Path, config: Mapping[str, Any], config_file: Path) -> TemplateSource | None:
    """The template named `tool_use`, which transformers uses for conversations with tools."""
    file = directory / "additional_chat_templates" / "tool_use.jinja"
    if (directory / "chat_template.jinja").is_file():
        return _read_template(file) if file.is_file() else None
    value = config.get("chat_template")
    named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)} if isinstance(value, list) else {}
    source = named.get("tool_use")
    return TemplateSource(source, str(config_file), "chat_template") if isinstance(source, str) else None


def _read_template(file: Path) -> TemplateSource:
    try:
        return TemplateSource(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(str(file), "", f"is not readable text: {error}") from error


def _default_of(templates: list[Any], file: Path) -> Any:
    named = {t.get("name"): t.get("template") for t in templates if isinstance(t, dict)}
    if "default" not in named:
        names = ", ".join(sorted(map(str, named)))
        raise ModelFileError(str(file), "chat_template", f"none of the templates is named default, only: {names}")
    return named["default"]
