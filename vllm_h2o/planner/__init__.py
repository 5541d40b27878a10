"""How many sequences fit, from a model's config alone: no engine, no vLLM, no weights."""
