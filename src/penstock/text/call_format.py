"""How models write tool calls: one value per format, and detection of a model's format from its chat template.

Sources, for the structure alone: the Hermes function-calling prompt format, which Qwen models share; Meta's prompt
format for Llama 3.1 (JSON-based tool calling); Mistral's instruct tokenizers, version 3 (a list behind the control
token), version 11 (name, `[CALL_ID]`, id, `[ARGS]`, arguments) and version 13 (without the id). Does not parse
answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.errors import ConfigError

__all__ = ["CALL_FORMATS", "GEMMA4", "HARMONY", "XML", "CallFormat", "find_call_format"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls. Formats of `CallParser` write JSON with a name and arguments; what surrounds it differs.

    Attributes:
        openings: any of them announces a call, anywhere in an answer.
        closing: ends a call; "" if the end of the JSON does.
        bare: whether an answer may also begin with a call's JSON without an opening.
        separator: may stand between calls and after the last one, besides white space.
        mark: separates a tool's name from the JSON in formats where the name may come first; the JSON is then the
            arguments alone. "" in other formats.
        id_mark: may follow such a name, and introduces the model's own id of the call, up to `mark`; the id is dropped,
            because callers get other ids. "" in other formats.
        id_chars: number of letters and digits that the format's templates require of a call id; 0 for no requirement.
    """

    name: str
    openings: tuple[str, ...] = ()
    closing: str = ""
    bare: bool = False
    separator: str = ""
    mark: str = ""
    id_mark: str = ""
    id_chars: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        """Spellings that must reach the parser even where the model writes them as control tokens."""
        return tuple(each for each in (*self.openings, self.closing, self.separator, self.mark, self.id_mark) if each)


_DEEPSEEK_CALLS, _DEEPSEEK_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"  # noqa: RUF001 - its own letters


def _deepseek(name: str, kind: str, mark: str, fence: str) -> CallFormat:
    """Calls in a list; `kind` comes before a tool's name, `mark` between it and the arguments, `fence` after them."""
    return CallFormat(
        name,
        openings=(f"{_DEEPSEEK_CALLS}{_DEEPSEEK_CALL}{kind}", f"{_DEEPSEEK_CALL}{kind}"),
        closing=f"{fence}<｜tool▁call▁end｜>",  # noqa: RUF001
        separator="<｜tool▁calls▁end｜>",  # noqa: RUF001
        mark=mark,
    )


CALL_FORMATS = {
    each.name: each
    for each in (
        CallFormat("hermes", openings=("<tool_call>",), closing="</tool_call>"),
        CallFormat("llama3_json", openings=("<|python_tag|>",), bare=True, separator=";"),
        CallFormat("mistral", openings=("[TOOL_CALLS]",), mark="[ARGS]", id_mark="[CALL_ID]", id_chars=9),
        CallFormat("granite", openings=("<|tool_call|>",)),
        CallFormat("phi4", openings=("<|tool_call|>", "functools"), closing="<|/tool_call|>", bare=True),
        CallFormat("gemma", openings=("```tool_code", "```tool_call", "```json"), closing="```", bare=True),
        _deepseek("deepseek_v3", "function<｜tool▁sep｜>", "\n```json\n", "```"),  # noqa: RUF001
        _deepseek("deepseek_v31", "", "<｜tool▁sep｜>", ""),  # noqa: RUF001
        CallFormat("json", bare=True),
    )
}

HARMONY = CallFormat("harmony")
"""Messages in channels, parsed by `channels`, not by `CallParser`."""

XML = CallFormat("qwen3_xml", openings=("<tool_call>",), closing="</tool_call>")
"""Arguments tagged one by one, parsed by `xml_call_parser`, not by `CallParser`."""

GEMMA4 = CallFormat("gemma4", openings=("<|tool_call>",), closing="<tool_call|>", mark='<|"|>')
"""Arguments in a notation of its own, parsed by `gemma_call_parser`; the mark is its quotation mark."""

_EVERY = {**CALL_FORMATS, HARMONY.name: HARMONY, XML.name: XML, GEMMA4.name: GEMMA4}
_SIGNS = {
    "<|channel|>": "harmony",
    _DEEPSEEK_CALL: "deepseek_v31",
    "<parameter=": "qwen3_xml",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    "<|/tool_call|>": "phi4",
    "<|tool|>": "phi4",
    "<|tool_call|>": "granite",
    "<|tool_call>": "gemma4",
    "<start_of_turn>": "gemma",
}
"""Strings in a chat template that reveal its model's format; the first one found decides."""


def find_call_format(choice: str, template_source: str) -> CallFormat | None:
    """The format that the operator chose; for `auto`, the one that the chat template reveals, else plain JSON.

    None means that the model is offered no tools.

    Raises:
        ConfigError: there is no such format.
    """
    if choice == "none":
        return None
    if choice == "auto":
        if _DEEPSEEK_CALL in template_source and "```json" in template_source:
            return _EVERY["deepseek_v3"]
        return _EVERY[next((name for sign, name in _SIGNS.items() if sign in template_source), "json")]
    if choice not in _EVERY:
        raise ConfigError("tool_call_parser", f"must be auto, none or one of {', '.join(_EVERY)}, got {choice!r}")
    return _EVERY[choice]
