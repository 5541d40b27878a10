"""Pages and bytes that sequences take: counted here for the engine's log and for the planner."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h2o.pages import num_pages

SCORE_AND_POSITION_BYTES = 8
"""float32 score and int32 position of one slot of one KV head."""


def slot_extra_bytes(extra_words: int = 0) -> int:
    """What a slot of one KV head holds next to K and V: score, position and so many words more."""
    return SCORE_AND_POSITION_BYTES + 4 * extra_words


@dataclass(frozen=True)
class Pool:
    """The pages of a memory.

    Args:
        num_blocks: pages, among them the null page, which is nobody's.
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

    def num_sequences(self, num_slots: int) -> int:
        """Sequences of ``num_slots`` slots that fit at once."""
        return self.num_pages // self.pages_of(num_slots)


@dataclass(frozen=True)
class CacheShape:
    """What a model keeps of each token.

    Args:
        num_layers: layers that keep K and V.
        num_kv_heads: KV heads of a layer.
        head_size: elements of K, and of V, of one head.
        element_size: bytes of an element.

    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    element_size: int

    @property
    def stock_slot_bytes(self) -> int:
        """Bytes of a token in all layers: K and V."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_size * self.element_size

    def slot_bytes(self, extra_words: int = 0) -> int:
        """Bytes of a token in all layers: K, V, score, position, and what a policy may add."""
        extra = slot_extra_bytes(extra_words)
        return self.stock_slot_bytes + self.num_layers * self.num_kv_heads * extra
