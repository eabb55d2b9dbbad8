"""Penstock as a library, with the ecosystem's names: `LLM` for batches and stepping by hand, `AsyncLLM` for streams.

Thin by design: converts prompts and results; everything else happens in the engine that `app` assembles. The
public names are exported by `penstock` itself.
"""
