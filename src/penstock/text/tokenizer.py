"""Converts text to tokens and back, exactly as the model was trained, and bundles a model's text side.

The reader of each file format builds the vocabulary. This module encodes a rendered conversation so that control
tokens come only from the chat template.

Does not know requests or streams. Invariants: ids equal those of the model's own tokenizer; immutable once built, so
safe to use from several threads at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from penstock.contract.errors import ConfigError, InvalidParameter
from penstock.contract.model import GgufVocabulary, TextFiles
from penstock.contract.request import ChatPrompt, Message
from penstock.contract.tools import ReplyRules, Tool
from penstock.rendering import shared_renderer
from penstock.text.chat_template import ChatTemplate
from penstock.text.control_tokens import ControlTokens, RenderedChat
from penstock.text.gguf_tokenizer import read_gguf
from penstock.text.huggingface import read_huggingface
from penstock.text.plain_template import PLAIN_TEMPLATE
from penstock.text.reply import PLAIN_FORMAT, ReplyFormat, ReplyReader, find_reply_format
from penstock.text.token_bytes import strips_leading_space, token_byte_table
from penstock.text.tokenizer_parts import TemplateSource, TokenizerParts
from penstock.text.unicode_text import require_unicode

__all__ = ["TextModel", "Tokenizer", "open_text", "twin_of"]

# Placeholders for a template's control tokens while the text around them is encoded: the 32 noncharacters of Unicode
# 23.7. They are not text, and user text that contains one is refused where it could be mistaken for a placeholder.
_NONCHARACTERS = range(0xFDD0, 0xFDF0)
_HAS_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")

_LONG_CHARS = 4096
"""From this length on, a text is encoded as a batch of one: `encode` would hold the GIL for a millisecond or more."""


class Tokenizer:
    """One model's tokenizer.

    Args:
        backend: the `tokenizers` pipeline; owned by this object from now on.
        file: where it came from, for errors.

    Raises:
        ModelFileError: the vocabulary is of a kind whose tokens are not bytes.
    """

    __slots__ = ("_backend", "_literal", "_pieces", "_place_ids", "_places", "_special", "_strips_leading_space")

    def __init__(self, backend: Backend, file: str) -> None:
        self._backend = backend
        self._pieces = token_byte_table(backend, file)
        self._strips_leading_space = strips_leading_space(backend)
        added = backend.get_added_tokens_decoder()
        self._special = {id_: token for id_, token in added.items() if token.special}
        # A second pipeline, because the switch that treats special tokens as ordinary text cannot be set per call.
        self._literal = twin_of(backend)
        self._literal.encode_special_tokens = True
        self._places = {id_: _place(token) for id_, token in self._special.items()}
        self._literal.add_tokens([_place(token) for token in self._special.values()])
        self._place_ids = frozenset(self._literal.token_to_id(place.content) for place in self._places.values())

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id. The model's logits may be wider: checkpoints pad them."""
        return len(self._pieces)

    @property
    def control_tokens(self) -> ControlTokens:
        """The spellings that this tokenizer reads as special tokens."""
        return ControlTokens(token.content for token in self._special.values())

    def is_special(self, token_id: int) -> bool:
        """Whether the token acts on the model (begin, end, turns) rather than being text."""
        return token_id in self._special

    def special_ids(self, spellings: Iterable[str]) -> frozenset[int]:
        """The special tokens with one of these spellings."""
        wanted = frozenset(spellings)
        return frozenset(id_ for id_, token in self._special.items() if token.content in wanted)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes: part of a character, or several characters; a leading space included.

        Special tokens give their spelling. Ids beyond the vocabulary, which padded logits have, give no bytes.
        """
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def encode(self, text: str, *, param: str = "prompt", most: int = 0) -> tuple[int, ...]:
        """Encode raw text. Special tokens spelled in it are honoured; BOS is added if the model's tokenizer adds it.

        Args:
            text: the text to encode.
            param: the field that the text came in, for errors.
            most: keep at most this many ids, like truncation in transformers: the text's first ids, and all that the
                tokenizer adds around them. 0 keeps all.

        Raises:
            InvalidParameter: the text has a lone surrogate; names `param`. Or `most` is less than the number of tokens
                that the tokenizer adds around a text; names `truncate_prompt_tokens`.
        """
        encoding = self._encode(self._backend, text, param, add_special_tokens=True)
        ids = tuple(encoding.ids)
        return ids if not 0 < most < len(ids) else _cut(ids, encoding.special_tokens_mask, most)

    def spellings(self, text: str, *, param: str) -> tuple[tuple[int, ...], ...]:
        """The encodings that `text` may have inside other text: as it is, and after a space.

        Raises:
            InvalidParameter: the text has a lone surrogate; names `param`.
        """
        texts = (text, " " + text.lstrip()) if text.strip() else (text,)
        spelled = [self._encode(self._backend, each, param, add_special_tokens=False).ids for each in texts]
        return tuple(dict.fromkeys(tuple(ids) for ids in spelled if ids))

    def longest_matches(self, text: str) -> tuple[int, ...]:
        """Cover `text` greedily with the longest ordinary tokens; return their ids, or () if that fails."""
        rest, ids = text.encode(), []
        fitting = {p: id_ for id_, p in reversed(list(enumerate(self._pieces))) if p and p in rest}
        fitting = {piece: id_ for piece, id_ in fitting.items() if id_ not in self._special}
        while rest:
            piece = max(filter(rest.startswith, fitting), key=len, default=b"")
            if not piece:
                return ()
            ids.append(fitting[piece])
            rest = rest[len(piece) :]
        return tuple(ids)

    def tokens_with(self, text: str) -> tuple[int, ...]:
        """The ids of all tokens whose own text contains `text`, ascending."""
        sought = text.encode()
        return tuple(id_ for id_, piece in enumerate(self._pieces) if sought in piece)

    def encode_chat(self, chat: RenderedChat) -> tuple[int, ...]:
        """Encode a rendered conversation. Only control tokens that the template wrote become control tokens.

        No BOS is added: a template writes its own.

        Raises:
            InvalidParameter: the messages have a lone surrogate, have a control token and one of U+FDD0 to U+FDEF, or
                spell a control token that this tokenizer cannot write as ordinary text.
        """
        encoding = self._encode(self._backend, chat.template_text, "messages", add_special_tokens=False)
        if not chat.stand_ins:
            return tuple(encoding.ids)
        if _HAS_NONCHARACTER.search(chat.template_text):
            raise InvalidParameter("messages", "control tokens cannot be mixed with the noncharacters U+FDD0 to U+FDEF")
        controls = self._controls(encoding, chat.template_text)
        literal = chat.restore(self._with_places(chat.template_text, controls))
        return self._fill_places(literal, [id_ for id_, _ in controls])

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids that are a whole text: SentencePiece's leading dummy space is dropped.

        Invalid UTF-8 becomes U+FFFD, one for each maximal subpart (Unicode 3.9).
        """
        kept = (id_ for id_ in token_ids if not (skip_special_tokens and id_ in self._special))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips_leading_space else text

    def _controls(self, encoding: Encoding, text: str) -> list[tuple[int, tuple[int, int]]]:
        """The control tokens spelled in the text, as (id, span).

        The unknown token is special too, but an unknown character does not spell it.
        """
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [(id_, span) for id_, span in pairs if self._spells(id_, text[slice(*span)])]

    def _spells(self, id_: int, part: str) -> bool:
        return id_ in self._special and self._special[id_].content in part

    def _with_places(self, text: str, controls: Sequence[tuple[int, tuple[int, int]]]) -> str:
        """The text with each control token, in order and disjoint, replaced by its placeholder."""
        pieces: list[str] = []
        done = 0
        for id_, span in controls:
            spelling = self._special[id_].content
            start = text.index(spelling, *span)  # the span may include spaces that the token strips
            pieces += [text[done:start], self._places[id_].content]
            done = start + len(spelling)
        return "".join([*pieces, text[done:]])

    def _fill_places(self, literal: str, controls: Sequence[int]) -> tuple[int, ...]:
        """Encode everything as ordinary text except the placeholders, which become `controls` in order."""
        encoding = self._encode(self._literal, literal, "messages", add_special_tokens=False)
        if self._controls(encoding, literal):
            raise InvalidParameter(
                "messages", "they spell a control token that this tokenizer has no other way to write"
            )
        ids = list(encoding.ids)
        places = [index for index, id_ in enumerate(ids) if id_ in self._place_ids]
        for index, control in zip(places, controls, strict=True):
            ids[index] = control
        return tuple(ids)

    @staticmethod
    def _encode(backend: Backend, text: str, param: str, *, add_special_tokens: bool) -> Encoding:
        require_unicode(text, param)
        if len(text) < _LONG_CHARS:
            return backend.encode(text, add_special_tokens=add_special_tokens)
        return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _cut(ids: tuple[int, ...], added: Sequence[int], most: int) -> tuple[int, ...]:
    """Drop the text's last ids so that `most` ids are left; `added` is 1 for ids that the tokenizer added around it."""
    around = sum(added)
    if around > most:
        message = f"must be at least {around}: this model's tokenizer puts so many tokens around a text, got {most}"
        raise InvalidParameter("truncate_prompt_tokens", message)
    end = len(ids) - next((place for place, each in enumerate(reversed(added)) if not each), 0)
    return ids[: end - (len(ids) - most)] + ids[end:]


