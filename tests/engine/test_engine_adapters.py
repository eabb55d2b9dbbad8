"""Adapters in the engine: which may be named, when one is gone, and what a folder gives away."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_harness import build, request_of, terminal_of, tokens_of
from test_engine_calls import Running

from penstock.contract.errors import ConfigError, EngineDead, InvalidParameter, RequestError, SetupError, UnknownModel
from penstock.engine import AdapterFolder, LocalClient
from penstock.engine.adapters import AdapterBook
from penstock.sim import golden


def harness(most: int = 3, **options):
    made = build(**options)
    made.engine.adapters, made.engine._adapting = AdapterBook(most), made.runner
    made.intake._adapters = lambda: made.engine.adapters.known
    return made


def asked(made, request_id: str, adapter: str, **fields):
    return replace(request_of(request_id, made.text, "hello there", **fields), adapter=adapter)


def test_a_request_is_computed_with_the_adapter_that_it_names():
    made = harness()
    made.engine.load_adapter("poet", "/poet")
    for name in ("poet", ""):
        made.submit_request(asked(made, f"of {name}", name))
    made.run()
    prompt = made.text.tokenizer.encode("hello there")
    sampling = asked(made, "x", "").sampling
    for name in ("poet", ""):
        expected = golden(prompt, 8, made.card.vocab_size, sampling, adapter=name)
        assert tokens_of(made.outputs[f"of {name}"]) == expected


def test_an_unknown_adapter_is_an_unknown_model():
    made = harness()
    with pytest.raises(UnknownModel, match="poet"):
        made.submit_request(asked(made, "a", "poet"))


def test_names_and_places_are_bounded():
    made = harness(most=2)
    with pytest.raises(RequestError, match="takes no adapters"):
        harness(most=0).engine.load_adapter("poet", "/poet")
    for name in ("", " poet", "po\net", "x" * 257):
        with pytest.raises(InvalidParameter):
            made.engine.load_adapter(name, "/poet")
    made.engine.load_adapter("poet", "/poet")
    with pytest.raises(InvalidParameter, match="loaded already"):
        made.engine.load_adapter("poet", "/other")
    with pytest.raises(SetupError):
        made.engine.load_adapter("wrong", "/bad")
    made.engine.load_adapter("clerk", "/clerk")
    with pytest.raises(RequestError, match="--max-loras"):
        made.engine.load_adapter("third", "/third")
    assert list(made.engine.adapters.known) == list(made.runner.adapters) == ["poet", "clerk"]


def test_an_adapter_in_use_is_unloaded_when_its_last_request_ends():
    made, gone = harness(), []
    made.engine.load_adapter("poet", "/poet")
    made.submit_request(asked(made, "a", "poet", max_tokens=6))
    made.submit_request(asked(made, "b", "poet", max_tokens=3, n=2))
    made.step()
    late = made.intake.resolve(asked(made, "late", "poet"))
    made.engine.unload_adapter("poet", lambda: gone.append("poet"))
    assert (made.engine.adapters.known, gone) == ({}, [])
    with pytest.raises(UnknownModel):
        made.intake.resolve(asked(made, "c", "poet"))
    with pytest.raises(UnknownModel):
        made.engine.submit(late)
    with pytest.raises(InvalidParameter, match="being unloaded"):
        made.engine.load_adapter("poet", "/poet")
    made.engine.unload_adapter("poet", lambda: gone.append("again"))
    made.run()
    assert gone == ["poet", "again"]
    assert made.runner.adapters == {}
    assert len(tokens_of(made.outputs["a"])) == 6
    made.engine.load_adapter("poet", "/poet")
    made.submit_request(asked(made, "d", "poet"))
    made.run()
    terminal_of(made.outputs["d"])


def test_an_aborted_request_lets_its_adapter_go():
    made, gone = harness(), []
    made.engine.load_adapter("poet", "/poet")
    made.submit_request(asked(made, "a", "poet", max_tokens=50))
    made.step()
    made.engine.unload_adapter("poet", lambda: gone.append(1))
    assert not gone
    made.collect(made.engine.abort("a"))
    assert gone


def test_an_adapter_that_was_exchanged_meanwhile_is_not_taken_for_the_old_one():
    made = harness()
    made.engine.load_adapter("poet", "/one")
    resolved = made.intake.resolve(asked(made, "a", "poet"))
    made.engine.unload_adapter("poet")
    made.engine.load_adapter("poet", "/other")
    with pytest.raises(UnknownModel):
        made.engine.submit(resolved)


def test_nothing_waits_for_a_dead_engine():
    made, gone = harness(), []
    made.engine.load_adapter("poet", "/poet")
    made.submit_request(asked(made, "a", "poet", max_tokens=50))
    made.step()
    made.engine.unload_adapter("poet", lambda: gone.append(1))
    made.engine.die("over")
    assert gone


def test_what_is_in_use_is_measured():
    made = harness(max_num_seqs=1)
    assert build().engine.measurements().adapters is None
    for name in ("poet", "clerk"):
        made.engine.load_adapter(name, f"/{name}")
        made.submit_request(asked(made, name, name))
    made.step()
    used = made.engine.measurements().adapters
    assert (used.most, used.running, used.waiting) == (3, ("poet",), ("clerk",))


class Adapting(Running):
    """A running engine that takes adapters, from a folder."""

    def __init__(self, folder) -> None:
        super().__init__()
        self.harness.engine.adapters, self.harness.engine._adapting = AdapterBook(2), self.harness.runner
        self.harness.intake._adapters = lambda: self.harness.engine.adapters.known
        self.client = LocalClient(self.harness.intake, self.loop, adapters=folder and AdapterFolder(str(folder)))


async def test_a_client_loads_from_the_folder_and_nowhere_else(tmp_path):
    inside, outside = tmp_path / "adapters", tmp_path / "outside"
    for folder in (inside / "poet", inside / "bad", outside):
        folder.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    (inside / "way").symlink_to(inside / "poet")
    with Adapting(inside) as running:
        client = running.client
        facts = await client.load_adapter("poet", "poet")
        assert (facts.path, list(client.adapters())) == (str(inside / "poet"), ["poet"])
        said = set()
        for path in ("", ".", "..", "../outside", "link", str(outside), "/etc/passwd", "nothing", "poet/../..", "a\0b"):
            with pytest.raises(InvalidParameter) as refused:
                await client.load_adapter("x", path)
            assert refused.value.param == "lora_path"
            said.add(str(refused.value))
        assert len(said) == 1, "nobody learns what exists elsewhere"
        with pytest.raises(InvalidParameter, match="no adapter") as refused:
            await client.load_adapter("x", "bad")
        assert refused.value.param == "lora_path"
        assert (await client.load_adapter("other", str(inside / "way"))).path == str(inside / "poet")
        await asyncio.wait_for(client.unload_adapter("poet"), 5)
        assert list(client.adapters()) == ["other"]
        with pytest.raises(UnknownModel):
            await client.unload_adapter("poet")
    with pytest.raises(EngineDead):
        await client.load_adapter("x", "poet")


async def test_unloading_waits_for_the_answers_that_it_would_break(tmp_path):
    (tmp_path / "poet").mkdir()
    with Adapting(tmp_path) as running:
        await running.client.load_adapter("poet", "poet")
        answering = asyncio.create_task(running.answer("a", "hello there", adapter="poet"))
        await running.client.heartbeat()
        await asyncio.wait_for(running.client.unload_adapter("poet"), 5)
        terminal_of(await answering)


async def test_without_a_folder_nothing_is_loaded():
    with Adapting(None) as running, pytest.raises(RequestError, match="--lora-dir"):
        await running.client.load_adapter("poet", "poet")


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "nothing"):
        with pytest.raises(ConfigError) as refused:
            AdapterFolder(str(path))
        assert refused.value.option == "lora_dir"
