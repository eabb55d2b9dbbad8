"""Parses an answer into reasoning, text and tool calls, whether it streams or not.

Decides what applies to a request (the model's format and the caller's rules) and chains two parsers: reasoning is split
off first, so that a call inside it does not count. Call ids are derived here from the choice's id, so a replay gives
the same ids.

The only tokens it knows are the control tokens that must be spelled. Invariant: the pieces of an answer, joined, depend
on its text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import ChatPrompt, Prompt
from penstock.contract.tools import CallPiece, ReasoningUse, ReplyRules, Tool, ToolUse
from penstock.text.call_entry import Judgement
from penstock.text.call_format import CALL_FORMATS, GEMMA4, HARMONY, XML, CallFormat, find_call_format
from penstock.text.call_parser import CallParser, CallPart
from penstock.text.channels import CHANNEL_TAGS, ChannelParser
from penstock.text.chat_template import ChatTemplate
from penstock.text.gemma_call_parser import GemmaCallParser
from penstock.text.reasoning import GEMMA4_TAGS, THINK_TAGS, ReasoningSplit, ThinkTags, leaves_open
from penstock.text.tool_schemas import ToolSchemas
from penstock.text.xml_call_parser import XmlCallParser

__all__ = [
    "PLAIN_FORMAT",
    "ReplyFormat",
    "ReplyParser",
    "ReplyPiece",
    "ReplyReader",
    "find_reply_format",
    "opens_reasoning",
]

_ID_BYTES = 12
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """More of an answer, all of it final."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one model writes its answers.

    Attributes:
        calls: None when the operator wants no tools.
        thinks: whether reasoning may precede an answer, between tags or in a channel.
        channels: answers are messages in channels; see `channels`.
        tags: the tags around reasoning, if it is tagged.
    """

    calls: CallFormat | None = CALL_FORMATS["json"]
    thinks: bool = False
    channels: bool = False
    tags: ThinkTags = THINK_TAGS

    def reader(self, prompt: ChatPrompt, rules: ReplyRules, rendered: str) -> ReplyReader | None:
        """The reader that parses the answers to one request; None when they are plain text.

        Raises:
            InvalidParameter: the tools cannot be offered or checked.
        """
        if prompt.tools and self.calls is None:
            raise InvalidParameter("tools", "tools: this server was started with --tool-call-parser none.")
        opened = self._splits(rules) and not self.channels and opens_reasoning(prompt, rendered, self.tags)
        return self.reader_of(prompt.tools, rules, opened=opened)

    def reader_of(self, tools: tuple[Tool, ...], rules: ReplyRules, *, opened: bool) -> ReplyReader | None:
        """As `reader`, from the `tools`, `rules` and `opened` that a reader in another process reports."""
        splits = self._splits(rules)
        calls = self._call_format(rules) if tools else None
        if calls is None and not splits:
            return None
        schemas = ToolSchemas(tools if calls else ())
        if self.channels:
            return ReplyReader(rules, calls, schemas, splits, opened=False, channels=calls in (None, HARMONY))
        return ReplyReader(rules, calls, schemas, splits, opened=opened, tags=self.tags)

    def _splits(self, rules: ReplyRules) -> bool:
        return self.thinks and rules.reasoning is not ReasoningUse.INLINE

    def _call_format(self, rules: ReplyRules) -> CallFormat | None:
        match rules.tool_use:
            case ToolUse.NONE:
                return None
            case ToolUse.AUTO if rules.form is None:
                return self.calls
        # The grammar makes the model write bare JSON.
        return replace(CALL_FORMATS["json"], id_chars=self.calls.id_chars if self.calls else 0)


def find_reply_format(tool_call_parser: str, reasoning_parser: str, template: ChatTemplate | None) -> ReplyFormat:
    """The format that the operator chose, or that the chat template reveals.

    Raises:
        ConfigError: there is no such format.
    """
    source = template.source if template is not None else ""
    calls = find_call_format(tool_call_parser, source)
    channels = calls is HARMONY or (tool_call_parser == "none" and find_call_format("auto", source) is HARMONY)
    tags = GEMMA4_TAGS if GEMMA4_TAGS.closing in source else THINK_TAGS
    thinks = reasoning_parser == "think" or (reasoning_parser == "auto" and (channels or tags.closing in source))
    return ReplyFormat(calls, thinks, channels, tags)


def opens_reasoning(prompt: Prompt, rendered: str, tags: ThinkTags = THINK_TAGS) -> bool:
    """Whether the model continues inside reasoning; in a conversation, only the assistant's own turn counts."""
    if not isinstance(prompt, ChatPrompt):
        return leaves_open(rendered, tags)
    if prompt.continue_final_message:
        return leaves_open(prompt.messages[-1].content, tags)
    return prompt.add_generation_prompt and rendered.rstrip().endswith(tags.opening)


PLAIN_FORMAT = ReplyFormat()


