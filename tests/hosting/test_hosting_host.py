"""Which models are loaded: first use, limits, pins, idle time, losses; and what requests get meanwhile."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, Unavailable, UnknownModel
from penstock.contract.hosting import HostedModel, HostLimits, ModelState
from penstock.hosting import ModelHost
from penstock.hosting.failures import ModelCannotLoad, ModelIsComing, NoRoomForModel


@dataclass
class FakeModel:
    """A model that takes `bytes`, and knows whether it was ended."""

    world: World
    name: str
    bytes: int
    max_model_len: int = 100
    adapters: tuple[str, ...] = ()
    closed: bool = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        assert not self.closed, "ended twice"
        self.closed = True
        self.world.present.remove(self)
        self.world.log.append(f"-{self.name}")


@dataclass
class World:
    """Loads fake models, and watches the limits."""

    sizes: dict[str, int] = field(default_factory=dict)
    most: int = 0
    now: float = 0.0
    log: list[str] = field(default_factory=list)
    present: list[FakeModel] = field(default_factory=list)
    gate: asyncio.Event | None = None
    broken: set[str] = field(default_factory=set)
    lost: dict[str, object] = field(default_factory=dict)

    async def load(self, model: HostedModel, lost) -> FakeModel:
        name = model.names[0]
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if name in self.broken:
            raise ConfigError("model", f"{name} is broken")
        loaded = FakeModel(self, name, self.sizes.get(name, 1))
        self.present.append(loaded)
        assert not self.most or len(self.present) <= self.most
        self.log.append(f"+{name}")
        self.lost[name] = lost
        return loaded

    def host(self, names: str, limits: HostLimits = HostLimits(), **changes: dict) -> ModelHost[FakeModel]:  # noqa: B008
        self.most = limits.most
        models = [
            HostedModel(**{"config": EngineConfig(), "names": (name,), **changes.get(name, {})}) for name in names
        ]
        return ModelHost(models, self.load, limits, lambda: self.now)


def state(host: ModelHost, name: str) -> str:
    return host.status(name).state


async def test_a_model_is_loaded_when_it_is_first_asked_for_and_once():
    world = World()
    host = world.host("ab")
    assert state(host, "a") == ModelState.UNLOADED
    async with host.use("a") as first, host.use("a") as second:
        assert first is second
        assert host.status("a").requests == 2
    assert world.log == ["+a"]
    assert state(host, "a") == ModelState.LOADED
    assert host.status("a").loads == 1


async def test_an_adapter_names_its_model_also_while_that_is_not_loaded():
    host = World().host("ab", b={"config": EngineConfig(lora=("first=x",))})
    assert host.status("first").model.names == ("b",)
    async with host.use("first") as model:
        model.adapters = ("second",)
        assert host.status("second").requests == 1
    await host.unload("b")
    assert host.names == ("a", "b", "second")
    with pytest.raises(UnknownModel, match="'second'"):
        host.status("first")


async def test_requests_that_come_together_wait_for_one_load():
    world = World(gate=asyncio.Event())
    host = world.host("a")

    async def ask() -> FakeModel:
        async with host.use("a") as model:
            return model

    asked = [asyncio.create_task(ask()) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert host.status("a").waiting == 5
    assert state(host, "a") == ModelState.LOADING
    world.gate.set()
    assert len({id(each) for each in await asyncio.gather(*asked)}) == 1
    assert world.log == ["+a"]


async def test_the_one_that_was_used_least_recently_makes_room():
    world = World()
    host = world.host("abc", HostLimits(most=2))
    for name in "aba":
        world.now += 1
        await host.load(name)
    await host.load("c")
    assert world.log == ["+a", "+b", "-b", "+c"]


async def test_a_busy_model_answers_what_it_has_and_leaves_then():
    world = World()
    host = world.host("ab", HostLimits(most=1))
    async with host.use("a") as model:
        other = asyncio.create_task(host.load("b"))
        await asyncio.sleep(0.01)
        assert state(host, "a") == ModelState.UNLOADING
        again = asyncio.create_task(host.load("a"))
        await asyncio.sleep(0.01)
        assert not other.done()
        assert not model.closed
    await other
    await again
    assert world.log == ["+a", "-a", "+b", "-b", "+a"]


async def test_an_idle_model_makes_room_before_a_busy_one():
    world = World()
    host = world.host("abc", HostLimits(most=2))
    async with host.use("a"):
        world.now = 1
        await host.load("b")
        world.now = 2
        await host.load("c")
    assert world.log == ["+a", "+b", "-b", "+c"]


async def test_a_request_that_waited_is_answered_before_its_model_leaves():
    """Two models take turns in one place: each load answers the requests that waited for it."""
    world = World()
    host = world.host("ab", HostLimits(most=1))
    answered = []

    async def ask(name: str) -> None:
        async with host.use(name) as model:
            await asyncio.sleep(0)
            assert not model.closed
            answered.append(model.name)

    await asyncio.gather(*(ask(name) for name in "abababab"))
    assert sorted(answered) == sorted("abababab")
    assert world.log == ["+a", "-a", "+b"]


async def test_pinned_models_keep_their_room():
    world = World()
    host = world.host("abc", HostLimits(most=2), a={"pinned": True})
    async with host.running():
        assert world.log == ["+a"]
        for name in "bcb":
            await host.load(name)
        assert world.log == ["+a", "+b", "-b", "+c", "-c", "+b"]
        await host.pin("b")
        with pytest.raises(NoRoomForModel, match="pinned"):
            await host.load("c")
        host.unpin("a")
        await host.load("c")
        assert state(host, "a") == ModelState.UNLOADED
    assert not world.present


async def test_memory_is_a_limit_too_and_is_learned_by_loading():
    world = World(sizes={"a": 5, "b": 5, "c": 8})
    host = world.host("abc", HostLimits(memory=10))
    await host.load("a")
    await host.load("b")
    world.now = 1
    await host.load("a")
    await host.load("c")  # its size of 8 was not known, so the others make room once it is loaded
    await asyncio.sleep(0.01)
    assert world.log == ["+a", "+b", "+c", "-b", "-a"]
    await host.load("a")
    assert world.log[-2:] == ["-c", "+a"]
    await host.load("c")  # now its size is known
    assert world.log[-2:] == ["-a", "+c"]


async def test_a_model_larger_than_all_memory_is_refused():
    host = World().host("a", HostLimits(memory=10), a={"file_bytes": 11})
    with pytest.raises(NoRoomForModel, match="limits"):
        await host.load("a")


async def test_idle_models_leave_after_their_time():
    world = World()
    host = world.host("abc", a={"idle_seconds": 10.0}, b={"idle_seconds": 10.0, "pinned": True})
    for name in "abc":
        await host.load(name)
    world.now = 9
    host.unload_idle()
    await asyncio.sleep(0.01)
    assert not [each for each in world.log if each.startswith("-")]
    world.now = 10
    host.unload_idle()
    await asyncio.sleep(0.01)
    assert [each for each in world.log if each.startswith("-")] == ["-a"]


async def test_a_request_that_waits_too_long_is_told_so_and_the_model_comes_all_the_same():
    world = World(gate=asyncio.Event())
    host = world.host("a", HostLimits(wait_seconds=0.02))
    with pytest.raises(ModelIsComing, match="being loaded") as refused:
        async with host.use("a"):
            raise AssertionError
    assert refused.value.retry_after > 0
    world.gate.set()
    await asyncio.sleep(0.01)
    assert state(host, "a") == ModelState.LOADED
    assert host.status("a").requests == 0


async def test_whoever_asks_for_the_load_itself_waits_as_long_as_it_takes():
    world = World(gate=asyncio.Event())
    host = world.host("a", HostLimits(wait_seconds=0.02), a={"pinned": True})
    asyncio.get_running_loop().call_later(0.1, world.gate.set)
    async with host.running():
        assert state(host, "a") == ModelState.LOADED


async def test_what_nobody_waits_for_any_more_is_not_begun():
    world = World()
    host = world.host("ab", HostLimits(most=1))
    async with host.use("a"):
        impatient = asyncio.create_task(host.load("b"))
        await asyncio.sleep(0.01)
        impatient.cancel()
        with suppress(asyncio.CancelledError):
            await impatient
    await host.load("a")
    await asyncio.sleep(0.01)
    assert "+b" not in world.log
    assert host.status("b").waiting == 0


async def test_one_model_may_answer_to_every_name_that_no_other_has():
    world = World()
    host = world.host("ab", b={"any_name": True})
    for name in ("a", "gpt-4", "b"):
        await host.load(name)
    assert world.log == ["+a", "+b"]
    assert host.names == ("a", "b")


async def test_a_model_that_cannot_be_loaded_is_refused_with_its_name_and_tried_again():
    world = World(broken={"a"})
    host = world.host("ab")
    with pytest.raises(ModelCannotLoad, match="'a'"):
        await host.load("a")
    assert "a is broken" in host.status("a").reason
    await host.load("b")
    world.broken.clear()
    await host.load("a")
    assert host.status("a").reason == ""


async def test_a_pinned_model_that_cannot_be_loaded_ends_the_start():
    host = World(broken={"a"}).host("a", a={"pinned": True})
    with pytest.raises(ModelCannotLoad):
        async with host.running():
            raise AssertionError


async def test_a_model_that_is_lost_is_loaded_again():
    world = World()
    host = world.host("a")
    await host.load("a")
    world.lost["a"]("its engine has ended")
    await asyncio.sleep(0.02)
    assert state(host, "a") == ModelState.UNLOADED
    assert host.status("a").reason == "its engine has ended"
    await host.load("a")
    assert world.log == ["+a", "-a", "+a"]


async def test_unload_waits_for_what_is_answered():
    world = World()
    host = world.host("ab")
    async with host.use("a"):
        unloading = asyncio.create_task(host.unload("a"))
        await asyncio.sleep(0.01)
        assert not unloading.done()
        await host.load("b")  # loading another model does not wait for it
    await unloading
    assert world.log == ["+a", "+b", "-a"]


async def test_unknown_names_are_refused_with_those_that_there_are():
    with pytest.raises(UnknownModel, match="'a', 'b'"):
        await World().host("ab").load("c")


async def test_after_the_end_nothing_is_loaded():
    world = World()
    host = world.host("a")
    async with host.running():
        await host.load("a")
    with pytest.raises(Unavailable, match="shutting down"):
        await host.load("a")
    assert world.log == ["+a", "-a"]


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_limits_hold_and_every_request_is_answered(seed):
    draw = random.Random(seed)
    world = World(sizes={name: draw.randrange(1, 5) for name in "abcde"})
    host = world.host("abcde", HostLimits(most=draw.randrange(1, 4)), a={"pinned": bool(seed % 2)})
    answered, left = [], []

    async def ask() -> None:
        await asyncio.sleep(draw.random() * 0.02)
        name = draw.choice("abcde")
        try:
            async with asyncio.timeout(None if draw.random() < 0.8 else draw.random() * 0.01):
                async with host.use(name) as model:
                    assert model.name == name
                    await asyncio.sleep(draw.random() * 0.002)
                    assert not model.closed
        except (TimeoutError, NoRoomForModel):
            left.append(name)
        else:
            answered.append(name)

    async def disturb() -> None:
        for _ in range(20):
            await asyncio.sleep(0.001)
            name = draw.choice("abcde")
            action = draw.choice((host.unload, host.load, host.unload_idle, world.lost.get(name)))
            with suppress(NoRoomForModel):
                if action is None or action == host.unload_idle:
                    host.unload_idle()
                elif action in (host.unload, host.load):
                    await action(name)
                else:
                    action("lost")

    async with host.running():
        async with asyncio.timeout(20):
            await asyncio.gather(disturb(), *(ask() for _ in range(60)))
        assert len(answered) + len(left) == 60
        assert all(status.requests == 0 and status.waiting == 0 for status in host.statuses())
    assert not world.present
