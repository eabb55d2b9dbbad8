"""From a parsed request through the engine to the bytes of its answer."""
