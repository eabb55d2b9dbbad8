"""`penstock run-batch` on the default model: the library's answers, and a second run that has nothing to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import penstock, started

from penstock import LLM, SamplingParams

pytestmark = pytest.mark.model
TEXTS = ("Name a colour.", "Say hello.", "What is 2 + 2?")


def test_a_batch_is_answered_once_and_as_the_library_answers(tmp_path, default_model):
    source, target, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))
    fields = {"temperature": 0, "max_tokens": 12}
    bodies = [{"messages": [{"role": "user", "content": text}], **fields} for text in TEXTS]
    lines = [
        *(("/v1/chat/completions", body) for body in bodies),
        ("/v1/completions", {"prompt": "Once upon a time", **fields}),
        ("/v1/completions", {"prompt": "x", "top_p": 7}),
    ]
    source.write_text(
        "".join(
            json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}) + "\n"
            for number, (url, body) in enumerate(lines)
        )
    )
    files = ("-i", str(source), "-o", str(target), "-e", str(errors), str(default_model))
    command = ("run-batch", *files, "--kv-cache-memory", "100MB")
    first = started(*command)
    assert first.returncode == 0, first.stderr
    assert "4 answered, 1 failed, 0 were answered before" in first.stderr
    assert "Traceback" not in first.stderr
    answers = by_id(target)
    assert sorted(answers) == ["line-0", "line-1", "line-2", "line-3"]
    assert by_id(errors)["line-4"]["body"]["error"]["param"] == "top_p"
    with LLM(str(default_model), kv_cache_memory=100_000_000) as llm:
        params = SamplingParams(**fields)
        for number, text in enumerate(TEXTS):
            [expected] = llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)
            said = answers[f"line-{number}"]["body"]["choices"][0]["message"]["content"]
            assert said == expected.outputs[0].text
        [expected] = llm.generate("Once upon a time", params, use_tqdm=False)
        assert answers["line-3"]["body"]["choices"][0]["text"] == expected.outputs[0].text
    before = target.read_bytes()
    again = penstock(*command)
    assert "0 answered, 0 failed, 5 were answered before" in again.stderr
    assert target.read_bytes() == before


def by_id(path: Path) -> dict:
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {record["custom_id"]: record["response"] for record in records}
