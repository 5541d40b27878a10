# SPDX-License-Identifier: Apache-2.0
"""Attention with scores, eviction and packing: ``reference`` is the truth, the rest fast twins."""
