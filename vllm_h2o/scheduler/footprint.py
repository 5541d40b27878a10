# SPDX-License-Identifier: Apache-2.0
"""Pages and bytes that sequences take: counted here for the engine's log and for the planner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_h2o.pages import num_pages

SCORE_AND_POSITION_BYTES = 8
"""float32 score and int32 position of one slot of one KV head."""


def slot_extra_bytes(extra_words: int = 0) -> int:
    """Bytes of a slot of one KV head next to K and V: score, position and ``extra_words``."""
    return SCORE_AND_POSITION_BYTES + 4 * extra_words


@dataclass(frozen=True)
class Pool:
    """The pages of a memory.

    Args:
        num_blocks: pages, among them the null page, which no sequence holds.
        block_size: slots of a page.

    """

    num_blocks: int
    block_size: int

    @property
    def num_pages(self) -> int:
        """Pages that sequences can hold."""
        return max(self.num_blocks - 1, 0)

    def pages_of(self, num_slots: int) -> int:
        """Pages that hold ``num_slots`` slots."""
        return num_pages(num_slots, self.block_size)

    def num_sequences(self, num_slots: int, num_others: int = 0) -> int:
        """Sequences of ``num_slots`` slots and ``num_others`` more pages that fit at once."""
        return self.num_pages // (self.pages_of(num_slots) + num_others)

    def pages_of_windows(self, sizes: Iterable[int], max_len: int, in_flight: int) -> int:
        """Most pages that a sequence past its prompt holds in layers with a sliding window.

        Args:
            sizes: tokens of the window, of each group of such layers.
            max_len: longest sequence, in tokens.
            in_flight: steps in flight: vLLM keeps the pages that the first of them reads.

        """
        lengths = [min(size - 1 + in_flight, max_len) for size in sizes]
        # A window begins anywhere in a page.
        return sum(min(self.pages_of(n - 1) + 1, self.pages_of(max_len)) for n in lengths)

    def pages_of_windows_in_prompts(self, sizes: Iterable[int], max_len: int, chunks: int) -> int:
        """The same with chunks of a prompt in flight: vLLM reserves these pages, and one more.

        Args:
            sizes: tokens of the window, of each group of such layers.
            max_len: longest sequence, in tokens.
            chunks: most tokens in flight.

        """
        return sum(self.pages_of(min(size - 1 + chunks, max_len)) + 1 for size in sizes)


@dataclass(frozen=True)
class CacheShape:
    """The KV cache of a model, for each token.

    Args:
        num_layers: layers that keep K and V; next to layers of other kinds, the layers of one
            group, which share pages.
        num_kv_heads: KV heads of a layer.
        head_size: elements of K, and of V, of one head.
        element_size: bytes of an element.
        windows: tokens of the window, of each group of as many layers that slide.
        num_states: groups of as many layers that keep states.
        state_bytes: bytes of a state of one layer.

    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    element_size: int
    windows: tuple[int, ...] = ()
    num_states: int = 0
    state_bytes: int = 0

    def pool(self, num_bytes: int, block_size: int, slot_bytes: int) -> Pool:
        """The pages of a memory, which vLLM enlarges until one covers a state.

        Args:
            num_bytes: of the memory.
            block_size: slots of a page without states.
            slot_bytes: bytes of a slot of all layers.

        """
        least = max(num_pages(self.state_bytes * self.num_layers, slot_bytes * block_size), 1)
        slots = least * block_size
        return Pool(num_bytes // (slot_bytes * slots), slots)

    @property
    def stock_slot_bytes(self) -> int:
        """Bytes of a token in these layers: K and V."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_size * self.element_size

    def slot_bytes(self, extra_words: int = 0) -> int:
        """Bytes of a token in these layers: K, V, score, position and ``extra_words``."""
        extra = slot_extra_bytes(extra_words)
        return self.stock_slot_bytes + self.num_layers * self.num_kv_heads * extra


def row_bytes(num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Bytes that vLLM's model runner keeps for the rows of its batch, however short they are.

    A row has the id of each token, a flag, and the id of each page on the host and the device.

    Args:
        num_seqs: most sequences of a step.
        max_model_len: tokens of the longest.
        block_size: slots of a page.

    """
    return num_seqs * (5 * max_model_len + 8 * num_pages(max_model_len, block_size))
