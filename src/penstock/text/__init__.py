"""Characters to tokens and back: tokenizer, chat template, detokenizer, stop strings, and the parts of an answer.

Reads only the text half of model files, never tensors. Start at `open_text`.
"""

from __future__ import annotations

from penstock.text.chat_template import ChatTemplate
from penstock.text.control_tokens import ControlTokens, RenderedChat
from penstock.text.detokenizer import Detokenizer
from penstock.text.reply import ReplyFormat, ReplyParser, ReplyPiece, ReplyReader
from penstock.text.stop_strings import StopScan, StopStrings
from penstock.text.thinking import ReasoningBudgets
from penstock.text.tokenizer import TextModel, Tokenizer, open_text

__all__ = [
    "ChatTemplate",
    "ControlTokens",
    "Detokenizer",
    "RenderedChat",
    "ReplyFormat",
    "ReplyParser",
    "ReplyPiece",
    "ReplyReader",
    "StopScan",
    "StopStrings",
    "TextModel",
    "ReasoningBudgets",
    "Tokenizer",
    "open_text",
]
