"""Attention with scores, eviction and packing: ``reference`` is the truth, the rest are fast twins."""
