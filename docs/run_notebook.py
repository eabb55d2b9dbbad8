"""Runs docs/a-minute-of-serving.ipynb from top to bottom, and stores its outputs: `make notebook`.

Needs the extra `notebook` and the default model. What depends on the machine that ran it (times of cells, versions of
Python) is left out, so that a run without a change in the notebook changes only its outputs.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("a-minute-of-serving.ipynb")
MOST_SECONDS = 600


def main() -> None:
    """Run the notebook in place."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=MOST_SECONDS, kernel_name="python3", record_timing=False).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
