"""What the operator chose: frozen values, built at the edge by `app` from the command line or a library call.

Nothing below `cli` reads the environment. Each field's help text lives beside it; the command line is derived from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

from penstock.contract.adapter import adapter_option
from penstock.contract.errors import ConfigError
from penstock.contract.limits import DEFAULT_SERVER_LIMITS
from penstock.contract.memory_budget import LEAST_BYTES
from penstock.contract.scheduler_config import POLICIES

__all__ = [
    "ANY_NAME",
    "BYTE_FIELDS",
    "DEFAULT_MODEL",
    "QUANTIZATIONS",
    "EngineConfig",
    "Front",
    "HostingConfig",
    "ServerConfig",
    "option_help",
    "options_behind",
    "read_bytes",
]

DEFAULT_MODEL = "smollm2-135m-instruct"

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "file", "int8", "int4")
LINEAR_KERNELS = ("auto", "native", "onednn")
KV_CACHE_DTYPES = ("auto", "int8")
DEVICES = ("auto", "cpu", "cuda")
RUNNERS = ("auto", "in-process", "process")
TOOL_CALL_PARSERS = (
    *("auto", "hermes", "llama3_json", "mistral", "granite", "phi4", "gemma", "deepseek_v3", "deepseek_v31", "json"),
    *("harmony", "qwen3_xml", "gemma4", "none"),
)
REASONING_PARSERS = ("auto", "think", "none")
LOG_FORMATS = ("text", "json")
KV_EVENTS_FORMATS = ("maps", "arrays")

ANY_NAME = "*"
"""The served model name that stands for every name."""

BYTE_FIELDS = frozenset({"kv_cache_memory", "kv_store_bytes", "memory_limit", "models_memory"})
"""Fields that operators may give as text, for `read_bytes`."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NUMBERS = {bool: "true or false", int: "an integer", float: "a number"}
_SOCKET_ADDRESS = re.compile(r"tcp://(?:\*|[\w.-]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})|ipc://\S+", re.ASCII)


class Front(IntEnum):
    """What stands between callers and the engine; each has what those before it have.

    An option that only some front reads is offered nowhere else: it would do nothing.
    """

    NONE = 0
    """Callers step the engine themselves: `LLM`, `penstock generate`, `penstock chat`."""
    QUEUE = 1
    """They wait for an engine in a thread of its own: `AsyncLLM`."""
    HTTP = 2
    """They ask for a model by its name, and may give a priority: `penstock serve`, `penstock run-batch`."""


def _option(default: Any, help_text: str, choices: tuple[str, ...] = (), front: Front = Front.NONE) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices, "front": front})


def option_help(config: type, name: str) -> str:
    """The help text of one field of a configuration class."""
    text: str = config.__dataclass_fields__[name].metadata["help"]  # type: ignore[attr-defined]
    return text


