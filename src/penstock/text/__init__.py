"""Characters to tokens and back: tokenizer, chat template, incremental detokenizer, stop strings.

Knows model files by their text half only, and no tensors. Start at `open_text`.
"""

from __future__ import annotations

from penstock.text.chat_template import ChatTemplate
from penstock.text.control_tokens import ControlTokens, RenderedChat
from penstock.text.detokenizer import Detokenizer
from penstock.text.stop_strings import StopScan, StopStrings
from penstock.text.tokenizer import TextModel, Tokenizer, open_text

__all__ = [
    "ChatTemplate",
    "ControlTokens",
    "Detokenizer",
    "RenderedChat",
    "StopScan",
    "StopStrings",
    "TextModel",
    "Tokenizer",
    "open_text",
]
