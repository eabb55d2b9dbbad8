"""Runs `bench/quality.py` on several GGUF files, each in a process of its own, and writes one record of all.

    python bench/make_quantised.py CHECKPOINT FOLDER --format Q4_K_M --format Q6_K
    python bench/quality_of_files.py FOLDER/CHECKPOINT-Q*.gguf --tokens 2048 --json bench/results/FILE.json

For each file, it measures Penstock on the file's own blocks and llama.cpp on the same file, both beside float32 of the
numbers that the file holds. A file that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.process import run
from penstock.contract.errors import EngineFault

__all__ = ["main", "measure_file"]

_QUALITY = Path(__file__).with_name("quality.py")


def measure_file(file: Path, options: list[str]) -> dict[str, Any]:
    """The record of one file, with the format in its name as `name`.

    Raises:
        EngineFault: an engine could not be measured.
    """
    with tempfile.TemporaryDirectory() as work:
        target = Path(work) / "record.json"
        what = [str(file), "--quantization", "file", "--peer", "llama.cpp", "--json", str(target)]
        run([sys.executable, str(_QUALITY), *what, *options])
        record: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    if record["absent"]:
        raise EngineFault(f"{file.name}: {record['absent']}")
    record["config"]["model"] = file.name  # the record does not tell where the file was
    return {"name": file.stem.rpartition("-")[2]} | record


def main() -> None:
    """Measure the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="GGUF files, named MODEL-FORMAT.gguf")
    parser.add_argument("--tokens", type=int, default=4096, help="of the corpus (default: 4096)")
    parser.add_argument("--threads", type=int, default=0, help="compute threads of both (default: all cores)")
    parser.add_argument("--peers-dir", type=Path, help="where llama.cpp is; by default in the cache")
    parser.add_argument("--json", type=Path, required=True, help="where the record is written")
    options = parser.parse_args()
    common = ["--tokens", str(options.tokens), "--threads", str(options.threads)]
    common += ["--peers-dir", str(options.peers_dir)] if options.peers_dir else []
    records, failed = [], False
    for file in options.files:
        try:
            records.append(measure_file(file, common))
        except EngineFault as fault:
            failed = True
            print(f"{file.name}: {fault}", file=sys.stderr, flush=True)
            continue
        rows = {row["name"]: row["kl_mean"] for row in records[-1]["rows"]}
        print(f"{file.name}: {', '.join(f'{name} {value:.6f}' for name, value in rows.items())}", flush=True)
        options.json.write_text(json.dumps({"kind": "quality-of-files", "records": records}, indent=2) + "\n", "utf-8")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