def _place(token: AddedToken) -> AddedToken:
    """The placeholder that is matched like `token`: same rules for spaces, word boundaries and normalisation."""
    rule = (token.single_word, token.lstrip, token.rstrip, token.normalized)
    spelling = chr(_NONCHARACTERS[sum(flag << bit for bit, flag in enumerate(rule))])
    single_word, lstrip, rstrip, normalized = rule
    return AddedToken(spelling, single_word=single_word, lstrip=lstrip, rstrip=rstrip, normalized=normalized)


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model's text side.

    Attributes:
        chat_template: None when the model has none.
        eos_token_ids: ids that end a generated text.
        bos_token_id: None when the model has none.
        reply_format: how the model writes calls and reasoning.
        tool_template: renders conversations with tools; None if `chat_template` renders all.
        plain: whether `chat_template` is the plain-text template, because the model has none of its own.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    reply_format: ReplyFormat = PLAIN_FORMAT
    tool_template: ChatTemplate | None = None
    plain: bool = False

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that a caller may set whichever template renders the conversation."""
        templates = [template for template in (self.chat_template, self.tool_template) if template is not None]
        return frozenset.intersection(*(template.variables for template in templates)) if templates else frozenset()

    def encode_messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Encode the prompt that asks the model for the next assistant turn.

        Raises:
            InvalidParameter: the model has no chat template, or it refuses the conversation.
        """
        return self.tokenizer.encode_chat(self.render(ChatPrompt(tuple(messages))))

    def render(self, prompt: ChatPrompt, tenant: str = "") -> RenderedChat:
        """Render the conversation with the model's chat template, for a tenant.

        Raises:
            InvalidParameter: the model has no chat template, or it refuses the conversation.
            Overloaded: see `ChatTemplate.render_prompt`.
        """
        if self.chat_template is None:
            raise InvalidParameter(
                "messages", "this model has no chat template; send a raw prompt instead", code="no_chat_template"
            )
        template = self.tool_template if prompt.tools and self.tool_template else self.chat_template
        return template.render_prompt(prompt, tenant)

    def reply_reader(self, prompt: ChatPrompt, rules: ReplyRules, rendered: RenderedChat) -> ReplyReader | None:
        """The reader that parses the answers to a rendered conversation; None when they are plain text.

        Raises:
            InvalidParameter: the tools cannot be offered or checked.
        """
        return self._spelling(self.reply_format.reader(prompt, rules, rendered.text))

    def reply_reader_of(self, tools: tuple[Tool, ...], rules: ReplyRules, *, opened: bool) -> ReplyReader | None:
        """As `reply_reader`; see `ReplyFormat.reader_of`."""
        return self._spelling(self.reply_format.reader_of(tools, rules, opened=opened))

    def _spelling(self, reader: ReplyReader | None) -> ReplyReader | None:
        return reader and reader.spelling(self.tokenizer.special_ids(reader.markers))


