"""The next turn of a conversation: what an earlier request holds, in order, in other pages."""

from __future__ import annotations

import torch

from tests.kernels.caches import Shape, filled
from tests.kernels.one_head import Inputs, causal, close, head, run
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.kernels.torch.turn import HeldTokens

SHAPE = Shape(num_kv_heads=3, group=1, head_size=32, block_size=8)
NUM_SLOTS = 29


def held_by(cache: LayerCache, blocks: torch.Tensor, one: int, num_slots: int) -> Strip:
    """What one KV head holds."""
    rows = cache_rows(blocks, cache.num_kv_heads)[one]
    views = (cache.key, cache.value, cache.score, cache.position)
    key, value, score, position = (view[rows].flatten(0, 1)[:num_slots] for view in views)
    return Strip(key, value, score, position.long())


def test_copies_are_in_order_and_pages_may_be_written_to() -> None:
    """Twin of ``Strip.in_order``, of two requests one of which takes the other's pages."""
    cache = filled(SHAPE, 12, seed=3)
    for row in range(len(cache.position)):  # each slot another position, in no order
        order = torch.randperm(8, generator=torch.Generator().manual_seed(row))
        cache.position[row] = (row // 3 * 8 + order).int()
    sources = [torch.tensor(ids) for ids in ((5, 2, 9, 1), (3, 4, 10, 7))]
    targets = [torch.tensor(ids) for ids in ((3, 11, 2, 5), (6, 4, 8, 0))]
    wanted = [
        [held_by(cache, blocks, one, NUM_SLOTS).in_order() for one in range(3)]
        for blocks in sources
    ]
    held = [HeldTokens.of(cache, blocks, NUM_SLOTS) for blocks in sources]
    for tokens, blocks in zip(held, targets, strict=True):
        tokens.store(cache, blocks)
    for blocks, strips in zip(targets, wanted, strict=True):
        for one, strip in enumerate(strips):
            found = held_by(cache, blocks, one, NUM_SLOTS)
            for name in ("key", "value", "score", "position"):
                assert torch.equal(getattr(found, name), getattr(strip, name)), name


def test_free_slots_are_left_out() -> None:
    """Of each KV head another page is the victim; its last three tokens are gone."""
    cache = filled(SHAPE, 4, seed=3)
    blocks = torch.arange(4)
    for one in range(3):
        rows = cache_rows(blocks, 3)[one]
        cache.position[rows] = torch.arange(32).view(4, 8).int()
    victims = torch.tensor([0, 16, 8], dtype=torch.int32)
    held = HeldTokens.of(cache, blocks, 32, num_free_slots=3, victims=victims)
    for one, victim in enumerate(victims.tolist()):
        kept = [*range(victim + 5), *range(victim + 8, 32)]
        assert held.views[3][one].tolist() == kept


def test_a_window_s_lifetime_is_over() -> None:
    """Of the prompt's tokens, and of no others; afterwards all scores are without a window."""
    cache = filled(SHAPE, 4, seed=3)
    cache = LayerCache(
        cache.key, cache.value, cache.score, cache.position, 3,
        score_without_window=torch.full_like(cache.score, 9.0),
    )  # fmt: skip
    cache.position[:] = torch.arange(32).view(4, 1, 8).expand(4, 3, 8).reshape(12, 8).int()
    held = HeldTokens.of(cache, torch.arange(4), 32, restored_end=20)
    score, without = held.views[2], held.views[4]
    assert (score[:, :20] == 9.0).all() and (score[:, 20:] != 9.0).all()
    assert torch.equal(score, without)
    kept = HeldTokens.of(cache, torch.arange(4), 32)
    assert (kept.views[2] != 9.0).all() and torch.equal(kept.views[2], kept.views[4])


def test_a_conversation_is_attention_to_what_is_left() -> None:
    """By the definition: a second turn is a prompt after all that is held; then C - 1 stay."""
    inputs, one = Inputs.draw(34), head(capacity=12, num_recent=4)
    first = Inputs(inputs.query[:25], inputs.key[:25], inputs.value[:25])
    run(one, first, [20])
    before = set(one.strip.position.tolist())
    assert one.victim is not None and len(before) == 12
    one.begin_turn()
    assert one.strip.position.tolist() == sorted(before)
    new = slice(25, 34)
    out = one.step(inputs.query[new], inputs.key[new], inputs.value[new], ends_prompt=True)
    visible = causal(34)
    visible[new, [token for token in range(25) if token not in before]] = False
    close(out, inputs.attend(visible)[new])
    after = set(one.strip.position.tolist())
    assert len(after) == 11 and after <= before | set(range(25, 34)) and set(range(30, 34)) <= after
    assert one.victim is None and not one.in_prompt
