"""A hub repository is fetched file by file: what came is kept, what is damaged is not, nothing lands elsewhere."""

from __future__ import annotations

import pytest
from hub_server import git_name, hub_server

from penstock.contract.errors import ModelUnavailable
from penstock.weights.hub import HUB_FILES
from penstock.weights.hub_files import INCOMPLETE, fetch_files

huggingface_hub = pytest.importorskip("huggingface_hub")

WEIGHTS = bytes(range(256)) * 4096
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "sub/tokenizer.json": b"[1]",
    "pytorch_model.bin": b"a pickle",
    "README.md": b"words",
}
WANTED = {"config.json", "model.safetensors", "sub/tokenizer.json"}


def fetch(hub, folder):
    fetch_files(huggingface_hub.HfApi(endpoint=hub.url), "org/name", folder, HUB_FILES)


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_matches_is_fetched_and_what_is_there_is_not_fetched_again(tmp_path):
    with hub_server(FILES, large=("model.safetensors",)) as hub:
        fetch(hub, tmp_path)
        assert files_in(tmp_path) == {name: FILES[name] for name in WANTED}
        assert {name for name, _ in hub.sent} == WANTED
        (tmp_path / "config.json").write_text("changed here")
        hub.sent.clear()
        fetch(hub, tmp_path)
        assert hub.sent == [("config.json", 0)]
    assert files_in(tmp_path) == {name: FILES[name] for name in WANTED}


@pytest.mark.parametrize("kept", [1, 1000, len(WEIGHTS) - 1, len(WEIGHTS)])
def test_a_file_goes_on_where_it_stopped(tmp_path, kept):
    with hub_server(FILES) as hub:
        (tmp_path / INCOMPLETE).mkdir()
        (tmp_path / INCOMPLETE / git_name(WEIGHTS)).write_bytes(WEIGHTS[:kept])
        fetch(hub, tmp_path)
        assert ("model.safetensors", 0) not in hub.sent
        assert (("model.safetensors", kept) in hub.sent) == (kept < len(WEIGHTS))
    assert files_in(tmp_path) == {name: FILES[name] for name in WANTED}


@pytest.mark.parametrize("large", [(), ("model.safetensors",)])
def test_a_damaged_file_is_thrown_away_and_the_next_pull_is_well(tmp_path, large):
    with hub_server(dict(FILES), large) as hub:
        tree = hub.tree()
        hub.tree = lambda: tree
        hub.files["model.safetensors"] = WEIGHTS[:-1] + b"x"
        with pytest.raises(ModelUnavailable, match="came damaged"):
            fetch(hub, tmp_path)
        assert "model.safetensors" not in files_in(tmp_path)
        hub.files["model.safetensors"] = WEIGHTS
        fetch(hub, tmp_path)
    assert files_in(tmp_path) == {name: FILES[name] for name in WANTED}


@pytest.mark.parametrize("name", ["../config.json", "/tmp/config.json", "a/../../config.json"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    with hub_server({name: b"{}"}) as hub, pytest.raises(ModelUnavailable, match="leads elsewhere"):
        fetch(hub, tmp_path)
