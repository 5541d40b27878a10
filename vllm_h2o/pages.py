# SPDX-License-Identifier: Apache-2.0
"""Rounds slots up to pages, in one place for scheduler, workers and planner."""

from __future__ import annotations


def num_pages(num_slots: int, block_size: int) -> int:
    """Pages of ``block_size`` slots that hold ``num_slots`` slots."""
    return -(-num_slots // block_size)