def twin_of(backend: Backend) -> Backend:
    """A copy of a pipeline, with switches of its own. Both share the vocabulary, which may take 100 MB."""
    twin = Backend(backend.model)
    twin.normalizer = backend.normalizer
    twin.pre_tokenizer = backend.pre_tokenizer
    twin.post_processor = backend.post_processor
    twin.decoder = backend.decoder
    for _, token in sorted(backend.get_added_tokens_decoder().items()):  # added tokens get their ids in this order
        (twin.add_special_tokens if token.special else twin.add_tokens)([token])
    return twin


def open_text(
    files: TextFiles, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto", chat_template: str = "none"
) -> TextModel:
    """Read a model's tokenizer and chat template.

    Args:
        files: the text half of the model's files.
        tool_call_parser: how the model writes calls; see `EngineConfig`.
        reasoning_parser: how the model writes its reasoning; see `EngineConfig`.
        chat_template: a file to read the template from; or what a model without one gets: `auto` for the plain-text
            template, `none` for none.

    Raises:
        ModelFileError: a file is missing, corrupt, or of a kind that is not implemented.
        ConfigError: the file named by `chat_template` cannot be read, or there is no such `tool_call_parser`.
    """
    shared_renderer().start()  # starts up while the vocabulary is read
    parts = read_gguf(files) if isinstance(files, GgufVocabulary) else read_huggingface(files)
    tokenizer = Tokenizer(parts.backend, parts.file)
    parts, plain = _with_template(parts, chat_template)
    template = _chat_template(parts.template, parts, tokenizer)
    tool_template = _chat_template(parts.tool_template, parts, tokenizer)
    return TextModel(
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=parts.eos,
        bos_token_id=parts.bos if parts.bos >= 0 else None,
        reply_format=find_reply_format(tool_call_parser, reasoning_parser, tool_template or template),
        tool_template=tool_template,
        plain=plain,
    )


def _with_template(parts: TokenizerParts, choice: str) -> tuple[TokenizerParts, bool]:
    """The parts with the chosen chat template, and whether it is the plain-text one."""
    if choice not in ("auto", "none"):
        return replace(parts, template=_template_in(Path(choice).expanduser()), tool_template=None), False
    if choice == "auto" and parts.template is None:
        return replace(parts, template=TemplateSource(PLAIN_TEMPLATE, "the plain-text template")), True
    return parts, False


def _template_in(file: Path) -> TemplateSource:
    try:
        return TemplateSource(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("chat_template", f"{file} cannot be read as text; give auto, none or a file") from error


def _chat_template(template: TemplateSource | None, parts: TokenizerParts, tokenizer: Tokenizer) -> ChatTemplate | None:
    if template is None:
        return None
    return ChatTemplate(
        template.source,
        file=template.file,
        key=template.key,
        special_tokens=parts.special_tokens,
        control_tokens=tokenizer.control_tokens,
    )
