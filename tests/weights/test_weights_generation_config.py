"""Which file `--generation-config` means."""

from __future__ import annotations

import json

import pytest

from penstock.contract.errors import ConfigError, ModelFileError
from penstock.weights.catalogue import CATALOGUE
from penstock.weights.generation_config import read_generation_config


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6}')
    return tmp_path / "model"


def test_a_directory_has_its_own(model):
    found = read_generation_config("auto", model)
    assert (dict(found.values), found.origin) == ({"temperature": 0.6}, str(model / "generation_config.json"))


def test_none_is_none(model):
    assert not read_generation_config("none", model).values


def test_a_model_without_one_has_none(tmp_path):
    assert not read_generation_config("auto", tmp_path).values
    assert not read_generation_config("auto", tmp_path / "some.gguf").values


def test_a_model_of_the_catalogue_has_its_publishers(tmp_path):
    for entry in CATALOGUE.values():
        found = read_generation_config("auto", tmp_path / entry.file_name)
        assert (found.values, found.origin) == (entry.generation_config, "the catalogue")
    assert dict(CATALOGUE["smollm2-135m-instruct"].generation_config) == {"temperature": 0.2, "top_p": 0.9}


def test_another_directory_or_file_may_be_named(model, tmp_path):
    other = tmp_path / "mine.json"
    other.write_text(json.dumps({"top_k": 7}))
    assert read_generation_config(str(other), model).values == {"top_k": 7}
    assert read_generation_config(str(model), tmp_path / "some.gguf").values == {"temperature": 0.6}


def test_what_is_not_there_or_no_json_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match=r"generation_config: .*nowhere is no file; give auto, none, a file, or"):
        read_generation_config(str(tmp_path / "nowhere"), model)
    (model / "generation_config.json").write_text("[1]")
    with pytest.raises(ModelFileError, match=r"generation_config\.json"):
        read_generation_config("auto", model)
