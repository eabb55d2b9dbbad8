"""The operator's folder of adapters: which paths a request to load an adapter may name.

Decides that a path from a request must lead into the folder, checked after links and `..` are resolved.
"""

from __future__ import annotations

from pathlib import Path

from penstock.contract.errors import ConfigError, InvalidParameter

__all__ = ["AdapterFolder"]


class AdapterFolder:
    """A folder of adapters.

    Raises:
        ConfigError: the path is not a usable folder.
    """

    def __init__(self, folder: str) -> None:
        try:
            self._root = Path(folder).resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise ConfigError("lora_dir", f"{folder} cannot be used: {error}") from error
        if not self._root.is_dir():
            raise ConfigError("lora_dir", f"{folder} is no folder")

    def find(self, path: str) -> str:
        """The real path of an adapter, from a path that is absolute or begins in the folder.

        Raises:
            InvalidParameter: the path is not in the folder, or nothing is there. Both cases give the same answer, so
                that it does not reveal what exists elsewhere.
        """
        refusal = InvalidParameter("lora_path", "lora_path must be a directory or a .gguf file below --lora-dir.")
        if not path or "\0" in path:
            raise refusal
        try:
            found = (self._root / path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise refusal from None
        if found == self._root or not found.is_relative_to(self._root):
            raise refusal
        return str(found)
