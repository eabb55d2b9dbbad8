"""What the operator chose for a server, and for one of several models: frozen values, beside an `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.errors import ConfigError
from penstock.contract.limits import DEFAULT_SERVER_LIMITS
from penstock.contract.options import check_numbers, option

__all__ = ["HostingConfig", "ServerConfig"]

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the operator chose for the HTTP side."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 picks a free port and prints it.")
    probe_host: str = option("127.0.0.1", "Address of --probe-port; 0.0.0.0 for probes from other machines.")
    probe_port: int = option(
        0,
        "Separate port for /health, /health/live, /health/ready, /metrics and the list /v1/models, which need no key"
        " there; 0 for none.",
    )
    api_key_file: str = option(
        "",
        "File of API keys, one per line: `admin KEY` may use the admin routes, `gateway KEY` is for a router that"
        " keeps its callers apart by cache_salt, `KEY concurrent=8` may have eight requests at once. PENSTOCK_API_KEY,"
        " PENSTOCK_ADMIN_KEY and PENSTOCK_GATEWAY_KEY in the environment add one key each. Without any key, only this"
        " machine is served.",
    )
    allowed_hosts: str = option(
        "", "Comma-separated names that the Host header may hold besides this machine's own; * for any."
    )
    cors_origins: str = option(
        "", "Comma-separated origins of web pages that may call this server; none by default, * for any."
    )
    compat: bool = option(
        False,
        "Ignore unknown and unsupported fields instead of refusing them, and list them in the answer's"
        " x-ignored-params header.",
    )
    normalize_prompts: bool = option(
        False,
        "Drop or move lines at the front of a system prompt that change from request to request (a billing header,"
        " today's date, a request's id), so that prompts that are otherwise alike share a prefix; the answer's"
        " x-normalized header says what was done.",
    )
    request_timeout: float = option(
        DEFAULT_SERVER_LIMITS.request_seconds, "Seconds after which a request ends with an error; 0 for never."
    )
    drain_timeout: int = option(
        DEFAULT_SERVER_LIMITS.drain_seconds, "Seconds that running answers may continue after SIGTERM or SIGINT."
    )
    max_connections: int = option(
        DEFAULT_SERVER_LIMITS.max_connections, "Most connections at once; more are answered 429."
    )
    log_format: str = option("text", "Format of log lines on standard error.", LOG_FORMATS)
    log_requests: bool = option(
        False, "Log one line per request: id, route, status, tokens and timings, never text of a prompt or an answer."
    )
    journal: str = option(
        "",
        "Folder for a journal, made if it is not there. However this server ends, the next one can then resume"
        " streams, finish background responses and find stored answers. The journal holds the text of an answer and"
        " its request only if the caller asks to store it, as /v1/responses does unless store is false, and only until"
        " it is deleted or newer ones take its place.",
    )
    answer_cache: int = option(
        0,
        "Most bytes of whole answers to keep in memory and send again, without computing, to requests that would get"
        " the same answer bit for bit: greedy requests, and requests with a seed. Each API key finds only its own"
        " answers. 0 keeps none.",
    )
    profile_dir: str = option(
        "",
        "Folder for profiles, made if it is not there: an admin starts a profile with POST /start_profile and ends it"
        " with POST /stop_profile. Without a folder both routes are refused.",
    )
    otlp_traces_endpoint: str = option(
        "", "Send an OpenTelemetry span per request to this OTLP/HTTP URL; needs the extra penstock[otel]."
    )

    def __post_init__(self) -> None:
        if self.log_format not in LOG_FORMATS:
            raise ConfigError("log_format", f"must be one of {', '.join(LOG_FORMATS)}, got {self.log_format!r}")
        check_numbers(self)
        for name in ("port", "probe_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(name, f"must lie in 0..65535, got {getattr(self, name)}")
        if self.probe_port and (self.probe_host, self.probe_port) == (self.host, self.port):
            raise ConfigError("probe_port", f"must be another one than --port, got {self.probe_port}")
        for name in ("request_timeout", "drain_timeout"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, f"must be a number of seconds from 0 up, got {getattr(self, name)}")
        if self.answer_cache < 0:
            raise ConfigError("answer_cache", f"must not be negative, got {self.answer_cache}")
        if self.max_connections < 1:
            raise ConfigError("max_connections", f"must be at least 1, got {self.max_connections}")


@dataclass(frozen=True, slots=True)
class HostingConfig:
    """What the operator chose for a server of several models."""

    models_file: str = option(
        "",
        "YAML file of models to serve behind one port: a list `models` of entries with `model` and, optionally, `pin:"
        " true`, `unload-after: SECONDS` and any engine option.",
    )
    max_loaded_models: int = option(
        0, "Most models loaded at once; the least recently used one makes room for another. 0 for all."
    )
    models_memory: int = option(
        0, "Most bytes of all loaded models, weights and KV caches together; 0 for what the machine has."
    )
    pin: tuple[str, ...] = option(
        (), "Load this model at the start, and never unload it to make room for others. May be given several times."
    )
    unload_after: float = option(0.0, "Unload a model after this many seconds without a request; 0 for never.")
    model_wait: float = option(
        120.0,
        "Seconds that a request waits for its model to load; it is then refused and told to try again. 0 for no limit.",
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        for name in ("max_loaded_models", "models_memory", "unload_after", "model_wait"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, f"must be a number from 0 up, got {getattr(self, name)}")
