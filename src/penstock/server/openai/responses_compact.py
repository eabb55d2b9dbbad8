"""`POST /v1/responses/compact`: shorten a conversation that is to go on.

As at OpenAI, the answer holds the user's messages unchanged, and one `compaction` item in place of everything else. The
item contains a summary written by the served model. Its `encrypted_content` is not encrypted here: it is the summary in
base64, for the client to send back.
"""

from __future__ import annotations

import base64
import time
from dataclasses import replace

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Usage
from penstock.contract.request import ChatPrompt, EngineRequest, Message, StopRules
from penstock.sampling import SamplingParams
from penstock.server.delivery.deliveries import NOTHING_MORE
from penstock.server.openai.responses_answer import usage_of
from penstock.server.openai.responses_stored import input_items

__all__ = ["CompactionFormatter", "compacting"]

INSTRUCTION = (
    "Summarize the conversation so far, so that it can go on from the summary alone: what was asked, what was found out"
    " and decided, and what is still to be done. Answer with the summary only."
)

MOST_TOKENS = 1024
"""Most tokens of a summary."""


def compacting(request: EngineRequest) -> EngineRequest:
    """Turn `request` into a request for a summary of its conversation."""
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt), "a response answers a conversation"
    asked = replace(prompt, messages=(*prompt.messages, Message("user", INSTRUCTION)), tools=())
    return EngineRequest(
        id=request.id,
        prompt=asked,
        sampling=SamplingParams(temperature=0).spec(),
        stop=StopRules(max_tokens=MOST_TOKENS),
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
    )


class CompactionFormatter:
    """OpenAI's `response.compaction`.

    Args:
        history: the conversation to compact.
    """

    def __init__(self, response_id: str, history: tuple[Message, ...]) -> None:
        self._id = response_id
        self._stem = response_id.removeprefix("resp_")
        self._history = history

    def whole(
        self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage, more: JsonObject = NOTHING_MORE
    ) -> JsonObject:
        """The user's messages and the summary."""
        ((delta, _),) = choices
        kept = input_items([message for message in self._history if message.role == "user"], self._stem)
        summary = base64.b64encode(delta.text.encode()).decode("ascii")
        compaction = {"id": f"cmp_{self._stem}", "type": "compaction", "encrypted_content": summary}
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*kept, compaction],
            "usage": usage_of(usage),
            **more,
        }
