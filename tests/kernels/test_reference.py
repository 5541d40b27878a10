# SPDX-License-Identifier: Apache-2.0
"""The reference, compared with statements of the definition that share no code with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.one_head import (
    SCALE,
    Inputs,
    budget,
    causal,
    close,
    head,
    run,
    same,
    strip,
)
from vllm_h2o.kernels.reference import (
    Head,
    Rolling,
    attend_and_score,
    pack_survivors,
    select_victim,
)
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Eviction


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("chunks", [[12], [1, 4, 7], [20]])
def test_room_enough_is_full_attention(group: int, chunks: list[int]) -> None:
    """Without eviction outputs are torch's causal attention, and scores its column sums."""
    inputs, one = Inputs.draw(20, group), head(capacity=21, num_recent=10)
    outputs, held = run(one, inputs, chunks)
    close(outputs, inputs.attend(causal(20)))
    assert held[-1] == set(range(20)) and one.victim is None
    close(one.strip.score, inputs.probabilities(causal(20)).sum(dim=(0, 1)))
    close(one.strip.score.sum(), torch.tensor(20.0 * group, dtype=torch.float64))


@pytest.mark.parametrize(("num_sinks", "name"), [(0, "local"), (4, "streaming")])
def test_no_heavy_hitters_is_a_window(num_sinks: int, name: str) -> None:
    """With H = 0 a token sees the sinks, the R before it and itself, like torch under that mask."""
    capacity, prompt, num_tokens = 12, 15, 50
    num_recent = capacity - 1 - num_sinks
    inputs, one = Inputs.draw(num_tokens), head(capacity, num_recent, num_sinks, power=0)
    outputs, held = run(one, inputs, [prompt])
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    window = (key >= query - num_recent) | (key < num_sinks) | (query < prompt)
    close(outputs, inputs.attend(causal(num_tokens) & window))
    sinks = set(range(num_sinks))
    assert held[0] == sinks | set(range(prompt - num_recent, prompt))
    for position, after in enumerate(held[1:], start=prompt):
        assert after == sinks | set(range(position - num_recent, position + 1))


def by_definition(
    inputs: Inputs, prompt: int, num_heavy: int, num_recent: int, num_sinks: int, ramp: int = 99
) -> tuple[torch.Tensor, list[set[int]], torch.Tensor]:
    """The paper as a mask over positions: what is not kept is never visible again.

    The recent window begins with ``ramp`` tokens.

    Returns:
        Outputs; positions visible to each decoded token; scores of all positions at the end.

    """
    num_tokens = inputs.key.shape[0]
    visible = causal(num_tokens)
    score = inputs.probabilities(visible)[:prompt].sum(dim=(0, 1))
    kept, seen = set(range(prompt)), []
    for position in range(prompt, num_tokens):
        if len(kept) > num_sinks + num_heavy + num_recent:
            recent = min(num_recent, ramp + position - prompt)
            safe = {j for j in kept if j < num_sinks or j >= position - recent}
            ranked = sorted(kept - safe, key=lambda j: (-float(score[j]), j))
            kept = safe | set(ranked[: num_heavy + num_recent - recent])
        kept = kept | {position}
        visible[position] = False
        visible[position, list(kept)] = True
        score = score + inputs.probabilities(visible)[position].sum(0)
        seen.append(set(kept))
    return inputs.attend(visible), seen, score


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("prompt", [1, 8, 9, 10, 25])
@pytest.mark.parametrize(
    ("num_heavy", "num_recent", "num_sinks"), [(4, 5, 0), (9, 0, 0), (3, 4, 2), (1, 8, 0)]
)
def test_heavy_hitters_as_a_mask(
    group: int, prompt: int, num_heavy: int, num_recent: int, num_sinks: int
) -> None:
    """Replacing one victim a step is keeping sinks, R recent and the top H, as the paper masks."""
    inputs = Inputs.draw(45, group, seed=prompt)
    one = head(num_sinks + num_heavy + num_recent + 1, num_recent, num_sinks)
    outputs, held = run(one, inputs, [prompt])
    expected, seen, score = by_definition(inputs, prompt, num_heavy, num_recent, num_sinks)
    assert held[1:] == seen
    close(outputs, expected)
    close(one.strip.score, score[one.strip.position])


@pytest.mark.parametrize("prompt", [1, 9, 10, 25])
@pytest.mark.parametrize("ramp", [0, 2, 5])
def test_a_recent_window_that_begins_small(prompt: int, ramp: int) -> None:
    """A prompt's last tokens compete with all others; each later token widens the window by one."""
    inputs, one = Inputs.draw(45, seed=prompt), head(10, 5, 1)
    one.budget = replace(one.budget, first_recent=ramp)
    outputs, held = run(one, inputs, [prompt])
    expected, seen, _ = by_definition(inputs, prompt, 3, 5, 1, ramp)
    assert held[1:] == seen
    close(outputs, expected)
    whole = head(10, 5, 1)
    assert run(whole, inputs, [prompt])[1] != held or prompt < 10 or ramp == 5


