"""HTTP: OpenAI shapes, SSE, validation, health. Knows contract and sampling only."""
