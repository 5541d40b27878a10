"""Attention with scores, eviction and packing: ``reference`` is the truth, the rest fast twins."""
