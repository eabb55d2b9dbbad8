"""RoBERTa: `model_type` "roberta" (Liu et al. 2019), an encoder, for embeddings only.

BERT's layers. Position numbers start after the padding token's id, as in fairseq. A text that contains the padding
token itself is embedded like any other text; transformers gives that token no position of its own.
"""

from __future__ import annotations

from penstock.models.bert import load_encoder
from penstock.models.config_reader import MAX_POSITIONS, ConfigReader
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    padding = reader.integer("pad_token_id", 0, MAX_POSITIONS, default=1)
    return load_encoder(reader, weights, prefix="roberta.", first_position=padding + 1)
