"""Embeddings through the official OpenAI client, which asks for base64 unless told otherwise."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator

import openai
import pytest
from conformance_harness import MODEL

pytestmark = pytest.mark.model

TEXTS = ["The cat sat on the mat.", "A kitten is sitting on a rug.", "Interest rates rose by a quarter point. 📈"]


@pytest.fixture(scope="module")
def client(default_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=default_server.url + "/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


def test_a_list_of_texts_gets_a_list_of_unit_vectors_in_order(client):
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    assert (answer.object, answer.model) == ("list", MODEL)
    assert [(entry.object, entry.index) for entry in answer.data] == [("embedding", index) for index in range(3)]
    assert len({len(entry.embedding) for entry in answer.data}) == 1
    for entry in answer.data:
        assert math.sqrt(sum(value * value for value in entry.embedding)) == pytest.approx(1.0, abs=1e-3)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_base64_and_numbers_say_the_same(client):
    default = client.embeddings.create(model=MODEL, input=TEXTS[0]).data[0].embedding
    numbers = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float").data[0].embedding
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=TEXTS[0], encoding_format="base64")
    written = raw.http_response.json()["data"][0]["embedding"]
    packed = base64.b64decode(written, validate=True)
    assert list(struct.unpack(f"<{len(packed) // 4}f", packed)) == pytest.approx(default, abs=1e-6)
    assert numbers == pytest.approx(default, abs=1e-6)


def test_neighbours_do_not_change_a_vector(client):
    together = [entry.embedding for entry in client.embeddings.create(model=MODEL, input=TEXTS).data]
    alone = [client.embeddings.create(model=MODEL, input=text).data[0].embedding for text in TEXTS]
    assert together == alone  # bit for bit


def test_the_four_spellings_of_input(client, default_server):
    import httpx

    ids = httpx.post(default_server.url + "/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    of_text = client.embeddings.create(model=MODEL, input=TEXTS[0]).data[0].embedding
    assert client.embeddings.create(model=MODEL, input=ids).data[0].embedding == of_text
    assert client.embeddings.create(model=MODEL, input=[ids, ids[:2]]).data[0].embedding == of_text
    assert client.embeddings.create(model=MODEL, input=ids).usage.prompt_tokens == len(ids)


def test_fewer_dimensions_are_the_first_ones_scaled_to_length_one(client):
    full = client.embeddings.create(model=MODEL, input=TEXTS[0]).data[0].embedding
    short = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=32).data[0].embedding
    length = math.sqrt(sum(value * value for value in full[:32]))
    assert short == pytest.approx([value / length for value in full[:32]], abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1_000_000}, "dimensions"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
        ({"input": [28] * 9000}, "input"),
    ],
)
def test_a_mistake_is_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(**{"model": MODEL, "input": "Hi", **fields})
    assert caught.value.param == param


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="Hi")


async def test_the_async_client_gets_the_same(client, default_server):
    async with openai.AsyncOpenAI(base_url=default_server.url + "/v1", api_key="none", timeout=240) as clients:
        answer = await clients.embeddings.create(model=MODEL, input=TEXTS[0])
    assert answer.data[0].embedding == client.embeddings.create(model=MODEL, input=TEXTS[0]).data[0].embedding
