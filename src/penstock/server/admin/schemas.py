"""OpenAPI schemas of the operator's endpoints."""

from __future__ import annotations

from penstock.api_fields.strict_json import JsonObject
from penstock.server.http.openapi import (
    ERROR,
    INTEGER,
    NUMBER,
    PARTS_SCHEMA,
    STEP_SCHEMA,
    STRING,
    list_of,
    nullable,
    object_of,
)

__all__ = ["SCHEMAS"]

BOOLEAN: JsonObject = {"type": "boolean"}

SCHEMAS: JsonObject = {
    "Health": object_of(
        {
            "status": {"type": "string", "enum": ["ok", "dead"]},
            "reason": STRING,
            "running": INTEGER,
            "waiting": INTEGER,
            "free_blocks": INTEGER,
            "total_blocks": INTEGER,
            "steps": INTEGER,
            "model_loaded": BOOLEAN,
            "engine_ready": BOOLEAN,
            "error": ERROR,
        },
        optional=("error",),
    ),
    "Version": object_of({"version": STRING}),
    "ModelInfo": object_of(
        {
            "model_path": STRING,
            "tokenizer_path": STRING,
            "is_generation": BOOLEAN,
            "preferred_sampling_params": nullable({"type": "object"}),
            "weight_version": STRING,
            "has_image_understanding": BOOLEAN,
            "has_audio_understanding": BOOLEAN,
            "model_type": {"type": "null"},
            "architectures": {"type": "null"},
        }
    ),
    "ServerInfo": object_of(
        {
            "model_path": STRING,
            "served_model_name": STRING,
            "version": STRING,
            "is_embedding": BOOLEAN,
            "context_length": INTEGER,
            "max_total_tokens": INTEGER,
            "max_running_requests": INTEGER,
            "page_size": INTEGER,
            "tp_size": INTEGER,
            "dp_size": INTEGER,
            "pp_size": INTEGER,
            "weight_version": STRING,
        }
    ),
    "Live": object_of(
        {"status": {"type": "string", "enum": ["live", "dead"]}, "reason": STRING, "error": ERROR},
        optional=("error",),
    ),
    "Ready": object_of(
        {"status": {"type": "string", "enum": ["ready", "not ready"]}, "reason": STRING, "error": ERROR},
        optional=("error",),
    ),
    "AdapterLoaded": object_of({"loaded": STRING, "rank": INTEGER, "bytes": INTEGER}),
    "AdapterUnloaded": object_of({"unloaded": STRING}),
    "Aborted": object_of({"aborted": list_of(STRING)}),
    "Reset": object_of({"reset": BOOLEAN}),
    "Profile": object_of({"profiling": BOOLEAN, "files": list_of(STRING)}),
    "RequestLatency": object_of(
        {
            "id": STRING,
            "request_id": STRING,
            "route": STRING,
            "status": INTEGER,
            "wall_ms": NUMBER,
            "parts_ms": PARTS_SCHEMA,
            "behind": list_of(STRING),
        },
        optional=("behind",),
    ),
    "RequestSteps": object_of({"id": STRING, "cut": BOOLEAN, "steps": list_of(STEP_SCHEMA)}),
    "Stats": object_of(
        {"total_tasks": INTEGER, "total_tokens": INTEGER, "active_tasks": INTEGER, "waiting_queue": INTEGER}
    ),
}
