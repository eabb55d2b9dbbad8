"""XLM-RoBERTa: `model_type` "xlm-roberta" (Conneau et al. 2020). RoBERTa with a vocabulary of a hundred languages."""

from __future__ import annotations

from penstock.models.roberta import load

__all__ = ["load"]
