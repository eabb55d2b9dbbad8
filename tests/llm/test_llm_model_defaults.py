"""A model's own sampling defaults in the library and on the command line."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint, write_letters

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.cli import penstock
from penstock.contract.errors import ModelFileError

OPTIONS = {"dtype": "float32", "threads": 1, "kv_cache_memory": 1_000_000}
FLAGS = ["--dtype", "float32", "--threads", "1", "--kv-cache-memory", "1MB"]
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model whose published defaults are greedy."""
    directory = write_checkpoint(tmp_path_factory.mktemp("defaults"), "llama", "wide_heads_untied")
    write_letters(directory, 101)
    recommend(directory, do_sample=False, top_k=5)
    return directory


def recommend(directory, **values):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | values))


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_no_parameters_means_the_models_own_and_given_ones_keep_theirs(model):
    prompts = [[5, 6, 7], [8, 9]]
    with LLM(str(model), **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, top_k=5)
        greedy = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
        assert tokens(llm.generate(prompts, use_tqdm=False)) == greedy
        drawn = tokens(llm.generate(prompts * 8, SamplingParams(), use_tqdm=False))
        assert drawn != greedy * 8
        llm.add_request(prompts[0])
        while llm.has_unfinished_requests():
            last = llm.step()
        assert tokens(last) == greedy[:1]
        [line] = [line for line in llm.report if line.startswith("sampling ")]
    assert "temperature 0, top_k 5 unless a request says otherwise" in line
    assert "generation_config.json" in line
    assert "--generation-config none" in line


def test_they_can_be_left_out_or_taken_from_elsewhere(model, tmp_path):
    with LLM(str(model), generation_config="none", **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert not [line for line in llm.report if line.startswith("sampling ")]
    recommend(tmp_path, temperature=0.5)
    with LLM(str(model), generation_config=str(tmp_path), **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5)


def test_the_async_library_has_them_too(model):
    async def answer():
        async with AsyncLLM(str(model), **OPTIONS) as llm:
            assert llm.get_default_sampling_params().temperature == 0
            texts = []
            for params in (None, GREEDY):
                async for output in llm.generate([5, 6, 7], params):
                    last = output
                texts.append(last.outputs[0].token_ids)
            return texts

    plain, greedy = asyncio.run(answer())
    assert plain == greedy


def test_a_bad_file_is_refused_before_anything_is_loaded(model, tmp_path):
    recommend(tmp_path, temperature=99)
    with pytest.raises(ModelFileError, match="temperature"):
        LLM(str(model), generation_config=str(tmp_path), **OPTIONS)


def generate(model, *arguments):
    done = CliRunner().invoke(penstock, ["generate", str(model), *FLAGS, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_line_takes_them_unless_it_is_told_otherwise(model):
    asked = ["-p", "abc", "--seed", "3"]
    greedy = generate(model, *asked, "--temperature", "0")
    assert generate(model, *asked) == greedy
    assert generate(model, *asked, "--temperature", "1.0") != greedy  # the usual default, given as an option
    assert generate(model, *asked, "--generation-config", "none") != greedy


def test_a_file_of_prompts_takes_them_line_by_line(model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": "none"}, {"id": "greedy", "temperature": 0}, {"id": "drawn", "temperature": 1.0, "top_k": 0}]
    source.write_text("".join(json.dumps(line | {"prompt": "abc", "seed": 3}) + "\n" for line in lines))
    generate(model, "--input", str(source), "--output", str(target))
    texts = {each["id"]: each["choices"][0]["text"] for each in map(json.loads, target.read_text().splitlines())}
    assert texts["none"] == texts["greedy"] != texts["drawn"]


def test_help_says_whose_defaults_they_are():
    shown = " ".join(CliRunner().invoke(penstock, ["generate", "--help"]).output.split())
    assert "[default: (the model's, else 1.0)]" in shown
    assert "[default: 16]" in shown


def test_a_bad_parameter_in_a_file_fails_its_line_alone(model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "abc"}, {"prompt": "abc", "top_kk": 1}, {"id": "hot", "prompt": "abc", "temperature": 99}, {}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    generate(model, "--input", str(source), "--output", str(target))
    results = {each["id"]: each for each in map(json.loads, target.read_text().splitlines())}
    assert results["1"]["choices"][0]["text"]
    assert results["2"] == {"id": "2", "error": "line 2: top_kk: is not a sampling parameter; did you mean top_k?"}
    assert results["hot"]["error"].startswith("line 3: temperature: ")
    assert results["4"]["error"].startswith("line 4: prompt: give either prompt or messages")
