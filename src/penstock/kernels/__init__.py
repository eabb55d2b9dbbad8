"""Tensor operations; each has a plain torch reference with the same signature."""
