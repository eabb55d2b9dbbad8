"""`GET /model_info` and `GET /server_info` as SGLang answers them, for gateways that ask a new worker what it serves.

Model and tokenizer are called by the name that clients use, never by a path on this machine. Fields for which Penstock
has no value are null.
"""

from __future__ import annotations

from fastapi import Response

from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route
from penstock.version import __version__

__all__ = ["routes"]

WEIGHT_VERSION = "default"
"""SGLang's word for weights that have not been replaced since the start."""


def routes(serving: Serving) -> tuple[Route, ...]:
    """Both endpoints, each also under its older name, which begins with `get_`."""
    card = serving.card

    async def model_info() -> Response:
        """The served model, as SGLang describes its own."""
        body = {
            "model_path": card.name,
            "tokenizer_path": card.name,
            "is_generation": card.generates,
            "preferred_sampling_params": dict(card.sampling_defaults) or None,
            "weight_version": WEIGHT_VERSION,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": None,
            "architectures": None,
        }
        return json_response(200, body)

    async def server_info() -> Response:
        """How much the server can hold and run, under SGLang's names."""
        measured = serving.client.measurements()
        body = {
            "model_path": card.name,
            "served_model_name": card.name,
            "version": __version__,
            "is_embedding": not card.generates,
            "context_length": card.max_model_len,
            "max_total_tokens": measured.total_blocks * measured.block_size,
            "max_running_requests": serving.client.health().slots,
            "page_size": measured.block_size,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "weight_version": WEIGHT_VERSION,
        }
        return json_response(200, body)

    return (
        Route("GET", "/model_info", model_info, answers("ModelInfo", 401, 403)),
        Route("GET", "/get_model_info", model_info, documented=False),
        Route("GET", "/server_info", server_info, answers("ServerInfo", 401, 403)),
        Route("GET", "/get_server_info", server_info, documented=False),
    )
