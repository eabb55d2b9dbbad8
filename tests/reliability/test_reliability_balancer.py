"""The harness's balancer: it asks which servers are ready, passes refused requests on, and breaks off no stream."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from harness.balancer import Balancer
from harness.client import ask

EVENTS = b"".join(b'data: {"choices": [{"text": "%d"}]}\n\n' % number for number in range(5)) + b"data: [DONE]\n\n"


class Upstream:
    """A server whose readiness and answer a test decides."""

    def __init__(self, *, ready: bool = True, refuses: bool = False) -> None:
        self.ready, self.refuses = ready, refuses
        self.asked = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    @asynccontextmanager
    async def listening(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health/ready "):
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % (200 if self.ready else 503))
        elif self.refuses:
            self.asked += 1
            writer.write(b"HTTP/1.1 503 X\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        else:
            self.asked += 1
            await reader.readexactly(2)
            writer.write(
                b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + EVENTS[:50]
            )
            await writer.drain()
            await self.go_on.wait()
            writer.write(EVENTS[50:])
        writer.close()


def run_with(*upstreams, then):
    """Run `then(url, balancer)` with a balancer in front of these servers, and leave nothing running."""

    async def body():
        async with asyncio.timeout(30):
            async with upstreams[0].listening() as first, upstreams[1].listening() as second:
                balancer = Balancer([first, second])
                async with balancer.listening() as url:
                    result = await then(url, balancer)
                left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                assert not [task for task in left if "Balancer" in repr(task)], left
                return result

    return asyncio.run(body())


async def six(url, balancer):
    await asyncio.sleep(0.3)  # until every server was asked whether it is ready
    return await asyncio.gather(*(ask(url, "/v1/completions", {}) for _ in range(6)))


def test_requests_are_spread_over_ready_servers():
    async def body():
        return Upstream(), Upstream()

    one, other = asyncio.run(body())
    answers = run_with(one, other, then=six)
    assert all(each.finished for each in answers), [each.describe() for each in answers]
    assert min(one.asked, other.asked) >= 2


def test_a_server_that_is_not_ready_is_not_asked():
    one, other = Upstream(ready=False), Upstream()
    answers = run_with(one, other, then=six)
    assert all(each.finished for each in answers)
    assert (one.asked, other.asked) == (0, 6)


def test_what_a_server_refuses_is_passed_on():
    one, other = Upstream(refuses=True), Upstream()

    async def then(url, balancer):
        return await six(url, balancer), balancer.passed_on

    answers, passed_on = run_with(one, other, then=then)
    assert all(each.finished for each in answers)
    assert other.asked == 6
    assert passed_on == one.asked > 0


def test_a_stream_that_has_begun_goes_on_when_its_server_is_not_ready_any_more():
    one, other = Upstream(), Upstream(ready=False)

    async def then(url, balancer):
        one.go_on.clear()
        stream = asyncio.create_task(ask(url, "/v1/completions", {}))
        while not one.asked:
            await asyncio.sleep(0.01)
        one.ready = False
        await asyncio.sleep(0.3)
        one.go_on.set()
        return await stream

    assert run_with(one, other, then=then).finished


def test_clients_that_wait_for_a_server_are_let_go_at_the_end():
    one, other = Upstream(ready=False), Upstream(ready=False)

    async def then(url, balancer):
        waiting = asyncio.create_task(ask(url, "/v1/completions", {}))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        return waiting

    run_with(one, other, then=then)
