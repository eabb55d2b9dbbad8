"""Makes an environment for each client of clients.toml, below a folder: `python tests/clients/environments.py FOLDER`.

An existing environment is kept while its requirements stay the same. What cannot be installed leaves its reason in
`FOLDER/NAME/.failed`, and the tests skip that client by name, with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

CLIENTS: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("clients.toml").read_text(encoding="utf-8")
)
TORCH = "torch==2.13.0"
"""If a client ever wants torch, it gets the project's version, not one of its own choice."""


def packages_of(name: str) -> list[str]:
    """The packages installed for a client, with versions."""
    return [package for packages in CLIENTS[name].values() for package in packages]


def make(name: str, folder: Path) -> str:
    """Install a client's packages; returns why that failed, or nothing."""
    directory, wanted = folder / name, "\n".join(packages_of(name))
    installed = directory / ".installed"
    if installed.is_file() and installed.read_text(encoding="utf-8") == wanted:
        return ""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for command in _commands(name, directory):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            reason = f"{Path(command[0]).name} failed: {said[-1] if said else done.returncode}"
            (directory / ".failed").write_text(reason, encoding="utf-8")
            return reason
    installed.write_text(wanted, encoding="utf-8")
    return ""


def _commands(name: str, directory: Path) -> list[list[str]]:
    packages = CLIENTS[name]
    if "npm" in packages:
        npm = shutil.which("npm")
        if npm is None:
            return [[sys.executable, "-c", "raise SystemExit('there is no npm here')"]]
        options = ["--no-fund", "--no-audit", "--ignore-scripts", "--prefix", str(directory)]
        return [[npm, "install", *options, *packages["npm"]]]
    venv.create(directory, with_pip=True)
    (directory / "constraints.txt").write_text(TORCH + "\n", encoding="utf-8")
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return [[*pip, "--constraint", str(directory / "constraints.txt"), *packages["pip"]]]


if __name__ == "__main__":
    for client in CLIENTS:
        print(f"== {client}: {make(client, Path(sys.argv[1])) or 'installed'}", flush=True)