@dataclass(frozen=True, slots=True)
class ReplyReader:
    """Makes the parsers of one request's choices. Immutable.

    Attributes:
        spelled: ids of control tokens that the parsers must see as text.
    """

    rules: ReplyRules
    calls: CallFormat | None
    schemas: ToolSchemas
    splits: bool
    opened: bool
    channels: bool = False
    tags: ThinkTags = THINK_TAGS
    spelled: frozenset[int] = field(default=frozenset())

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that answers may call."""
        return self.schemas.tools

    @property
    def markers(self) -> tuple[str, ...]:
        """Spellings that mark the parts of an answer."""
        if self.channels:
            return CHANNEL_TAGS
        tags = self.tags.markers if self.splits else ()
        return (*tags, *(self.calls.markers if self.calls else ()))

    @property
    def judgement(self) -> Judgement:
        """How the tools judge calls.

        If the model must call, a grammar holds it to calls, so every tool streams. If it may call, a call of a strict
        tool is emitted when complete. If the answer has a form, every tool's call is: an object of that form may look
        like a call, and is one only if its arguments fit.
        """
        schemas = self.schemas
        if self.rules.form is not None:
            return Judgement(schemas.fits, lambda _: False, schemas.knows)
        return Judgement(schemas.accepts, schemas.takes_any if self.rules.tool_use is ToolUse.AUTO else schemas.knows)

    def spelling(self, token_ids: frozenset[int]) -> ReplyReader:
        """The same reader, with these control tokens spelled."""
        return replace(self, spelled=token_ids)

    def call_id(self, seq_id: str, index: int) -> str:
        """The id of a call of the choice with this id."""
        digest = blake2b(f"{seq_id}/{index}".encode(), digest_size=_ID_BYTES)
        length = self.calls.id_chars if self.calls else 0
        if not length:
            return f"call_{digest.hexdigest()}"
        number = int.from_bytes(digest.digest())
        return "".join(_LETTERS[number // len(_LETTERS) ** place % len(_LETTERS)] for place in range(length))

    def parser(self, seq_id: str) -> ReplyParser:
        """The parser of the choice with this id."""
        return ReplyParser(self, seq_id)


class _Parts(Protocol):
    """Parses the text of one choice.

    Attributes:
        ended: whether the answer is complete, whatever else the model would write.
        reasoning_end: number of characters of the answer so far that are reasoning.
        reasoning_over: whether no more reasoning can come.
    """

    @property
    def ended(self) -> bool: ...

    @property
    def reasoning_end(self) -> int: ...

    @property
    def reasoning_over(self) -> bool: ...

    def push(self, text: str) -> tuple[str, str, list[CallPart]]:
        """Parse the next piece of the answer; return final reasoning, final text and parts of calls."""
        ...

    def finish(self) -> tuple[str, str, list[CallPart]]:
        """End the answer; return what was held back."""
        ...


class _TaggedParts:
    """Reasoning between tags, then text and calls."""

    def __init__(
        self, split: ReasoningSplit | None, calls: CallParser | XmlCallParser | GemmaCallParser | None
    ) -> None:
        self._split, self._calls = split, calls

    @property
    def ended(self) -> bool:
        return self._calls is not None and self._calls.ended

    @property
    def reasoning_end(self) -> int:
        return self._split.end if self._split else 0

    @property
    def reasoning_over(self) -> bool:
        return self._split is None or self._split.over

    def push(self, text: str) -> tuple[str, str, list[CallPart]]:
        reasoning, rest = self._split.push(text) if self._split else ("", text)
        return reasoning, *(self._calls.push(rest) if self._calls else (rest, []))

    def finish(self) -> tuple[str, str, list[CallPart]]:
        reasoning, rest = self._split.finish() if self._split else ("", "")
        if self._calls is None:
            return reasoning, rest, []
        said, found = self._calls.push(rest)
        more, last = self._calls.finish()
        return reasoning, said + more, [*found, *last]


def _parts_of(reader: ReplyReader) -> _Parts:
    rules, schemas, judgement = reader.rules, reader.schemas, reader.judgement
    parallel = rules.parallel_tool_calls
    if reader.channels:
        return ChannelParser(judgement, splits=reader.splits, parallel=parallel)
    split = ReasoningSplit(opened=reader.opened, tags=reader.tags) if reader.splits else None
    if reader.calls is None:
        return _TaggedParts(split, None)
    if reader.calls is XML:
        return _TaggedParts(split, XmlCallParser(judgement, schemas.takes_text, schemas.knows, parallel=parallel))
    if reader.calls is GEMMA4:
        return _TaggedParts(split, GemmaCallParser(judgement, schemas.knows, parallel=parallel))
    name = rules.tool_name if rules.tool_use is ToolUse.NAMED else ""
    return _TaggedParts(split, CallParser(reader.calls, judgement, parallel=parallel, arguments_of=name))


class ReplyParser:
    """Parses one choice. Owned by that choice.

    Attributes:
        called: whether a call was found.
    """

    __slots__ = ("_id_chars", "_made", "_parts", "_reader", "_seq_id", "called")

    def __init__(self, reader: ReplyReader, seq_id: str) -> None:
        self.called = False
        self._reader = reader
        self._seq_id = seq_id
        self._made = 0
        self._parts = _parts_of(reader)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, whatever else the model would write."""
        return self._parts.ended

    @property
    def reasoning_end(self) -> int:
        """Number of characters of the answer so far that are reasoning."""
        return self._parts.reasoning_end

    @property
    def reasoning_over(self) -> bool:
        """Whether no more reasoning can come."""
        return self._parts.reasoning_over

    def push(self, text: str) -> ReplyPiece:
        """Parse the next piece of the choice's text."""
        return self._piece(*self._parts.push(text))

    def finish(self) -> ReplyPiece:
        """End the choice's text; return what was held back."""
        return self._piece(*self._parts.finish())

    def _piece(self, reasoning: str, text: str, parts: Sequence[CallPart]) -> ReplyPiece:
        if self._reader.rules.reasoning is ReasoningUse.HIDDEN:
            reasoning = ""
        pieces: list[CallPiece] = []
        for part in parts:
            if part.name:
                self._made += 1
            index = self._made - 1
            call_id = self._reader.call_id(self._seq_id, index) if part.name else ""
            pieces.append(CallPiece(index, call_id, part.name, part.arguments, part.text_before))
        self.called = self._made > 0
        return ReplyPiece(reasoning, text, tuple(pieces))
