"""OpenAPI schemas of the answers of OpenAI's endpoints, and of /generate."""

from __future__ import annotations

from penstock.api_fields.prompt_logprobs import PROMPT_LOGPROBS_SCHEMA
from penstock.api_fields.strict_json import JsonObject
from penstock.sampling import PARAMETERS
from penstock.server.http.openapi import (
    INTEGER,
    NUMBER,
    OPTIONAL_STRING,
    PARTS_SCHEMA,
    STRING,
    list_of,
    nullable,
    object_of,
    reference,
)

__all__ = ["SCHEMAS"]

FINISH: JsonObject = {"type": "string", "enum": ["stop", "length", "repetition", "tool_calls", "abort"]}
STOP_REASON: JsonObject = {"type": ["string", "integer", "null"]}


_TOKEN_LOGPROB: JsonObject = {"token": STRING, "logprob": {"type": "number"}, "bytes": list_of(INTEGER)}
_CHAT_LOGPROB = object_of(_TOKEN_LOGPROB | {"top_logprobs": list_of(object_of(_TOKEN_LOGPROB))})
_TOOL_CALL = object_of(
    {
        "id": STRING,
        "type": {"type": "string", "const": "function"},
        "function": object_of({"name": STRING, "arguments": STRING}),
    }
)
_CHAT_MESSAGE = object_of(
    {
        "role": STRING,
        "content": OPTIONAL_STRING,
        "refusal": {"type": "null"},
        "reasoning_content": STRING,
        "tool_calls": list_of(_TOOL_CALL),
    },
    optional=("reasoning_content", "tool_calls"),
)
_CHAT_CHOICE = object_of(
    {
        "index": INTEGER,
        "message": _CHAT_MESSAGE,
        "logprobs": nullable(object_of({"content": list_of(_CHAT_LOGPROB), "refusal": {"type": "null"}})),
        "finish_reason": FINISH,
        "stop_reason": STOP_REASON,
    }
)
_TOP_OBJECT: JsonObject = {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
_COMPLETION_LOGPROBS = object_of(
    {
        "text_offset": list_of(INTEGER),
        "token_logprobs": list_of({"type": ["number", "null"]}),
        "tokens": list_of(STRING),
        "top_logprobs": nullable(list_of(_TOP_OBJECT)),
    }
)
_COMPLETION_CHOICE = object_of(
    {
        "index": INTEGER,
        "text": STRING,
        "logprobs": nullable(_COMPLETION_LOGPROBS),
        "finish_reason": FINISH,
        "stop_reason": STOP_REASON,
        "prompt_logprobs": PROMPT_LOGPROBS_SCHEMA,
    },
    optional=("prompt_logprobs",),
)


def _answer(kind: str, choice: JsonObject, usage: str = "Usage", **optional: JsonObject) -> JsonObject:
    return object_of(
        {
            "id": STRING,
            "object": {"type": "string", "const": kind},
            "created": INTEGER,
            "model": STRING,
            "system_fingerprint": {"type": "null"},
            "choices": list_of(choice),
            "usage": reference(usage),
            "timings": reference("Timings"),
            "certificate": nullable(STRING),
            **optional,
        },
        optional=("timings", "certificate", *optional),
    )


_FROM_MODEL = {each.name: dict(each.kind.schema()) for each in PARAMETERS if each.from_model}

_ANTHROPIC_MODEL = object_of(
    {"type": {"type": "string", "const": "model"}, "id": STRING, "display_name": STRING, "created_at": STRING}
)
SCHEMAS: JsonObject = {
    "Usage": object_of(
        {
            "prompt_tokens": INTEGER,
            "completion_tokens": INTEGER,
            "total_tokens": INTEGER,
            "prompt_tokens_details": object_of({"cached_tokens": INTEGER}),
        }
    ),
    "ChatUsage": object_of(
        {
            "prompt_tokens": INTEGER,
            "completion_tokens": INTEGER,
            "total_tokens": INTEGER,
            "prompt_tokens_details": object_of({"cached_tokens": INTEGER}),
            "completion_tokens_details": object_of({"reasoning_tokens": INTEGER}),
        }
    ),
    "ChatCompletion": _answer("chat.completion", _CHAT_CHOICE, "ChatUsage", prompt_logprobs=PROMPT_LOGPROBS_SCHEMA),
    "Completion": _answer("text_completion", _COMPLETION_CHOICE),
    "Embeddings": object_of(
        {
            "id": STRING,
            "object": {"type": "string", "const": "list"},
            "created": INTEGER,
            "model": STRING,
            "data": list_of(
                object_of(
                    {
                        "object": {"type": "string", "const": "embedding"},
                        "index": INTEGER,
                        "embedding": {"anyOf": [list_of(NUMBER), STRING]},
                    }
                )
            ),
            "usage": object_of({"prompt_tokens": INTEGER, "total_tokens": INTEGER}),
        }
    ),
    "Generated": object_of(
        {
            "text": STRING,
            "finish_reason": FINISH,
            "usage": reference("Usage"),
            "timings": reference("Timings"),
            "certificate": nullable(STRING),
            "prompt_logprobs": PROMPT_LOGPROBS_SCHEMA,
        },
        optional=("timings", "certificate", "prompt_logprobs"),
    ),
    "Timings": object_of(
        {
            "queue_ms": NUMBER,
            "cache_n": INTEGER,
            "prompt_n": INTEGER,
            "prompt_ms": NUMBER,
            "prompt_per_second": nullable(NUMBER),
            "predicted_n": INTEGER,
            "predicted_ms": NUMBER,
            "predicted_per_token_ms": nullable(NUMBER),
            "predicted_per_second": nullable(NUMBER),
            "draft_n": INTEGER,
            "draft_n_accepted": INTEGER,
            "total_ms": NUMBER,
            "parts_ms": nullable(PARTS_SCHEMA),
        }
    ),
    "Model": object_of(
        {
            "id": STRING,
            "object": {"type": "string", "const": "model"},
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "parent": {"type": "null"},
            "max_model_len": INTEGER,
            "default_sampling_params": object_of(_FROM_MODEL, optional=tuple(_FROM_MODEL)),
        }
    ),
    "AnthropicModel": _ANTHROPIC_MODEL,
    "AnthropicModelList": object_of(
        {
            "data": list_of(reference("AnthropicModel")),
            "has_more": {"type": "boolean"},
            "first_id": OPTIONAL_STRING,
            "last_id": OPTIONAL_STRING,
        }
    ),
    "ModelList": object_of({"object": {"type": "string", "const": "list"}, "data": list_of(reference("Model"))}),
    "Response": {
        "type": "object",
        "properties": {
            "id": STRING,
            "object": {"type": "string", "const": "response"},
            "created_at": INTEGER,
            "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete", "cancelled", "failed"]},
            "model": STRING,
            "output": list_of({"type": "object"}),
            "usage": nullable({"type": "object"}),
            "certificate": nullable(STRING),
        },
        "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    },
    "StoredCompletion": {"type": "object", "properties": {"id": STRING, "metadata": {"type": "object"}}},
    "Page": object_of(
        {
            "object": {"type": "string", "const": "list"},
            "data": list_of({"type": "object"}),
            "first_id": OPTIONAL_STRING,
            "last_id": OPTIONAL_STRING,
            "has_more": {"type": "boolean"},
        }
    ),
    "Scores": object_of(
        {
            "id": STRING,
            "object": {"type": "string", "const": "list"},
            "created": INTEGER,
            "model": STRING,
            "data": list_of(
                object_of({"index": INTEGER, "object": {"type": "string", "const": "score"}, "score": NUMBER})
            ),
            "usage": object_of({"prompt_tokens": INTEGER, "total_tokens": INTEGER}),
        }
    ),
    "Ranking": object_of(
        {
            "id": STRING,
            "model": STRING,
            "results": list_of(
                object_of(
                    {"index": INTEGER, "relevance_score": NUMBER, "document": object_of({"text": STRING})},
                    optional=("document",),
                )
            ),
            "usage": object_of({"prompt_tokens": INTEGER, "total_tokens": INTEGER}),
        }
    ),
    "InputTokens": object_of({"object": {"type": "string", "const": "response.input_tokens"}, "input_tokens": INTEGER}),
    "Compaction": object_of(
        {
            "id": STRING,
            "object": {"type": "string", "const": "response.compaction"},
            "created_at": INTEGER,
            "output": list_of({"type": "object"}),
            "usage": {"type": "object"},
        }
    ),
    "Deleted": object_of({"id": STRING, "object": STRING, "deleted": {"type": "boolean"}}),
}
