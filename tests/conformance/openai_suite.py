"""Runs the openai package's own tests against a server, and sorts failures by their cause.

The tests call every method with made-up values: ids of nothing, empty lists, a bias of the token "foo". Many can pass
only against their mock server. What counts is why they fail: no endpoint may be missing, no field refused.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["CAUSES", "OURS", "causes", "run_suite"]

PATHS = (
    "chat",
    "responses",
    "test_completions.py",
    "test_embeddings.py",
    "test_models.py",
    "test_responses.py",
)
CAUSES = (
    ("made-up id", r"Error code: 404 - .*(response|completion)_id: there is no such"),
    ("no input", r"Error code: 400 - input is missing"),
    (
        "a value that means nothing",
        r"Error code: 400 - (logit_bias: must have token ids|best_of: must lie|limit must lie)",
    ),
    ("a served model cannot be deleted", r"Error code: 403 - The served model"),
    ("the client checks base64, which it asks for, as numbers", r"CreateEmbeddingResponse\s[\s\S]*data\.0\.embedding"),
    ("missing endpoint", r"Error code: (404|405) - (Not Found|Method Not Allowed)"),
    ("refused field", r"is not supported|Unknown parameter|unsupported_parameter|unknown_parameter"),
)
"""(cause, what its error says), the first that fits."""
OURS = ("missing endpoint", "refused field", "something else")
"""Causes that are this server's to mend."""


def run_suite(directory: Path, url: str, report: Path) -> None:
    """Run the tests in a checkout of openai-python; `OPENAI_SUITE_PYTHON` is a Python that has what they import."""
    python = os.environ.get("OPENAI_SUITE_PYTHON", sys.executable)
    paths = [f"tests/api_resources/{path}" for path in PATHS]
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-k", "not aiohttp", f"--junitxml={report}"]
    environment = os.environ | {"TEST_API_BASE_URL": f"{url}/v1"}
    subprocess.run([python, "-m", "pytest", *options, *paths], cwd=directory, env=environment, check=False)


def causes(report: Path) -> Counter[str]:
    """How many tests passed, were skipped, and failed by each cause."""
    return Counter(_cause(case) for case in ElementTree.parse(report).iter("testcase"))


def _cause(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    failed = case.find("failure")
    failed = case.find("error") if failed is None else failed
    if failed is None:
        return "passed"
    message = f"{failed.get('message', '')}\n{failed.text or ''}"
    return next((cause for cause, said in CAUSES if re.search(said, message)), "something else")
