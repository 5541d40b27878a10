"""H2O (Heavy-Hitter Oracle) KV-cache eviction inside vLLM's paged KV cache."""

__version__ = "0.1.0"
