"""The error tree: who made the mistake decides the branch, and the branch decides the answer.

    PenstockError
    ├── RequestError            the caller's request is wrong; it alone ends       HTTP 4xx
    │   ├── InvalidParameter        a field's value (names the field)               400
    │   ├── PromptTooLong           prompt + output cannot fit the context          400
    │   ├── NeverFits               more KV blocks than the whole pool has          400
    │   ├── UnknownModel            asks for a model that is not served             404
    │   └── ReaderTooSlow           leaves too much of its answer unread            an error in the stream
    ├── Overloaded              right request, wrong moment; try again             HTTP 429 / 503
    │   └── Unavailable             what it needs was lost just now, and comes back     503
    ├── SetupError              what the operator gave us is wrong; exit code 2
    │   ├── ConfigError             an option (names the option)
    │   ├── ModelFileError          a model's file (names the file and the key)
    │   └── ModelUnavailable        the model cannot be found or fetched
    └── EngineFault             our own failure                                    HTTP 500
        ├── RequestPoisoned         computing this request breaks steps; it ends    500
        └── EngineDead              the engine will serve nothing any more          HTTP 503

Nothing here knows HTTP: the server maps branches to statuses, the command line maps them to exit codes.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "ConfigError",
    "EngineDead",
    "EngineFault",
    "InvalidParameter",
    "ModelFileError",
    "ModelUnavailable",
    "NeverFits",
    "Overloaded",
    "PenstockError",
    "PromptTooLong",
    "ReaderTooSlow",
    "RefusalCause",
    "RequestError",
    "RequestPoisoned",
    "RunnerLost",
    "SetupError",
    "Unavailable",
    "UnknownModel",
]


class RefusalCause(StrEnum):
    """The limit that a request met when it was refused before it was read, or refused for now."""

    QUEUE_SEQUENCES = "queue_sequences"
    QUEUE_TOKENS = "queue_tokens"
    QUEUE_SECONDS = "queue_seconds"
    OWN_TIMEOUT = "own_timeout"
    """It could not even begin within the time that its caller allows."""
    WORKERS = "workers"
    """Too many requests wait for a grammar, for a chat template, or for a long prompt to be tokenised."""
    PROCESS_LOST = "process_lost"
    LOADING = "loading"
    """The server has several models, and the requested one is not loaded."""
    MEMORY = "memory"
    """Too many large requests are held: their share of `--memory-limit` is used up."""
    CONCURRENCY = "concurrency"
    CONNECTIONS = "connections"
    DRAINING = "draining"
    HEADERS = "headers"
    BODY = "body"
    ACCESS = "access"
    """It has no valid key, or comes from an address or a site that is not allowed."""
    OTHER = "other"


class PenstockError(Exception):
    """Every error that Penstock raises on purpose.

    Attributes:
        cause: the limit that a refused request met; None for an error that is not a refusal.
    """

    cause: RefusalCause | None = None


class RequestError(PenstockError):
    """The caller's request is wrong.

    Attributes:
        message: one sentence for the caller, without paths or internals.
        param: the request field at fault, dotted (`messages.0.content`), or "" if none is.
        code: a stable machine-readable word, such as `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str = "", code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidParameter(RequestError):
    """A field is unknown, has the wrong type, or lies out of range."""

    def __init__(self, param: str, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(message, param=param, code=code)

    def __str__(self) -> str:
        return self.message if self.message.startswith(self.param) else f"{self.param}: {self.message}"


class PromptTooLong(RequestError):
    """The prompt leaves no room in the model's context for output or, if no output is wanted, does not fit into it."""

    def __init__(
        self, prompt_tokens: int, max_model_len: int, *, param: str = "messages", generates: bool = True
    ) -> None:
        room = " and at least one token must be generated" if generates else ""
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {prompt_tokens} tokens"
            f"{room}. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class NeverFits(RequestError):
    """The request needs more KV blocks than the pool has in all."""

    def __init__(self, need_blocks: int, have_blocks: int, block_size: int) -> None:
        super().__init__(
            f"The request needs {need_blocks} KV blocks of {block_size} tokens; the engine has {have_blocks} in all."
            " Lower max_tokens or shorten the prompt, or give the engine more --kv-cache-memory.",
            param="max_tokens",
            code="kv_cache_exceeded",
        )
        self.need_blocks = need_blocks
        self.have_blocks = have_blocks


class UnknownModel(RequestError):
    """The request names a model that this engine does not serve."""

    def __init__(self, asked: str, *served: str) -> None:
        super().__init__(
            f"The model {asked!r} does not exist here; this server serves {', '.join(map(repr, served))}.",
            param="model",
            code="model_not_found",
        )


class ReaderTooSlow(RequestError):
    """The caller left so much of its answer unread that no more is kept for it."""

    def __init__(self) -> None:
        message = "This stream was read too slowly, and no more of it is kept. It can be resumed from its last event."
        super().__init__(message, code="reader_too_slow")


class Overloaded(PenstockError):
    """The request is right but cannot be taken now.

    Attributes:
        retry_after: whole seconds after which trying again makes sense.
    """

    def __init__(self, message: str, *, retry_after: int = 1, cause: RefusalCause = RefusalCause.OTHER) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.cause = cause


class Unavailable(Overloaded):
    """Something that the request needs has yet to be started, or was lost while it waited, by no fault of its own."""

    def __init__(self, message: str, *, retry_after: int = 1, cause: RefusalCause = RefusalCause.PROCESS_LOST) -> None:
        super().__init__(message, retry_after=retry_after, cause=cause)


class SetupError(PenstockError):
    """What the operator gave is wrong; the program ends with exit code 2 and this one line."""


class ConfigError(SetupError):
    """An option has a value that cannot be used."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


class ModelFileError(SetupError):
    """A model's file is corrupt, incomplete, or uses something that is not implemented.

    Args:
        file: the file as the operator knows it.
        key: the tensor, config key or header field at fault; "" when it is the file as a whole.
        message: what is wrong with it, and where possible what to do.
    """

    def __init__(self, file: str, key: str, message: str) -> None:
        super().__init__(f"{file}: {key}: {message}" if key else f"{file}: {message}")
        self.file = file
        self.key = key


class ModelUnavailable(SetupError):
    """The model named by the operator cannot be found on disk or fetched."""


class EngineFault(PenstockError):
    """A failure of ours. The message is safe to show to a client."""


class RunnerLost(EngineFault):
    """The process that computes is gone, or hung and was ended.

    Attributes:
        killed: whether it was killed by a signal that no computation causes: sent by somebody, or by the system
            because memory ran out.
    """

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class RequestPoisoned(EngineFault):
    """Computing the request makes the engine's steps fail, and would do so again; other requests are unharmed."""


class EngineDead(EngineFault):
    """The engine has stopped and will not serve again; health is red."""
