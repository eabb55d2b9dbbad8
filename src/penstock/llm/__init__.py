"""Penstock as a library, in the ecosystem's names: `LLM` for batches and for stepping by hand, `AsyncLLM` for streams.

Thin by design: prompts and results are shaped here, everything else happens in the engine that `app` assembles. The
public names are exported by `penstock` itself.
"""
