# SPDX-License-Identifier: Apache-2.0
"""Counts programs of a decode step on a GPU, and the bytes of what each hands to the next launch.

Pure Python: the kernels allocate so much, and the engine counts it before it makes pages.
"""

PROGRAMS = 4
"""Programs of a decode step that a multiprocessor has registers for."""


def most_programs(num_processors: int, max_requests: int, num_kv_heads: int) -> int:
    """Programs of any batch, at most: those that run at once and half as many spare ones.

    Args:
        num_processors: multiprocessors of the device.
        max_requests: of a batch, each of which has a program of every KV head.
        num_kv_heads: H.

    """
    return 3 * PROGRAMS * num_processors // 2 + max_requests * num_kv_heads


def left_bytes(num_programs: int, group: int, head_size: int) -> int:
    """Bytes of means of V, largest logits and sums; of nearest keys and of candidates for eviction.

    Args:
        num_programs: of a batch.
        group: query heads of a KV head.
        head_size: D.

    """
    of_group, nearest, candidate = group * (head_size + 2), 2, 3
    return 4 * num_programs * (of_group + nearest + candidate)
