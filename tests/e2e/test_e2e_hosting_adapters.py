"""Adapters of several models behind one port: each is named like a model, and is back when its model is."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from hosted import QUICK, serving
from served import PATIENCE
from tiny_adapters import linear_modules, load_with_adapters, write_adapter
from tiny_checkpoints import write_lettered

from needs import COMPILED
from penstock.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)


def ask(url: str, model: str) -> str:
    body = {"model": model, "prompt": "the sea and", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def order(url: str, path: str, **fields: str) -> httpx.Response:
    return httpx.post(url + path, json=fields, timeout=PATIENCE)


def unload(url: str, model: str) -> None:
    assert order(url, "/models/unload", model=model).json()["status"]["value"] == "unloaded"


def test_adapters_are_named_as_models_are_and_come_back_with_theirs(tmp_path):
    folder, file = tmp_path / "adapters", tmp_path / "models.yaml"
    entries = []
    for seed, (name, width) in enumerate((("one", 96), ("two", 128))):
        (tmp_path / name).mkdir()
        write_lettered(tmp_path / name, "llama", "wide_heads_untied", intermediate_size=width)
        modules = linear_modules(load_with_adapters(tmp_path / name).program)
        for at in range(2):
            write_adapter(folder / f"{name}-{at}", modules, 4, seed=2 * seed + at)
        entries.append(f"  - {{model: {tmp_path / name}, lora: ['{name}-0={folder}/{name}-0'], lora-dir: {folder}}}\n")
    file.write_text("models:\n" + "".join(entries))
    with serving("--models-file", str(file), "--dtype", "float32", "--max-loaded-models", "1", QUICK) as (url, _):

        def listed() -> dict[str, tuple[str | None, str]]:
            data = httpx.get(f"{url}/v1/models").json()["data"]
            return {each["id"]: (each["parent"], each["status"]["value"]) for each in data}

        assert listed() == {
            "one": (None, "unloaded"),
            "one-0": ("one", "unloaded"),
            "two": (None, "unloaded"),
            "two-0": ("two", "unloaded"),
        }
        want = {name: ask(url, name) for name in ("two-0", "two", "one-0", "one")}
        assert len(set(want.values())) == 4
        assert listed()["one-0"] == ("one", "loaded")
        assert listed()["two-0"] == ("two", "unloaded")

        loaded = order(url, "/v1/load_lora_adapter?model=two", lora_name="two-1", lora_path="two-1")
        assert loaded.status_code == 200, loaded.text
        for name in ("one", "one-0", "two-1"):
            taken = order(url, "/v1/load_lora_adapter?model=one", lora_name=name, lora_path="one-1")
            assert taken.json()["error"]["code"] == "adapter_loaded"
        want["two-1"] = ask(url, "two-1")
        for name in ("one-0", "two-1", "two", "one", "two-0"):  # each in a new load of its model
            assert ask(url, name) == want[name]

        assert order(url, "/v1/unload_lora_adapter", lora_name="two-0").json() == {"unloaded": "two-0"}
        unload(url, "two")
        gone = order(url, "/v1/completions", model="two-0", prompt="a")
        assert gone.status_code == 404
        assert "'two-1'" in gone.json()["error"]["message"]
        shutil.rmtree(folder / "two-1")
        assert ask(url, "two") == want["two"]
        assert set(listed()) == {"one", "one-0", "two"}, "its files are gone, and it alone with them"


@pytest.mark.parametrize("name", ["two", "one-0"])
def test_no_two_have_one_name(tmp_path: Path, name: str):
    for each in ("one", "two"):
        (tmp_path / each).mkdir()
        write_lettered(tmp_path / each, "llama", "wide_heads_untied")
    file = tmp_path / "models.yaml"
    entries = (
        f"  - {{model: {tmp_path}/{each}, lora: ['{lora}=x']}}\n" for each, lora in (("one", "one-0"), ("two", name))
    )
    file.write_text("models:\n" + "".join(entries))
    with pytest.raises(AssertionError, match="lora"), serving("--models-file", str(file)):
        pass