def uniform(capacity: int, num_recent: int, prompt: int, num_tokens: int) -> Head:
    """A head after tokens whose queries are zero: all probabilities are 1 / (slots in use)."""
    inputs = Inputs.draw(num_tokens)
    inputs.query = inputs.query * 0
    one = head(capacity, num_recent)
    run(one, inputs, [prompt])
    return one


def test_reference_equals_a_calculation_by_hand() -> None:
    """C = 4, H = 2, R = 1, three prompt tokens: sums of thirds and quarters done on paper."""
    prompt = [1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]
    one = uniform(4, 1, prompt=3, num_tokens=4)
    assert one.strip.position.tolist() == [0, 1, 2, 3]
    assert one.strip.score.tolist() == pytest.approx([s + 1 / 4 for s in [*prompt, 0]])
    assert one.victim == 2  # 3 is recent
    one = uniform(4, 1, prompt=3, num_tokens=5)
    assert one.strip.position.tolist() == [0, 1, 4, 3]
    assert one.strip.score.tolist() == pytest.approx(
        [prompt[0] + 1 / 2, prompt[1] + 1 / 2, 1 / 4, 1 / 2]
    )
    assert one.victim == 3  # position 3, the lowest but for 4, which is recent
    assert uniform(4, 1, prompt=3, num_tokens=6).strip.position.tolist() == [0, 1, 4, 5]


def test_new_token_may_be_the_victim() -> None:
    """With R = 0 a token that draws less attention than all others lasts for one step."""
    for num_tokens in (4, 5, 9):
        one = uniform(4, 0, prompt=3, num_tokens=num_tokens)
        assert one.strip.position.tolist() == [0, 1, 2, num_tokens - 1]
        assert one.victim == 3


@pytest.mark.parametrize(
    ("scores", "positions", "num_recent", "num_sinks", "victim"),
    [
        ([3, 1, 2, 0], [0, 1, 2, 3], 1, 0, 1),
        ([3, 1, 2, 0], [0, 1, 2, 3], 0, 0, 3),
        ([3, 1, 2, 0], [0, 1, 2, 3], 1, 2, 2),
        ([1, 1, 1, 0], [0, 1, 2, 3], 1, 0, 2),
        ([1, 1, 1, 0], [2, 1, 0, 3], 1, 0, 0),
        ([5, 1, 1, 9], [9, 4, 6, 2], 1, 0, 2),
        ([0, 0, 0, 0], [0, 1, 2, 3], 0, 3, 3),
    ],
)
def test_victim_has_the_lowest_score_and_newest_position(
    scores: list[float], positions: list[int], num_recent: int, num_sinks: int, victim: int
) -> None:
    """The lowest score that is neither sink nor recent; a tie goes against the newer position."""
    held, end = strip(scores, positions), max(positions) + 1
    assert select_victim(held, end, budget(len(scores), num_recent, num_sinks)) == victim


@pytest.mark.parametrize(
    ("scores", "keep", "num_recent", "num_sinks", "survivors"),
    [
        ([1, 5, 2, 4, 3, 0], 3, 1, 0, [1, 3, 5]),
        ([1, 5, 2, 4, 3, 9], 3, 0, 0, [1, 3, 5]),
        ([0, 5, 2, 4, 3, 0], 4, 1, 1, [0, 1, 3, 5]),
        ([0, 0, 9, 9, 0, 0], 2, 2, 0, [4, 5]),
        ([1, 1, 1, 1, 1, 1], 3, 1, 0, [0, 1, 5]),
        ([2, 1, 1, 1, 2, 0], 4, 1, 0, [0, 1, 4, 5]),
        ([9, 9, 9, 9, 9, 9], 4, 1, 3, [0, 1, 2, 5]),
    ],
)
def test_packing_keeps_sinks_recent_and_best_tokens(
    scores: list[float], keep: int, num_recent: int, num_sinks: int, survivors: list[int]
) -> None:
    """Sinks, the window and the best of the rest survive whole, in order; of equals the older."""
    packed = pack_survivors(strip(scores), 6, budget(keep + 1, num_recent, num_sinks))
    same(packed, strip([scores[i] for i in survivors], survivors))


@pytest.mark.parametrize(("prompt", "after"), [(1, 1), (8, 8), (9, 9), (10, 9), (40, 9)])
def test_packing_at_a_prompts_end_keeps_the_budget(prompt: int, after: int) -> None:
    """With C = 10, k = 9: nothing is dropped from n <= k, and k stay of n = k + 1 and of many."""
    one = head(10, 4)
    _, held = run(one, Inputs.draw(prompt), [prompt])
    assert len(held[-1]) == after and not one.in_prompt and one.victim is None
    assert set(range(max(prompt - 4, 0), prompt)) <= held[-1]


