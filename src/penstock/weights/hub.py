"""Fetching `org/name` from the Hugging Face hub with its own library, which is an optional dependency.

Decides which files are fetched: JSON, safetensors, chat templates and SentencePiece models. Never pickles (`*.bin`,
`*.pt`) and never code (`*.py`).

Invariant: a directory gets its final name only when every file in it is complete. An interrupted download stays in
`partial/`, and the next pull resumes there; a message says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from penstock.contract.errors import ModelUnavailable
from penstock.weights.hub_files import fetch_files
from penstock.weights.locate import hub_path

__all__ = ["Download", "HUB_FILES", "pull_from_hub", "snapshot"]

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
"""The files of a repository that are fetched; all others are left out."""


class Download(Protocol):
    """Fetches a repository."""

    def __call__(self, model: str, directory: Path, patterns: Sequence[str], show_progress: bool) -> None:
        """Fetch the files of `model` that match `patterns` into `directory`, resuming an interrupted earlier call.

        Raises:
            ModelUnavailable: it cannot be fetched.
        """
        ...


def snapshot(model: str, directory: Path, patterns: Sequence[str], show_progress: bool) -> None:
    """The `Download` that asks the hub."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise ModelUnavailable(
            f"{model}: fetching from the Hugging Face hub needs an optional package; run: pip install 'penstock[hub]'"
        ) from error
    if not (show_progress and sys.stderr.isatty()):
        disable_progress_bars()
    try:
        fetch_files(HfApi(), model, directory, patterns)
    except ModelUnavailable:
        raise
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{model}: the hub gives it only to those who accepted its terms; do so there and run: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(f"{model}: the Hugging Face hub has no such model, or it is private") from error
    except Exception as error:  # the library's HTTP client differs between versions, and so do its errors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelUnavailable(
            f"{model}: could not be fetched from the Hugging Face hub: {lines[0]} Check the network and run again"
        ) from error


def pull_from_hub(model: str, cache_dir: Path, show_progress: bool, download: Download = snapshot) -> Path:
    """Fetch `org/name`, then give its directory the final name.

    Raises:
        ModelUnavailable: it cannot be fetched, or is not a model that can be read.
    """
    partial = cache_dir / "partial" / f"hub--{model.replace('/', '--')}"
    partial.mkdir(parents=True, exist_ok=True)
    if show_progress and not sys.stderr.isatty():
        sys.stderr.write(f"Downloading {model} from the Hugging Face hub\n")
    try:
        download(model, partial, HUB_FILES, show_progress)
    except BaseException:
        kept = sum(part.stat().st_size for part in partial.rglob("*") if part.is_file())
        if show_progress and kept:
            sys.stderr.write(
                f"\n{model}: {kept / 1e6:.1f} MB are kept in {partial}; the next pull goes on from there\n"
            )
        raise
    for needed in ("config.json", "*.safetensors"):
        if not any(partial.glob(needed)):
            raise ModelUnavailable(f"{model}: the repository has no {needed}; only safetensors checkpoints can be read")
    target = hub_path(model, cache_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        partial.replace(target)
    return target
