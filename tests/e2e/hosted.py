"""A server of several tiny models in a process of its own, and what its tests ask of it."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from served import PATIENCE, Process, start
from tiny_checkpoints import BYTE_VOCABULARY, VARIANTS, write_byte_tokenizer, write_checkpoint

FAMILIES = {"first": "llama", "second": "qwen3", "third": "gemma2"}
QUICK = "--standby"
"""With a zygote, as by default, a load imports nothing; for tests that load often."""
OPTIONS = {"kv_cache_memory": "4MiB", "max_num_seqs": 4, "threads": 1}


def write_models(folder: Path) -> dict[str, Path]:
    """Three models of three families, by name."""
    found = {}
    for name, family in FAMILIES.items():
        found[name] = folder / name
        found[name].mkdir()
        write_checkpoint(found[name], family, VARIANTS[family][0], vocab_size=BYTE_VOCABULARY)
        write_byte_tokenizer(found[name])
    return found


@contextmanager
def serving(
    *arguments: str, end: signal.Signals = signal.SIGTERM, forked: bool = True, **environment: str
) -> Iterator[tuple[str, Process]]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = ("serve", "--port", "0", "--no-standby", *flags, *arguments)
    process = start(*command, forked=forked, PENSTOCK_KV_STORE="off", **environment)
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))
    try:
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"listening (http://\S+)", line):
                break
        else:
            raise AssertionError(f"it ended before it listened: {lines}")
        reader.start()  # so that it can go on writing
        yield found[1], process
    finally:
        process.send_signal(end)
        code = process.wait(PATIENCE)
        if reader.ident is not None:
            reader.join()
        process.stdout.close()
    assert code == (0 if end == signal.SIGTERM else -end), lines[-20:]


def states(url: str) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in httpx.get(f"{url}/v1/models").json()["data"]}
