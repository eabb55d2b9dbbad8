"""`penstock serve --journal`: the whole server is killed, again and again, and every stream goes on where it was."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from resuming import CHAT, COMPLETIONS, RESPONSES, blocks, id_of, resume
from served import PATIENCE, killed_at_the_end, wait_until
from test_conformance_resume import said

pytestmark = [pytest.mark.deep, pytest.mark.model]

KILLS = 20
HOT = {"temperature": 1.2, "max_tokens": 150, "stream": True}
ASKED = [
    (COMPLETIONS, {"prompt": "Once upon a time", **HOT}),
    (COMPLETIONS, {"prompt": "Three names:", **HOT, "n": 2, "seed": 4, "presence_penalty": 0.7, "logprobs": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "A story, please."}], **HOT, "stop": [" the"]}),
    (CHAT, {"messages": [{"role": "user", "content": "Again."}], **HOT, "temperature": 0}),
    (RESPONSES, {"input": "And another one.", "temperature": 1.2, "max_output_tokens": 150, "stream": True}),
]


class Reader:
    """A client of one stream, which keeps the events that arrived whole."""

    def __init__(self, path: str, body: dict) -> None:
        self.path = path
        self.body = body
        self.got = b""
        self.ended = False
        self.fresh = 0  # events since the last start

    def read(self, url: str) -> None:
        """Resume where it stopped, and read until the answer or the server ends."""
        self.fresh = 0
        headers = {"Last-Event-ID": id_of(blocks(self.got)[-1])} if self.got else {}
        wire = b""
        try:
            with httpx.stream("POST", url + self.path, json=self.body, headers=headers, timeout=PATIENCE) as answer:
                assert answer.status_code == 200, answer.read()
                for piece in answer.iter_raw():
                    wire += piece
                    self.fresh = wire.count(b"\n\n")
                self.ended = True
        except httpx.TransportError:
            pass
        finally:
            self.got += b"".join(blocks(wire))


def test_every_stream_goes_on_after_every_kill(tmp_path):
    draw = random.Random(7)
    readers = [Reader(path, body) for path, body in ASKED]
    with ThreadPoolExecutor(len(readers)) as pool:
        for _ in range(KILLS):
            with killed_at_the_end(tmp_path) as url:
                reading = [pool.submit(reader.read, url) for reader in readers if not reader.ended]
                wait_until(lambda: all(reader.fresh or reader.ended for reader in readers))
                time.sleep(draw.uniform(0, 0.1))
            for each in reading:
                each.result(PATIENCE)
        assert not all(reader.ended for reader in readers), "the last kill was to hit somebody"
        with killed_at_the_end(tmp_path) as url:
            for each in [pool.submit(reader.read, url) for reader in readers if not reader.ended]:
                each.result(PATIENCE)
    with killed_at_the_end(tmp_path) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        for reader in readers:
            first, *_, last = blocks(reader.got)
            in_one_go = resume(http, reader.path, reader.body, id_of(first))
            assert said(reader.path, first + in_one_go.content) == said(reader.path, reader.got)
            assert resume(http, reader.path, reader.body, id_of(last)).status_code == 204
