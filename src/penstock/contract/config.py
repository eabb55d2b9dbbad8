"""What the operator chose: frozen values, built at the edge by `app` from the command line or a library call.

Nothing below `cli` reads the environment. What the operator chose for a server is in `server_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.contract.adapter import adapter_option
from penstock.contract.errors import ConfigError
from penstock.contract.limits import DEFAULT_SERVER_LIMITS
from penstock.contract.memory_budget import LEAST_BYTES
from penstock.contract.options import Front, check_numbers, check_socket_address, option
from penstock.contract.scheduler_config import POLICIES

__all__ = ["ANY_NAME", "DEFAULT_MODEL", "QUANTIZATIONS", "EngineConfig", "options_behind"]

DEFAULT_MODEL = "smollm2-135m-instruct"

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "file", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "int8")
DEVICES = ("auto", "cpu", "cuda")
RUNNERS = ("auto", "in-process", "process")
TOOL_CALL_PARSERS = (
    *("auto", "hermes", "llama3_json", "mistral", "granite", "phi4", "gemma", "deepseek_v3", "deepseek_v31", "json"),
    *("harmony", "qwen3_xml", "gemma4", "none"),
)
REASONING_PARSERS = ("auto", "think", "none")
KV_EVENTS_FORMATS = ("maps", "arrays")

ANY_NAME = "*"
"""As a served model name, this stands for every name."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the operator chose for the engine; everything else is read from the model."""

    model: str = option(
        DEFAULT_MODEL,
        "A name that `penstock models` lists, a directory in Hugging Face layout, a .gguf file, or org/name on the"
        " Hugging Face hub.",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "Name under which clients ask for the model; by default the model's own. May be given several times; * accepts"
        " any name.",
        front=Front.HTTP,
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations. auto takes bfloat16 on a CPU with compiled kernels, elsewhere the"
        " checkpoint's type if this device is good at it.",
        DTYPES,
    )
    quantization: str = option(
        "auto",
        "How weights are kept: none, in --dtype; file, as the file's own quantised blocks; int8 or int4, quantised on"
        " load. auto takes file if the file is quantised and compiled kernels run it, else none. All but none multiply"
        " with int8 activations, which trades some accuracy for less memory and more speed.",
        QUANTIZATIONS,
    )
    device: str = option("auto", "Device that runs the model; auto takes a CUDA device if there is one.", DEVICES)
    threads: int = option(0, "Compute threads on the CPU; 0 takes one per physical core.")
    tensor_parallel: int = option(
        1,
        "Processes on this host that divide the model: each holds a part of every layer's weights, keys and values,"
        " and they compute each step together. CPU only; not with draft models or adapters. --threads applies to each"
        " process.",
        front=Front.QUEUE,
    )
    max_model_len: int = option(
        0,
        "Most tokens of one request, prompt and output together; 0: the model's context, or as many as fit the KV"
        " cache.",
    )
    kv_cache_memory: int = option(
        0, "Size of the KV cache, in bytes or with a unit (500MB, 8GiB); 0 takes a quarter of the free memory."
    )
    kv_cache_dtype: str = option(
        "auto",
        "How keys and values are kept: auto, in the type of the activations; int8, rounded per token and head, in"
        " about half the memory of bfloat16, at some cost in accuracy.",
        KV_CACHE_DTYPES,
    )
    block_size: int = option(16, "Tokens in one KV block.")
    state_checkpoint_interval: int = option(
        512,
        "Tokens between the checkpoints of a long prompt, for models that carry recurrent state: how much is prefilled"
        " again when a conversation is edited in the middle. 0: only at the ends of prompts and answers, and at"
        " branches.",
    )
    max_num_seqs: int = option(64, "Most sequences that run at once.")
    max_num_batched_tokens: int = option(
        256, "Most tokens computed in one step: the chunk size of long prompts while no answer streams."
    )
    step_target_ms: int = option(
        100,
        "Milliseconds that a step may take while answers stream: prompts are computed in chunks that keep to it. 0: no"
        " target; chunks are as large as while no answer streams.",
        front=Front.QUEUE,
    )
    scheduling_policy: str = option(
        "auto",
        "Order of admission: fcfs, first come first served; priority, by priority; fair, by each API key's share of"
        " what is computed, which is one unless the key file says otherwise (share=2 after the key). auto takes fair"
        " if there are keys.",
        ("auto", *POLICIES),
        Front.HTTP,
    )
    prefix_caching: bool = option(True, "Reuse the keys and values of prefixes that prompts share.")
    speculate: bool = option(
        True,
        "Guess the next tokens from what an answer repeats and what its required form allows, and compute several"
        " tokens in a step where that saves time. Answers stay the same.",
    )
    draft_model: str = option(
        "",
        "Small model with the same vocabulary, or EAGLE-3 head for this model, that adds guesses of its own to those"
        " from repetition, as often as that saves time; named like MODEL. Answers stay the same. Not for a model with"
        " a window in every layer.",
    )
    lora: tuple[str, ...] = option(
        (),
        "LoRA adapter to load at the start: NAME=DIRECTORY in PEFT's layout, or NAME=FILE.gguf. Requests choose it by"
        " its name. May be given several times.",
    )
    lora_dir: str = option(
        "",
        "Folder of adapters that an admin may load and unload while the server runs, with POST /v1/load_lora_adapter"
        " and /v1/unload_lora_adapter; nothing outside this folder can be named. Without it both routes are refused.",
        front=Front.HTTP,
    )
    max_loras: int = option(8, "Most adapters that may be loaded at once.")
    max_lora_rank: int = option(64, "Largest rank that an adapter may have; memory is planned for it.")
    kv_store: str = option(
        "",
        "Folder that keeps KV blocks in files, to reuse shared prefixes after a restart and in other processes; it is"
        " made if it is not there. auto takes one in the cache directory, off keeps none. Without it, penstock serve"
        " and fleet take PENSTOCK_KV_STORE from the environment, else auto; all else keeps none. The files reveal what"
        " prompts and answers said, and only you can read them. Not for models with a window in every layer.",
    )
    kv_store_bytes: int = option(
        0,
        "Most disk space that --kv-store may take, all models together, in bytes or with a unit (10GiB); the least"
        " recently used blocks are evicted. 0 takes a tenth of the free space, and 16GiB at most.",
    )
    max_queued_requests: int = option(
        DEFAULT_SERVER_LIMITS.max_queued_requests,
        "Most sequences that may wait; more are answered 429.",
        front=Front.QUEUE,
    )
    max_queued_tokens: int = option(
        DEFAULT_SERVER_LIMITS.max_queued_tokens,
        "Most prompt tokens that may wait, all requests together; more are answered 429.",
        front=Front.QUEUE,
    )
    max_queue_seconds: int = option(
        0,
        "Most seconds that a request may wait before its prompt is computed, as predicted when it arrives; if longer,"
        " it is answered 429 with the time after which to try again. 0: no limit.",
        front=Front.QUEUE,
    )
    memory_limit: int = option(
        0,
        "Most bytes that the server keeps for its clients: requests being read and answered, output that waits for"
        " readers, stored answers, compiled grammars. 0 takes 512MiB. The model's weights and its KV cache"
        " (--kv-cache-memory) do not count.",
        front=Front.HTTP,
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls: auto infers it from the chat template, none refuses tools.",
        TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "How the model writes its reasoning: think, between <think> tags; auto infers it from the chat template; none"
        " leaves reasoning in the text.",
        REASONING_PARSERS,
    )
    tokenizer: str = option(
        "",
        "Take tokenizer and chat template from here instead of the model's own files: a directory with a"
        " tokenizer.json, or org/name on the Hugging Face hub.",
    )
    chat_template: str = option(
        "auto",
        "How conversations are written for the model: auto takes the model's own chat template, or plain text if it"
        " has none; none refuses conversations if it has none; anything else is a file with a Jinja template.",
    )
    generation_config: str = option(
        "auto",
        "Where sampling defaults come from, for requests that give none of their own: auto takes the model's"
        " generation_config.json, or its defaults in the catalogue; none takes none; anything else is a directory or"
        " file.",
    )
    runner: str = option(
        "auto",
        "Where steps are computed: in-process, in the calling process; process, in a process of its own, which is"
        " restarted if it is killed, crashes or hangs, and whose requests then go on where they were. auto takes"
        " process for servers and for several ranks, else in-process.",
        RUNNERS,
        Front.QUEUE,
    )
    standby: bool = option(
        True,
        "Fork the process that computes from a standby that has imported everything, so that a lost process is"
        " replaced in half the time. They share memory, so the standby takes little of its own. Linux only; elsewhere,"
        " and with --no-standby, each process imports for itself.",
        front=Front.QUEUE,
    )
    kv_events: str = option(
        "",
        "Publish which KV blocks the prefix cache holds, on this ZeroMQ address, for routers that send a prompt where"
        " its prefix is cached: tcp://127.0.0.1:5557, tcp://*:5557 for every network of this machine, or"
        " ipc:///path/of/a/socket. The events reveal what prompts and answers say, to everybody who can connect. Needs"
        " the extra penstock[kv-events].",
        front=Front.HTTP,
    )
    kv_events_replay: str = option(
        "",
        "ZeroMQ address where readers may ask for past KV events again; none by default.",
        front=Front.HTTP,
    )
    kv_events_topic: str = option(
        "",
        "Topic of published KV events; llm-d wants kv@ADDRESS@MODEL, with the address by which it knows this server.",
        front=Front.HTTP,
    )
    kv_events_format: str = option(
        "maps",
        "How KV events are written: maps with named fields; arrays, for readers made before vLLM 0.24.",
        KV_EVENTS_FORMATS,
        Front.HTTP,
    )
    kv_events_buffer: int = option(
        10_000,
        "Batches of KV events, one a step, to keep for --kv-events-replay; as many may wait for a slow reader.",
        front=Front.HTTP,
    )
    keep_step_times: bool = option(
        True,
        "Keep learned step times, a few numbers for each model, in the cache directory for the next start on this"
        " machine.",
        front=Front.HTTP,
    )
    record: str = option("", "Write every step's plan and result to this file, as JSON lines, for replay.")

    def __post_init__(self) -> None:
        if not isinstance(self.served_model_name, tuple) or not all(
            each and isinstance(each, str) for each in self.served_model_name
        ):
            raise ConfigError("served_model_name", f"must be names, got {self.served_model_name!r}")
        for name in self.__dataclass_fields__:
            choices = self.__dataclass_fields__[name].metadata["choices"]
            if choices and getattr(self, name) not in choices:
                raise ConfigError(name, f"must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        check_numbers(self)
        for name in (
            *("threads", "max_model_len", "kv_cache_memory", "kv_store_bytes", "state_checkpoint_interval"),
            *("step_target_ms", "max_queue_seconds"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"must not be negative, got {getattr(self, name)}")
        for name in (
            "block_size",
            "tensor_parallel",
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
        if self.tensor_parallel > 1 and self.runner == "in-process":
            raise ConfigError("runner", "in-process is one process, and tensor_parallel asks for several; take process")
        if self.draft_model and not self.speculate:
            raise ConfigError("draft_model", "would do nothing: guesses are off (speculate)")
        if self.memory_limit and self.memory_limit < LEAST_BYTES:
            raise ConfigError("memory_limit", f"must be 0 or at least 64MiB, got {self.memory_limit}")
        self._check_adapters()
        self._check_kv_events()

    def _check_kv_events(self) -> None:
        """Make sure that KV events can be published where the operator says, and that each option has an effect."""
        for name in ("kv_events", "kv_events_replay"):
            if getattr(self, name):
                check_socket_address(name, getattr(self, name))
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
    """The names of `EngineConfig`'s options that have an effect behind this front."""
    return frozenset(each.name for each in fields(EngineConfig) if each.metadata["front"] <= front)
