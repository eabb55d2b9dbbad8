"""One file per model family, found by its `model_type`."""
