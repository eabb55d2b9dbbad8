"""How models write tool calls: one value a format, and finding a model's format by its chat template.

Sources, for the structure alone: the Hermes function-calling prompt format, which Qwen models share; Meta's prompt
format for Llama 3.1 (JSON-based tool calling); Mistral's instruct tokenizers, version 3 (a list behind the control
token) and version 11 (name, `[ARGS]`, arguments). Knows no text that a model wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.errors import ConfigError

__all__ = ["CALL_FORMATS", "HARMONY", "CallFormat", "find_call_format"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls. All write JSON with a name and arguments; they differ in what stands around it.

    Attributes:
        openings: any of them announces a call, anywhere in an answer.
        closing: ends a call; "" where the JSON's end does.
        bare: an answer may also begin with a call's JSON unannounced.
        separator: may stand between calls, beside space.
        named: the name may stand in front of the JSON, which is then the arguments alone.
        id_chars: templates of the format insist on call ids of so many letters and digits; 0 if they do not.
    """

    name: str
    openings: tuple[str, ...] = ()
    closing: str = ""
    bare: bool = False
    separator: str = ""
    named: bool = False
    id_chars: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        """Spellings that must reach the parser even where the model writes them as control tokens."""
        return tuple(each for each in (*self.openings, self.closing, ARGS if self.named else "") if each)


ARGS = "[ARGS]"

CALL_FORMATS = {
    each.name: each
    for each in (
        CallFormat("hermes", openings=("<tool_call>",), closing="</tool_call>"),
        CallFormat("llama3_json", openings=("<|python_tag|>",), bare=True, separator=";"),
        CallFormat("mistral", openings=("[TOOL_CALLS]",), named=True, id_chars=9),
        CallFormat("json", bare=True),
    )
}

HARMONY = CallFormat("harmony")
"""Messages in channels, which `channels` reads: not a format of `CallParser`."""

_EVERY = {**CALL_FORMATS, HARMONY.name: HARMONY}
_SIGNS = {"<|channel|>": "harmony", "<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json"}


def find_call_format(choice: str, template_source: str) -> CallFormat | None:
    """The format that the operator chose; for `auto`, the one whose marks the chat template has, else plain JSON.

    None means that the model is offered no tools.

    Raises:
        ConfigError: there is no such format.
    """
    if choice == "none":
        return None
    if choice == "auto":
        return _EVERY[next((name for sign, name in _SIGNS.items() if sign in template_source), "json")]
    if choice not in _EVERY:
        raise ConfigError("tool_call_parser", f"must be auto, none or one of {', '.join(_EVERY)}, got {choice!r}")
    return _EVERY[choice]
