"""Engines of others and ours in turn: the same model, prompts, and bytes of cache, on one core."""
