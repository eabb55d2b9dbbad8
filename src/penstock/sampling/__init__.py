"""One file per sampling parameter; validation, documentation and the sampler derive from them."""
