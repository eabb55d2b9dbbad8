"""Characters to tokens and back: tokenizer, chat template, incremental detokenizer, stop strings."""
