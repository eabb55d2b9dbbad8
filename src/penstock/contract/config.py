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
"""The served model name that stands for every name."""


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
        "A name that clients ask for; by default the model's own. May be given several times; * serves whatever name is"
        " asked for.",
        front=Front.HTTP,
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations; auto takes bfloat16 on a CPU with compiled kernels, elsewhere the"
        " checkpoint's where this device is good at it.",
        DTYPES,
    )
    quantization: str = option(
        "auto",
        "How the weights are kept: none in --dtype, file as the file's own quantised blocks, int8 and int4 quantised on"
        " load; auto takes file where the file is quantised, else none. All but none multiply with int8 activations:"
        " less memory and more speed for some accuracy.",
        QUANTIZATIONS,
    )
    device: str = option("auto", "Where the model runs; auto takes a CUDA device if there is one.", DEVICES)
    threads: int = option(0, "Compute threads on the CPU; 0 takes one per physical core.")
    tensor_parallel: int = option(
        1,
        "Processes of this host that divide the model: each has a part of every layer's weights, keys and values, and"
        " they compute each step together. On CPUs; not with draft models or adapters. --threads are those of each.",
        front=Front.QUEUE,
    )
    max_model_len: int = option(
        0,
        "Most tokens of one request, prompt and output together; 0: the model's context, or what fits the KV cache.",
    )
    kv_cache_memory: int = option(
        0, "Bytes for the KV cache (8GiB, 500MB and plain bytes are understood); 0 takes a quarter of the free memory."
    )
    kv_cache_dtype: str = option(
        "auto",
        "How keys and values are kept: auto in the type of the activations; int8 in about half the memory of bfloat16,"
        " rounded per token and head, for some accuracy.",
        KV_CACHE_DTYPES,
    )
    block_size: int = option(16, "Tokens in one KV block.")
    state_checkpoint_interval: int = option(
        512,
        "Tokens between the checkpoints of a long prompt, for models that carry recurrent state: how much is read again"
        " when a conversation is edited in the middle. 0: only at ends of prompts and answers, and at branches.",
    )
    max_num_seqs: int = option(64, "Sequences that run at once.")
    max_num_batched_tokens: int = option(
        256, "Most tokens computed in one step: the chunk size of long prompts while no answer streams."
    )
    step_target_ms: int = option(
        100,
        "Milliseconds that a step may take while answers stream: prompts are read in chunks that keep to it; 0: in as"
        " large ones as while none does.",
        front=Front.QUEUE,
    )
    scheduling_policy: str = option(
        "auto",
        "Order of admission: fcfs, first come first served; by priority; or fair, where API keys get shares of what is"
        " computed (of one unless the key file says, behind the key, share=2). auto takes fair where there are keys.",
        ("auto", *POLICIES),
        Front.HTTP,
    )
    prefix_caching: bool = option(True, "Reuse the KV of prompts that begin alike.")
    speculate: bool = option(
        True,
        "Guess what comes next from what an answer repeats and what its form leaves, and compute several tokens in a"
        " step where that saves time. No answer is any different.",
    )
    draft_model: str = option(
        "",
        "A small model of the same vocabulary, or an EAGLE-3 head for this model, that guesses beside what repeats, as"
        " often as that saves time; named as MODEL is. No answer is any different. Not for a model with a window in"
        " every layer.",
    )
    lora: tuple[str, ...] = option(
        (),
        "A LoRA adapter to load at the start, as NAME=DIRECTORY in PEFT's layout or NAME=FILE.gguf; requests choose it"
        " by its name. May be given several times.",
    )
    lora_dir: str = option(
        "",
        "Folder of adapters that an admin may load and unload while the server runs, with POST /v1/load_lora_adapter"
        " and /v1/unload_lora_adapter; nothing outside it can be named. Without it both are refused.",
        front=Front.HTTP,
    )
    max_loras: int = option(8, "Adapters that may be loaded at once.")
    max_lora_rank: int = option(64, "The largest rank that an adapter may have; memory is planned for it.")
    kv_store: str = option(
        "",
        "Where KV blocks are kept in files, for prompts that begin alike after a restart, and in other processes: a"
        " folder, which is made if it is not there; auto for one in the cache directory; off for none. By default auto"
        " for penstock serve, and off for all else. They tell what prompts and answers said, and are readable by you"
        " alone. Not for models whose every layer has a window.",
    )
    kv_store_bytes: int = option(
        0,
        "Most bytes of the disk that --kv-store may take, all models together (10GiB is understood); what was not used"
        " for longest makes place. 0 takes a tenth of what is free, and 16GiB at most.",
    )
    max_queued_requests: int = option(
        DEFAULT_SERVER_LIMITS.max_queued_requests,
        "Sequences that may wait; more are answered 429.",
        front=Front.QUEUE,
    )
    max_queued_tokens: int = option(
        DEFAULT_SERVER_LIMITS.max_queued_tokens,
        "Prompt tokens that may wait, all requests together; then 429.",
        front=Front.QUEUE,
    )
    max_queue_seconds: int = option(
        0,
        "Seconds that a request may wait before its prompt is read, as far as that can be told when it comes; then 429,"
        " with the time after which to try again. 0: any.",
        front=Front.QUEUE,
    )
    memory_limit: int = option(
        0,
        "Most bytes that the server keeps for its clients: requests that are read and answered, output that waits for"
        " readers, stored answers, compiled grammars. 0 takes 512MiB. The model's weights and its KV cache"
        " (--kv-cache-memory) are not in it.",
        front=Front.HTTP,
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls; auto reads it from its chat template, none refuses tools.",
        TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "How the model writes its reasoning: think between <think> tags; auto reads it from its chat template, none"
        " leaves it in the text.",
        REASONING_PARSERS,
    )
    tokenizer: str = option(
        "",
        "Where tokenizer and chat template come from instead of the model's own files: a directory with a"
        " tokenizer.json, or org/name on the Hugging Face hub.",
    )
    chat_template: str = option(
        "auto",
        "How conversations are written for the model: auto takes its own chat template, and plain text where it has"
        " none; none refuses conversations where it has none; else a file with a Jinja template.",
    )
    generation_config: str = option(
        "auto",
        "Where sampling defaults come from, for requests that do not give their own: auto takes the model's"
        " generation_config.json, or what the catalogue says of it; none takes none; else a directory or file.",
    )
    runner: str = option(
        "auto",
        "Where steps are computed: in-process, in the one that asks; or in a process of its own, which is started"
        " anew if it is killed, crashes or hangs, and whose requests then go on where they were. auto takes in-process,"
        " but for penstock serve.",
        RUNNERS,
        Front.QUEUE,
    )
    standby: bool = option(
        True,
        "Fork the process that computes from one that has imported everything and waits, so that a lost one is followed"
        " in half the time. They share their memory, so the one that waits takes little of its own. On Linux; elsewhere"
        " each process imports for itself, as all do with --no-standby.",
        front=Front.QUEUE,
    )
    kv_events: str = option(
        "",
        "Publish which KV blocks the prefix cache holds, on this ZeroMQ address, for routers that send a prompt where"
        " its beginning is cached: tcp://127.0.0.1:5557, tcp://*:5557 for every network of this machine, or"
        " ipc:///path/of/a/socket. They tell what prompts and answers say, to everybody who can connect. Needs the"
        " extra penstock[kv-events].",
        front=Front.HTTP,
    )
    kv_events_replay: str = option(
        "",
        "Send KV events once more to whoever asks for them on this ZeroMQ address; none by default.",
        front=Front.HTTP,
    )
    kv_events_topic: str = option(
        "",
        "Topic of published KV events; llm-d wants kv@ADDRESS@MODEL, with the address that it knows this server by.",
        front=Front.HTTP,
    )
    kv_events_format: str = option(
        "maps",
        "How KV events are written: maps with named fields, or arrays, for readers made before vLLM 0.24.",
        KV_EVENTS_FORMATS,
        Front.HTTP,
    )
    kv_events_buffer: int = option(
        10_000,
        "Batches of KV events, one a step, that are kept for --kv-events-replay; as many may wait for a slow reader.",
        front=Front.HTTP,
    )
    keep_step_times: bool = option(
        True,
        "Keep what was learned of step times in the cache directory, some numbers for each model, for the next start on"
        " this machine.",
        front=Front.HTTP,
    )
    record: str = option("", "Write every step's plan and result to this file (JSON lines), for replay.")

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
        """Make sure that KV events can be published where the operator says, and that no option is in vain."""
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
    """The names of `EngineConfig`'s options that something reads behind this front."""
    return frozenset(each.name for each in fields(EngineConfig) if each.metadata["front"] <= front)
