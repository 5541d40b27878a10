# SPDX-License-Identifier: Apache-2.0
"""H2O (Heavy-Hitter Oracle) KV-cache eviction inside vLLM's paged KV cache."""

__version__ = "0.1.0"