@pytest.mark.parametrize("chunks", [[30], [1] * 30, [1, 9, 20], [25, 5]])
def test_chunks_do_not_matter(chunks: list[int]) -> None:
    """A prompt is kept whole to its end, so its chunks change no output, score or survivor."""
    inputs, one, other = Inputs.draw(50, group=2), head(10, 4), head(10, 4)
    outputs, held = run(one, inputs, chunks)
    expected, held_too = run(other, inputs, [13, 17])
    close(outputs, expected)
    assert held[len(chunks) - 1 :] == held_too[1:]
    assert [len(after) for after in held[: len(chunks) - 1]] == torch.tensor(chunks[:-1]).cumsum(
        0
    ).tolist()
    close(one.strip.score, other.strip.score)


def test_group_is_summed() -> None:
    """A GQA group scores the sum of what its heads would score alone, and attends like each."""
    inputs = Inputs.draw(12, group=3)
    held = Strip(inputs.key, inputs.value, torch.zeros(12).double(), torch.arange(12))
    outputs = attend_and_score(inputs.query, held, SCALE)
    alone = torch.zeros(12).double()
    for g in range(3):
        single = Strip(inputs.key, inputs.value, torch.zeros(12).double(), torch.arange(12))
        close(attend_and_score(inputs.query[:, [g]], single, SCALE), outputs[:, [g]])
        alone += single.score
    close(held.score, alone)


def test_scores_can_be_left_alone() -> None:
    """Without a ranking attention is the same, and scores stay."""
    inputs = Inputs.draw(6)
    one, other = head(20, 4, power=0), head(20, 4)
    tokens = (inputs.query, inputs.key, inputs.value, True)
    close(one.step(*tokens), other.step(*tokens))
    assert not one.strip.score.any() and other.strip.score.all()


def rotated(tensor: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[L, ..., D], each rotated as far as its position is from 0: two angles a pair."""
    angle = position.double()[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64)
    angle = angle.view(len(position), *[1] * (tensor.dim() - 2), 4)
    a, b = tensor[..., :4], tensor[..., 4:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def test_positions_that_roll() -> None:
    """Each token attends to what is kept, at the distance that ranks say, or true ones so far.

    By a second definition, which keeps keys as they are before rotation, and rotates them anew in
    each step.
    """
    inputs, limit = Inputs.draw(60, group=2), 14
    one = head(capacity=9, num_recent=4, num_sinks=1)
    one.rolling = Rolling(limit, lambda key, distance: rotated(key, -distance))
    one.eviction = Eviction(at="chunk")
    held: list[tuple[int, int]] = []  # (index, position)
    renumbered, gone = 0, -1
    for index in range(60):
        if held and max(p for _, p in held) + 2 > limit:
            held = [(i, rank) for rank, (i, _) in enumerate(sorted(held))]
            renumbered += 1
        position = max((p for _, p in held), default=-1) + 1
        assert one.make_room(1) == position < limit
        now = torch.tensor([position])
        query = rotated(inputs.query[index : index + 1], now)
        key = rotated(inputs.key[index : index + 1], now)
        held = [(i, p) for i, p in held if one.victim is None or i != gone]
        held.append((index, position))
        out = one.step(query, key, inputs.value[index : index + 1], ends_prompt=index == 0)
        at = torch.tensor([p for _, p in held])
        keys = rotated(inputs.key[[i for i, _ in held]], at)
        probs = torch.softmax(torch.einsum("gd,jd->gj", query[0], keys) * SCALE, dim=-1)
        close(out[0], probs @ inputs.value[[i for i, _ in held]])
        if one.victim is not None:
            slot = int(one.strip.position[one.victim])
            gone = next(i for i, p in held if p == slot)
    assert renumbered > 5
    close(one.strip.value.sum(0), inputs.value[[i for i, _ in held]].sum(0))


@pytest.mark.parametrize("limit", [None, 24])
def test_a_sum_of_long_ago_fades_where_positions_roll(limit: int | None) -> None:
    """A heavy hitter that nothing attends to any more is evicted in the end; else it stays."""
    one = head(capacity=9, num_recent=4)
    one.rolling = limit and Rolling(limit, lambda key, _: key)
    hitter, other = torch.eye(8, dtype=torch.float64)[:2]
    for index in range(600):
        query = 40 * (hitter if index < 100 else other)
        key = other if index else hitter
        one.step(query.expand(1, 1, 8), key[None], key[None], ends_prompt=index == 0)
    stays = bool((one.strip.value == hitter).all(1).any())
    assert stays == (limit is None)
