"""Count the sequences that fit, from a model's config: no engine, no vLLM, no weights."""