def read_bytes(text: str) -> int:
    """A number of bytes, plain or with a unit: 500MB, 8GiB.

    Raises:
        ValueError: the text is none; the message says so.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a number of bytes such as 500MB, 8GiB or 1048576")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _check_numbers(config: EngineConfig | ServerConfig | HostingConfig) -> None:
    """Make sure that every flag and number of a configuration is of its field's type; an integer may stand for a float.

    Raises:
        ConfigError: naming the first that is not.
    """
    for each in fields(config):
        value, wanted = getattr(config, each.name), type(each.default)
        if wanted not in _NUMBERS:
            continue
        kinds = (int, float) if wanted is float else (wanted,)
        if not isinstance(value, kinds) or isinstance(value, bool) != (wanted is bool):
            raise ConfigError(each.name, f"must be {_NUMBERS[wanted]}, got {value!r}")


def _check_socket_address(name: str, address: str) -> None:
    """Make sure that an option is an address to listen on.

    Raises:
        ConfigError: naming it.
    """
    match = _SOCKET_ADDRESS.fullmatch(address)
    if match is None or int(match["port"] or 0) > 65535:
        forms = "tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///path/of/a/socket"
        raise ConfigError(name, f"must be an address such as {forms}, got {address!r}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the operator chose for the engine; everything else is read from the model."""

    model: str = _option(
        DEFAULT_MODEL,
        "A name that `penstock models` lists, a directory in Hugging Face layout, a .gguf file, or org/name on the"
        " Hugging Face hub.",
    )
    served_model_name: tuple[str, ...] = _option(
        (),
        "A name that clients ask for; by default the model's own. May be given several times; * serves whatever name is"
        " asked for.",
        front=Front.HTTP,
    )
    dtype: str = _option(
        "auto",
        "Type of weights and activations; auto takes bfloat16 on a CPU with compiled kernels, elsewhere the"
        " checkpoint's where this device is good at it.",
        DTYPES,
    )
    quantization: str = _option(
        "auto",
        "How the weights are kept: none in --dtype, file as the file's own quantised blocks, int8 and int4 quantised on"
        " load; auto takes file where the file is quantised, else none. All but none multiply with int8 activations:"
        " less memory and more speed for some accuracy.",
        QUANTIZATIONS,
    )
    linear_kernels: str = _option(
        "auto",
        "Whose kernels multiply bfloat16 weights: native, our compiled ones, or onednn, the library inside torch; auto"
        " takes onednn on a processor with AMX for models of a billion weights and more. Quantised weights are always"
        " native.",
        LINEAR_KERNELS,
    )
    device: str = _option("auto", "Where the model runs; auto takes a CUDA device if there is one.", DEVICES)
    threads: int = _option(0, "Compute threads on the CPU; 0 takes one per physical core.")
    max_model_len: int = _option(
        0,
        "Most tokens of one request, prompt and output together; 0: the model's context, or what fits the KV cache.",
    )
    kv_cache_memory: int = _option(
        0, "Bytes for the KV cache (8GiB, 500MB and plain bytes are understood); 0 takes a quarter of the free memory."
    )
    kv_cache_dtype: str = _option(
        "auto",
        "How keys and values are kept: auto in the type of the activations; int8 in about half the memory of bfloat16,"
        " rounded per token and head, for some accuracy.",
        KV_CACHE_DTYPES,
    )
    block_size: int = _option(16, "Tokens in one KV block.")
    state_checkpoint_interval: int = _option(
        512,
        "Tokens between the checkpoints of a long prompt, for models that carry recurrent state: how much is read again"
        " when a conversation is edited in the middle. 0: only at ends of prompts and answers, and at branches.",
    )
    max_num_seqs: int = _option(64, "Sequences that run at once.")
    max_num_batched_tokens: int = _option(
        256, "Most tokens computed in one step: the chunk size of long prompts while no answer streams."
    )
    step_target_ms: int = _option(
        100,
        "Milliseconds that a step may take while answers stream: prompts are read in chunks that keep to it; 0: in as"
        " large ones as while none does.",
        front=Front.QUEUE,
    )
    scheduling_policy: str = _option(
        "auto",
        "Order of admission: fcfs, first come first served; by priority; or fair, where API keys get shares of what is"
        " computed (of one unless the key file says, behind the key, share=2). auto takes fair where there are keys.",
        ("auto", *POLICIES),
        Front.HTTP,
    )
    prefix_caching: bool = _option(True, "Reuse the KV of prompts that begin alike.")
    speculate: bool = _option(
        True,
        "Guess what comes next from what an answer repeats and what its form leaves, and compute several tokens in a"
        " step where that saves time. No answer is any different.",
    )
    draft_model: str = _option(
        "",
        "A small model of the same vocabulary, or an EAGLE-3 head for this model, that guesses beside what repeats, as"
        " often as that saves time; named as MODEL is. No answer is any different. Not for a model with a window in"
        " every layer.",
    )
    lora: tuple[str, ...] = _option(
        (),
        "A LoRA adapter to load at the start, as NAME=DIRECTORY in PEFT's layout or NAME=FILE.gguf; requests choose it"
        " by its name. May be given several times.",
    )
    lora_dir: str = _option(
        "",
        "Folder of adapters that an admin may load and unload while the server runs, with POST /v1/load_lora_adapter"
        " and /v1/unload_lora_adapter; nothing outside it can be named. Without it both are refused.",
        front=Front.HTTP,
    )
    max_loras: int = _option(8, "Adapters that may be loaded at once.")
    max_lora_rank: int = _option(64, "The largest rank that an adapter may have; memory is planned for it.")
    kv_store: str = _option(
        "",
        "Where KV blocks are kept in files, for prompts that begin alike after a restart, and in other processes: a"
        " folder, which is made if it is not there; auto for one in the cache directory; off for none. By default auto"
        " for penstock serve, and off for all else. They tell what prompts and answers said, and are readable by you"
        " alone. Not for models whose every layer has a window.",
    )
    kv_store_bytes: int = _option(
        0,
        "Most bytes of the disk that --kv-store may take, all models together (10GiB is understood); what was not used"
        " for longest makes place. 0 takes a tenth of what is free, and 16GiB at most.",
    )
    max_queued_requests: int = _option(
        DEFAULT_SERVER_LIMITS.max_queued_requests,
        "Sequences that may wait; more are answered 429.",
        front=Front.QUEUE,
    )
    max_queued_tokens: int = _option(
        DEFAULT_SERVER_LIMITS.max_queued_tokens,
        "Prompt tokens that may wait, all requests together; then 429.",
        front=Front.QUEUE,
    )
    max_queue_seconds: int = _option(
        0,
        "Seconds that a request may wait before its prompt is read, as far as that can be told when it comes; then 429,"
        " with the time after which to try again. 0: any.",
        front=Front.QUEUE,
    )
    memory_limit: int = _option(
        0,
        "Most bytes that the server keeps for its clients: requests that are read and answered, output that waits for"
        " readers, stored answers, compiled grammars. 0 takes 512MiB. The model's weights and its KV cache"
        " (--kv-cache-memory) are not in it.",
        front=Front.HTTP,
    )
    tool_call_parser: str = _option(
        "auto",
        "How the model writes tool calls; auto reads it from its chat template, none refuses tools.",
        TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = _option(
        "auto",
        "How the model writes its reasoning: think between <think> tags; auto reads it from its chat template, none"
        " leaves it in the text.",
        REASONING_PARSERS,
    )
    tokenizer: str = _option(
        "",
        "Where tokenizer and chat template come from instead of the model's own files: a directory with a"
        " tokenizer.json, or org/name on the Hugging Face hub.",
    )
    chat_template: str = _option(
        "auto",
        "How conversations are written for the model: auto takes its own chat template, and plain text where it has"
        " none; none refuses conversations where it has none; else a file with a Jinja template.",
    )
    generation_config: str = _option(
        "auto",
        "Where sampling defaults come from, for requests that do not give their own: auto takes the model's"
        " generation_config.json, or what the catalogue says of it; none takes none; else a directory or file.",
    )
    runner: str = _option(
        "auto",
        "Where steps are computed: in-process, in the one that asks; or in a process of its own, which is started"
        " anew if it is killed, crashes or hangs, and whose requests then go on where they were. auto takes in-process,"
        " but for penstock serve.",
        RUNNERS,
        Front.QUEUE,
    )
    standby: bool = _option(
        True,
        "Fork the process that computes from one that has imported everything and waits, so that a lost one is followed"
        " in half the time. They share their memory, so the one that waits takes little of its own. On Linux; elsewhere"
        " each process imports for itself, as all do with --no-standby.",
        front=Front.QUEUE,
    )
    kv_events: str = _option(
        "",
        "Publish which KV blocks the prefix cache holds, on this ZeroMQ address, for routers that send a prompt where"
        " its beginning is cached: tcp://127.0.0.1:5557, tcp://*:5557 for every network of this machine, or"
        " ipc:///path/of/a/socket. They tell what prompts and answers say, to everybody who can connect. Needs the"
        " extra penstock[kv-events].",
        front=Front.HTTP,
    )
    kv_events_replay: str = _option(
        "",
        "Send KV events once more to whoever asks for them on this ZeroMQ address; none by default.",
        front=Front.HTTP,
    )
    kv_events_topic: str = _option(
        "",
        "Topic of published KV events; llm-d wants kv@ADDRESS@MODEL, with the address that it knows this server by.",
        front=Front.HTTP,
    )
    kv_events_format: str = _option(
        "maps",
        "How KV events are written: maps with named fields, or arrays, for readers made before vLLM 0.24.",
        KV_EVENTS_FORMATS,
        Front.HTTP,
    )
    kv_events_buffer: int = _option(
        10_000,
        "Batches of KV events, one a step, that are kept for --kv-events-replay; as many may wait for a slow reader.",
        front=Front.HTTP,
    )
    record: str = _option("", "Write every step's plan and result to this file (JSON lines), for replay.")

    def __post_init__(self) -> None:
        if not isinstance(self.served_model_name, tuple) or not all(
            each and isinstance(each, str) for each in self.served_model_name
        ):
            raise ConfigError("served_model_name", f"must be names, got {self.served_model_name!r}")
        for name in self.__dataclass_fields__:
            choices = self.__dataclass_fields__[name].metadata["choices"]
            if choices and getattr(self, name) not in choices:
                raise ConfigError(name, f"must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        _check_numbers(self)
        for name in (
            *("threads", "max_model_len", "kv_cache_memory", "kv_store_bytes", "state_checkpoint_interval"),
            *("step_target_ms", "max_queue_seconds"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"must not be negative, got {getattr(self, name)}")
        for name in (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queued_requests",
            "max_queued_tokens",
            "max_loras",
            "max_lora_rank",
            "kv_events_buffer",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")
        if not self.standby and self.runner == "in-process":
            raise ConfigError("standby", "would do nothing: steps are computed in this process (runner)")
        if self.draft_model and not self.speculate:
            raise ConfigError("draft_model", "would do nothing: guesses are off (speculate)")
        if self.memory_limit and self.memory_limit < LEAST_BYTES:
            raise ConfigError("memory_limit", f"must be 0 or at least 64MiB, got {self.memory_limit}")
        self._check_adapters()
        self._check_kv_events()

    def _check_kv_events(self) -> None:
        """Make sure that KV events can be published where the operator says, and that no option is in vain."""
        for name in ("kv_events", "kv_events_replay"):
            if getattr(self, name):
                _check_socket_address(name, getattr(self, name))
        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(self, name) and not self.kv_events:
                raise ConfigError(name, "would do nothing: no KV events are published (kv_events)")
        if self.kv_events and not self.prefix_caching:
            raise ConfigError("kv_events", "would say nothing: no KV is found again (prefix_caching)")
        if self.kv_events and self.kv_events == self.kv_events_replay and not self.kv_events.endswith(":0"):
            raise ConfigError("kv_events_replay", f"must be another address than kv_events, got {self.kv_events!r}")

    def _check_adapters(self) -> None:
        try:
            names = [adapter_option(each)[0] for each in self.lora]
        except (TypeError, ValueError) as error:
            raise ConfigError("lora", str(error)) from error
        if len(set(names)) < len(names):
            raise ConfigError("lora", f"two adapters would have one name: {', '.join(names)}")
        if len(names) > self.max_loras:
            raise ConfigError("lora", f"names {len(names)} adapters, and max_loras is {self.max_loras}")
        twice = set(names).intersection(self.served_model_name)
        if twice:
            raise ConfigError("lora", f"an adapter would be called as the model is: {min(twice)}")

    @property
    def most_adapters(self) -> int:
        """How many adapters may be loaded at once; 0 if none ever is."""
        return self.max_loras if self.lora_dir else len(self.lora)

    @property
    def checkpoint_interval(self) -> int:
        """Positions between checkpoints of recurrent state, in whole blocks."""
        return -(-self.state_checkpoint_interval // self.block_size) * self.block_size


def options_behind(front: Front) -> frozenset[str]:
    """The names of `EngineConfig`'s options that something reads behind this front."""
    return frozenset(each.name for each in fields(EngineConfig) if each.metadata["front"] <= front)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the operator chose for the HTTP side."""

    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one and prints it.")
    probe_host: str = _option("127.0.0.1", "Address that --probe-port is on; 0.0.0.0 for probes from other machines.")
    probe_port: int = _option(
        0,
        "A port of its own for /health, /health/live, /health/ready, /metrics and the list /v1/models, which need no"
        " key there; 0 for none.",
    )
    api_key_file: str = _option(
        "",
        "File of API keys, one per line; `admin KEY` marks one that may use the admin routes, `gateway KEY` one of a"
        " router that keeps its callers apart by cache_salt, `KEY concurrent=8` one that may have eight requests at"
        " once. PENSTOCK_API_KEY, PENSTOCK_ADMIN_KEY and PENSTOCK_GATEWAY_KEY in the environment add one each. Without"
        " any key only this machine is served.",
    )
    allowed_hosts: str = _option(
        "", "Names, separated by commas, that the Host header may hold beside this machine's own; * for any."
    )
    cors_origins: str = _option(
        "", "Web pages' origins, separated by commas, that may call this server; none by default, * for any."
    )
    compat: bool = _option(
        False,
        "Ignore fields that are unknown or not supported instead of refusing them, and list them in the answer's"
        " x-ignored-params header.",
    )
    normalize_prompts: bool = _option(
        False,
        "Drop or move lines at the front of a system prompt that change from request to request (a billing header,"
        " today's date, a request's id), so that prompts that are otherwise alike begin alike; the answer's"
        " x-normalized header says what was done.",
    )
    request_timeout: float = _option(
        DEFAULT_SERVER_LIMITS.request_seconds, "Seconds after which a request ends with an error; 0 for never."
    )
    drain_timeout: int = _option(
        DEFAULT_SERVER_LIMITS.drain_seconds, "Seconds that running answers may go on after SIGTERM or SIGINT."
    )
    max_connections: int = _option(DEFAULT_SERVER_LIMITS.max_connections, "Connections at once; more are answered 429.")
    log_format: str = _option("text", "How log lines are written to standard error.", LOG_FORMATS)
    log_requests: bool = _option(
        False, "Log one line per request: id, route, status, tokens, timings; never text of a prompt or an answer."
    )
    journal: str = _option(
        "",
        "Folder for a journal, made if it is not there: with it streams can be resumed after this server has ended,"
        " however it did, responses in the background are finished, and stored answers found. Of answers that their"
        " callers ask to store, which is what /v1/responses does unless store is false, their text and that of their"
        " requests is in it, until they are deleted or newer ones take their place; of all others no text is.",
    )
    profile_dir: str = _option(
        "",
        "Folder for profiles, made if it is not there: an admin begins one with POST /start_profile and ends it with"
        " POST /stop_profile. Without it both are refused.",
    )
    otlp_traces_endpoint: str = _option(
        "", "Send an OpenTelemetry span per request to this OTLP/HTTP URL; needs the extra penstock[otel]."
    )

    def __post_init__(self) -> None:
        if self.log_format not in LOG_FORMATS:
            raise ConfigError("log_format", f"must be one of {', '.join(LOG_FORMATS)}, got {self.log_format!r}")
        _check_numbers(self)
        for name in ("port", "probe_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(name, f"must lie in 0..65535, got {getattr(self, name)}")
        if self.probe_port and (self.probe_host, self.probe_port) == (self.host, self.port):
            raise ConfigError("probe_port", f"must be another one than --port, got {self.probe_port}")
        for name in ("request_timeout", "drain_timeout"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, f"must be a number of seconds from 0 up, got {getattr(self, name)}")
        if self.max_connections < 1:
            raise ConfigError("max_connections", f"must be at least 1, got {self.max_connections}")


@dataclass(frozen=True, slots=True)
class HostingConfig:
    """What the operator chose for a server of several models."""

    models_file: str = _option(
        "",
        "YAML file of models to serve behind the same port: a list `models` of entries with `model` and, as wanted,"
        " `pin: true`, `unload-after: SECONDS` and any option of the engine.",
    )
    max_loaded_models: int = _option(
        0, "Models loaded at once; the one that was used least recently makes room for another. 0 for all."
    )
    models_memory: int = _option(
        0, "Most bytes of all models that are loaded, weights and KV caches together; 0 for what the machine has."
    )
    pin: tuple[str, ...] = _option(
        (), "A model that is loaded at the start and never makes room for others. May be given several times."
    )
    unload_after: float = _option(0.0, "Seconds without a request after which a model is unloaded; 0 for never.")
    model_wait: float = _option(
        120.0, "Seconds that a request waits for its model; it is then asked to come again. 0 for no limit."
    )

    def __post_init__(self) -> None:
        _check_numbers(self)
        for name in ("max_loaded_models", "models_memory", "unload_after", "model_wait"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, f"must be a number from 0 up, got {getattr(self, name)}")
