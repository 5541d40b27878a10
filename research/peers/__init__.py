# SPDX-License-Identifier: Apache-2.0
"""Engines of others and ours in turn: the same model, prompts, and bytes of cache, on one core."""
