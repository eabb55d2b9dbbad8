"""Downloads a hub repository file by file with the hub's own client, resuming an interrupted file where it stopped.

Decides where a partial file is kept (`incomplete/` below the directory, named by the hash that the hub lists), and when
a file is complete: when it has that hash. The client's own `snapshot_download` discards an interrupted file.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from penstock.contract.errors import ModelUnavailable

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["INCOMPLETE", "fetch_files"]

INCOMPLETE = "incomplete"
_PIECE = 1 << 20


def fetch_files(api: HfApi, model: str, directory: Path, patterns: Sequence[str]) -> None:
    """Fetch the files of `model` that match `patterns` into `directory`; complete files are not fetched again.

    Raises:
        ModelUnavailable: a file does not have the listed hash, or its name leads out of `directory`.
        Exception: whatever the client raises.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import build_hf_headers

    revision = api.model_info(model).sha
    listed = [
        each for each in api.list_repo_tree(model, recursive=True, revision=revision) if isinstance(each, RepoFile)
    ]
    parts = directory / INCOMPLETE
    parts.mkdir(exist_ok=True)
    for file in listed:
        if not any(fnmatch(file.path, pattern) for pattern in patterns):
            continue
        target = _place(model, directory, file.path)
        if target.is_file() and _digest(file, target) == _expected(file):
            continue
        url, part = hf_hub_url(model, file.path, revision=revision, endpoint=api.endpoint), parts / _expected(file)
        with part.open("ab") as out:
            http_get(url, out, resume_size=out.tell(), headers=build_hf_headers(), expected_size=file.size)
        if _digest(file, part) != _expected(file):
            part.unlink()
            raise ModelUnavailable(f"{model}: {file.path} came damaged, and was thrown away; run again")
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
    shutil.rmtree(parts)


def _place(model: str, directory: Path, name: str) -> Path:
    """Where a file goes; never outside the directory, whatever its name."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ModelUnavailable(f"{model}: the repository has a file of the name {name!r}, which leads elsewhere")
    return directory / path


def _expected(file: Any) -> str:
    """The hash that the hub lists: SHA-256 for a file in LFS, the git blob id for any other."""
    digest: str = file.lfs.sha256 if file.lfs is not None else file.blob_id
    return digest


def _digest(file: Any, path: Path) -> str:
    """The same kind of hash, computed from the file on disk."""
    if file.lfs is not None:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
