"""Which request fields are honoured, and which are refused and why. The source of docs/api-fields.md.

Derived from the tables that requests are checked against, so it cannot contradict them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.api_fields.fields import Field, Neutrals
from penstock.server.admin.abort import ABORT_FIELDS
from penstock.server.admin.adapters import LOAD_FIELDS, NEUTRAL_LOAD, NEUTRAL_UNLOAD, UNLOAD_FIELDS
from penstock.server.anthropic.messages_request import COUNT_FIELDS, MESSAGES_FIELDS, NEUTRAL_COUNT, NEUTRAL_MESSAGES
from penstock.server.openai.chat import CHAT_FIELDS, NEUTRAL_CHAT
from penstock.server.openai.chat_store import STORED_CHAT_FIELDS
from penstock.server.openai.completions import COMPLETION_FIELDS, NEUTRAL_COMPLETION
from penstock.server.openai.embeddings import EMBEDDING_FIELDS, NEUTRAL_EMBEDDINGS
from penstock.server.openai.generate import GENERATE_FIELDS, NEUTRAL_GENERATE
from penstock.server.openai.responses_request import (
    COMPACT_FIELDS,
    COUNT_INPUT_FIELDS,
    NEUTRAL_COMPACT,
    NEUTRAL_COUNT_INPUT,
    NEUTRAL_RESPONSES,
    RESPONSES_FIELDS,
)
from penstock.server.openai.scoring import NEUTRAL_SCORING, RERANK_FIELDS, SCORE_FIELDS
from penstock.server.tokens.apply_template import NEUTRAL_TEMPLATE, TEMPLATE_FIELDS
from penstock.server.tokens.detokenize import DETOKENIZE_FIELDS
from penstock.server.tokens.tokenize import NEUTRAL_TOKENIZE, TOKENIZE_FIELDS

__all__ = ["ENDPOINTS", "FieldSupport", "field_support", "table"]

ENDPOINTS: dict[str, tuple[Sequence[Field], Neutrals]] = {
    "/v1/chat/completions": (CHAT_FIELDS, NEUTRAL_CHAT),
    "/v1/completions": (COMPLETION_FIELDS, NEUTRAL_COMPLETION),
    "/v1/embeddings": (EMBEDDING_FIELDS, NEUTRAL_EMBEDDINGS),
    "/v1/score": (SCORE_FIELDS, NEUTRAL_SCORING),
    "/v1/rerank": (RERANK_FIELDS, NEUTRAL_SCORING),
    "/v1/chat/completions/{completion_id}": (STORED_CHAT_FIELDS, {}),
    "/v1/responses": (RESPONSES_FIELDS, NEUTRAL_RESPONSES),
    "/v1/responses/input_tokens": (COUNT_INPUT_FIELDS, NEUTRAL_COUNT_INPUT),
    "/v1/responses/compact": (COMPACT_FIELDS, NEUTRAL_COMPACT),
    "/v1/messages": (MESSAGES_FIELDS, NEUTRAL_MESSAGES),
    "/v1/messages/count_tokens": (COUNT_FIELDS, NEUTRAL_COUNT),
    "/generate": (GENERATE_FIELDS, NEUTRAL_GENERATE),
    "/tokenize": (TOKENIZE_FIELDS, NEUTRAL_TOKENIZE),
    "/detokenize": (DETOKENIZE_FIELDS, {}),
    "/apply-template": (TEMPLATE_FIELDS, NEUTRAL_TEMPLATE),
    "/abort_requests": (ABORT_FIELDS, {}),
    "/v1/load_lora_adapter": (LOAD_FIELDS, NEUTRAL_LOAD),
    "/v1/unload_lora_adapter": (UNLOAD_FIELDS, NEUTRAL_UNLOAD),
}

_TEXT_ONLY = "The models served here read and write text only."
_NO_TOOLS = "This server calls no tools of its own."
_HOSTED = "Belongs to the other vendor's hosted service: accounts, regions, tiers, moderation."
_USER_TEMPLATE = "Templates are programs: only the model's own is run."
_LIBRARY_BEAMS = "Beam search is in the Python API: LLM.beam_search and AsyncLLM.beam_search."
_AUTOMATIC_CACHE = "The prefix cache is automatic; cache_salt says what may be shared."

REASONS = {
    "access_programs": _HOSTED,
    "audio": _TEXT_ONLY,
    "best_of": "Only /v1/completions generates more than n choices and picks the best.",
    "chat_template": _USER_TEMPLATE,
    "container": _HOSTED,
    "context_management": "Conversations are never shortened here; one that is too long is refused.",
    "conversation": "Continue a conversation with previous_response_id.",
    "diagnostics": _HOSTED,
    "embed_dtype": "Vectors are float32.",
    "endianness": "Vectors in base64 are little-endian, on every machine.",
    "documents": "Put documents into the messages.",
    "early_stopping": _LIBRARY_BEAMS,
    "image": _TEXT_ONLY,
    "load_inplace": "Unload the adapter first; that waits until its requests have ended.",
    "lora_int_id": "Adapters have names, not numbers.",
    "inference_geo": _HOSTED,
    "length_penalty": _LIBRARY_BEAMS,
    "max_tool_calls": _NO_TOOLS,
    "mcp_servers": _NO_TOOLS,
    "media_io_kwargs": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "moderation": _HOSTED,
    "prediction": "Speculation from a given text is not implemented yet.",
    "prompt": "Stored prompts belong to the other vendor's hosted service.",
    "prompt_cache_options": _AUTOMATIC_CACHE,
    "prompt_cache_retention": _AUTOMATIC_CACHE,
    "prompt_embeds": "Tensors from callers are not accepted.",
    "request_id": "Send the x-request-id header; the answer repeats it.",
    "service_tier": _HOSTED,
    "speed": _HOSTED,
    "instruction": "There is no reranking model here that was trained to follow an instruction.",
    "activation": "A score is a plain cosine.",
    "softmax": "A score is a plain cosine.",
    "use_activation": "A score is a plain cosine.",
    "max_tokens_per_doc": "Use truncate_prompt_tokens, which cuts every text.",
    "suffix": "The models served here continue text; they do not fill in gaps.",
    "truncation": "Nothing is shortened silently: a conversation that is too long is refused.",
    "truncate_prompt_tokens": "Nothing is shortened silently: a prompt that is too long is refused.",
    "truncation_side": "Where truncate_prompt_tokens is honoured, it cuts off the end.",
    "use_beam_search": _LIBRARY_BEAMS,
    "user_profile_id": _HOSTED,
    "web_search_options": _NO_TOOLS,
    "workspace_id": _HOSTED,
}
NOT_YET = "Not implemented."


@dataclass(frozen=True, slots=True)
class FieldSupport:
    """Whether one field is supported.

    Attributes:
        honoured: whether it does what it says.
        hint: whether it is accepted without effect.
        accepted: if it is refused, the values beside null that are accepted anyway, because they ask for nothing.
        why: what it does, or why it is refused.
    """

    field: str
    honoured: bool
    hint: bool
    accepted: tuple[object, ...]
    why: str


def field_support(endpoint: str) -> Iterator[FieldSupport]:
    """Every field of an endpoint: first the honoured ones and hints, then the refused ones, each sorted by name."""
    fields, neutrals = ENDPOINTS[endpoint]
    for field in sorted(fields, key=lambda each: each.name):
        yield FieldSupport(field.name, not field.hint, field.hint, (), field.doc)
    for name in sorted(neutrals.keys() - {field.name for field in fields}):
        yield FieldSupport(name, False, False, neutrals[name], REASONS.get(name, NOT_YET))


def table() -> str:
    """The text of docs/api-fields.md."""
    parts = [INTRODUCTION]
    for endpoint in ENDPOINTS:
        rows = list(field_support(endpoint))
        honoured = sum(row.honoured for row in rows)
        hints = sum(row.hint for row in rows)
        counts = f"{honoured} honoured, {hints} hints, {len(rows) - honoured - hints} refused, 0 ignored."
        parts.append(f"\n## {endpoint}\n\n{counts}\n\n")
        parts.append("| field | support | what it does, or why not |\n|---|---|---|\n")
        parts += [f"| `{row.field}` | {_support(row)} | {_cell(row.why)} |\n" for row in rows]
    return "".join(parts)


def _support(row: FieldSupport) -> str:
    if row.honoured:
        return "honoured"
    if row.hint:
        return "a hint"
    if not row.accepted:
        return "refused"
    return "refused, but for " + ", ".join(f"`{_cell(json.dumps(value))}`" for value in row.accepted)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


INTRODUCTION = """\
# Request fields

Written by `docs/write_api_fields.py` from the tables that requests are checked against. One test checks that this page
agrees with the tables; another compares the tables with the request types of the official `openai` and `anthropic`
clients.

No field is silently ignored. Each is one of three kinds:

- **honoured**: it does what it says;
- **refused**: the answer is status 400, with an error that names the field;
- **a hint**: clients send it anyway, and it asks for nothing that an answer could lack. It is checked, and changes
  nothing.

A refused field is accepted if its value asks for nothing: `null` always does, and the tables list other such values. A
field that is in no table is refused as unknown. With `penstock serve --compat`, a field that would be refused as
unknown or unsupported is left out instead, and the answer's `x-ignored-params` header lists it.
"""
