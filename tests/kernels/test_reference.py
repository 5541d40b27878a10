"""The reference, held to statements of the definition that share no code with it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
import torch

from tests.kernels.one_head import HEAD_SIZE, SCALE, Inputs, causal, close, head, run
from vllm_h2o.kernels.reference import (
    Head,
    attend_and_score,
    pack_survivors,
    random_score,
    reached,
    select_victim,
)
from vllm_h2o.kernels.strip import Strip


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
    inputs: Inputs, prompt: int, num_heavy: int, num_recent: int, num_sinks: int
) -> tuple[torch.Tensor, list[set[int]], torch.Tensor]:
    """The paper as a mask over positions: what is not kept is never visible again.

    Returns:
        Outputs; positions visible to each decoded token; scores of all positions at the end.

    """
    num_tokens = inputs.key.shape[0]
    visible = causal(num_tokens)
    score = inputs.probabilities(visible)[:prompt].sum(dim=(0, 1))
    kept, seen = set(range(prompt)), []
    for position in range(prompt, num_tokens):
        if len(kept) > num_sinks + num_heavy + num_recent:
            safe = {j for j in kept if j < num_sinks or j >= position - num_recent}
            ranked = sorted(kept - safe, key=lambda j: (-float(score[j]), j))
            kept = safe | set(ranked[:num_heavy])
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


def uniform(capacity: int, num_recent: int, prompt: int, num_tokens: int) -> Head:
    """A head after tokens whose queries are zero: all probabilities are 1 / (slots in use)."""
    inputs = Inputs.draw(num_tokens)
    inputs.query = inputs.query * 0
    one = head(capacity, num_recent)
    run(one, inputs, [prompt])
    return one


def test_by_hand() -> None:
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


def strip(scores: Sequence[float], positions: Sequence[int] | None = None) -> Strip:
    """A strip with these scores; keys say which token they are of."""
    position = torch.tensor(positions if positions is not None else range(len(scores)))
    key = position[:, None].double().expand(-1, HEAD_SIZE).clone()
    return Strip(key, -key, torch.tensor(scores, dtype=torch.float64), position)


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
def test_victims(
    scores: list[float], positions: list[int], num_recent: int, num_sinks: int, victim: int
) -> None:
    """The lowest score that is neither sink nor recent; a tie goes against the newer position."""
    held = strip(scores, positions)
    assert select_victim(held, max(positions) + 1, num_recent, num_sinks) == victim


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
def test_packing(
    scores: list[float], keep: int, num_recent: int, num_sinks: int, survivors: list[int]
) -> None:
    """Sinks, the window and the best of the rest survive whole, in order; of equals the older."""
    packed = pack_survivors(strip(scores), 6, keep, num_recent, num_sinks)
    expected = strip([scores[i] for i in survivors], survivors)
    for name in ("key", "value", "score", "position"):
        assert torch.equal(getattr(packed, name), getattr(expected, name)), name


@pytest.mark.parametrize(("prompt", "after"), [(1, 1), (8, 8), (9, 9), (10, 9), (40, 9)])
def test_prompts_end(prompt: int, after: int) -> None:
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


def test_an_observation_window_by_hand() -> None:
    """C = 4, R = 0, five tokens: the largest probability of two queries, which reaches two on."""
    weights = torch.tensor([1.0, 1.0, 8.0, 1.0, 2.0], dtype=torch.float64)
    key, query = weights.log()[:, None], torch.ones(5, 1, 1, dtype=torch.float64)
    strip = Strip.empty(1, torch.float64)
    one = Head(strip, 4, 0, 0, scale=1.0, by_maximum=True, reach=2)
    one.step(query, key, key, ends_prompt=True, scoring_start=3)
    # U: the query of token 3 gives 1, 1, 8 and 1 of 11; that of token 4 less, and itself 2 of 13.
    # W: tokens 3 and 4 have the 8 of 11 of token 2.
    assert one.strip.position.tolist() == [2, 3, 4]
    assert one.strip.score.tolist() == pytest.approx([8 / 11] * 3)
    one.step(query[:1], key[:1], key[:1])
    assert one.strip.score.tolist() == pytest.approx(
        [8 / 11 + w / 12 for w in (8, 1, 2)] + [1 / 12]
    )
    assert one.victim == 3


@pytest.mark.parametrize("chunks", [[30], [10, 20], [27, 2, 1]])
@pytest.mark.parametrize("prompt", [30, 9])
def test_an_observation_window(chunks: list[int], prompt: int) -> None:
    """Survivors and scores by maximum, in chunks of any size; what is not packed is as it was."""
    inputs, one = Inputs.draw(32, group=2), head(10, 4, power=2)
    one.by_maximum, one.reach = True, 8
    chunks, start = chunks if prompt == 30 else [7, 1, 1], 0
    for i, length in enumerate(chunks):
        part = slice(start, start := start + length)
        tokens = (inputs.query[part], inputs.key[part], inputs.value[part])
        one.step(*tokens, i == len(chunks) - 1, scoring_start=prompt - 5)
    probs = inputs.probabilities(causal(32))[prompt - 5 : prompt, :, :prompt].square()
    score = [max(column) for column in probs.flatten(0, 1).T.tolist()]
    expected = list(range(prompt))
    if prompt == 30:
        score = [max(score[max(j - 8, 0) : j + 1]) for j in range(prompt)]
        best = sorted(range(prompt - 4), key=lambda j: (-score[j], j))[:5]
        expected = sorted([*best, *range(prompt - 4, prompt)])
    assert one.strip.position.tolist() == expected
    assert one.strip.score.tolist() == pytest.approx([score[j] for j in expected])


@pytest.mark.parametrize(
    ("scores", "positions", "reach", "expected"),
    [
        ([3, 1, 2, 0, 0], [0, 1, 2, 3, 4], 0, [3, 1, 2, 0, 0]),
        ([3, 1, 2, 0, 0], [0, 1, 2, 3, 4], 1, [3, 3, 2, 2, 0]),
        ([3, 1, 2, 0, 0], [0, 1, 2, 3, 4], 8, [3, 3, 3, 3, 3]),
        ([0, 3, -1, 0, -2], [4, 0, 1, 2, 9], 2, [0, 3, 3, 3, -2]),
    ],
)
def test_reach(
    scores: list[float], positions: list[int], reach: int, expected: list[float]
) -> None:
    """The largest score of so many positions before, wherever they lie."""
    held = strip(scores, positions)
    assert reached(held.score, held.position, reach).tolist() == expected


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
    """Without accumulation attention is the same, and first scores stay."""
    inputs = Inputs.draw(6)
    one, other = head(20, 4, power=0), head(20, 4)
    first = [0.5, 0.25, 0.125, 0.0, 1.0, 2.0]
    outputs = one.step(inputs.query, inputs.key, inputs.value, True, first)
    close(outputs, other.step(inputs.query, inputs.key, inputs.value, True))
    assert one.strip.score.tolist() == first


def rotated(tensor: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[L, ..., D], each rotated as far as its position is from 0: two angles a pair."""
    angle = position.double()[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64)
    angle = angle.view(len(position), *[1] * (tensor.dim() - 2), 4)
    a, b = tensor[..., :4], tensor[..., 4:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


@pytest.mark.parametrize("at_every_step", [False, True])
def test_positions_that_roll(at_every_step: bool) -> None:
    """Each token attends to what is kept, at the distance that ranks say, or true ones so far.

    By a second definition, which keeps keys as they are before rotation, and rotates them anew in
    each step.
    """
    inputs, limit = Inputs.draw(60, group=2), 14
    one = head(capacity=9, num_recent=4, num_sinks=1)
    one.position_limit, one.at_every_step, one.packs_chunks = limit, at_every_step, True
    one.rotate_back = lambda key, distance: rotated(key, -distance)
    held: list[tuple[int, int]] = []  # (index, position)
    renumbered, gone = 0, -1
    for index in range(60):
        live = [i for i, _ in held]
        if one.victim is not None and at_every_step:
            live.remove(gone)
        if at_every_step or (held and max(p for _, p in held) + 2 > limit):
            held = [(i, rank) for rank, i in enumerate(sorted(live))]
            renumbered += 1
        position = max((p for _, p in held), default=-1) + 1
        assert one.make_room(1) == position < limit
        now = torch.tensor([position])
        query = rotated(inputs.query[index : index + 1], now)
        key = rotated(inputs.key[index : index + 1], now)
        if one.victim is not None and not at_every_step:
            held = [(i, p) for i, p in held if i != gone]
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
    one.position_limit, one.rotate_back = limit, lambda key, _: key
    hitter, other = torch.eye(8, dtype=torch.float64)[:2]
    for index in range(600):
        query = 40 * (hitter if index < 100 else other)
        key = other if index else hitter
        one.step(query.expand(1, 1, 8), key[None], key[None], ends_prompt=index == 0)
    stays = bool((one.strip.value == hitter).all(1).any())
    assert stays == (limit is None)


def test_random_scores() -> None:
    """In [0, 1), a function of its arguments, different in each, near enough to uniform."""
    drawn = [
        random_score(seed, layer, h, position)
        for seed in (0, 7)
        for layer in (0, 1, 31)
        for h in (0, 1, 7)
        for position in range(500)
    ]
    assert drawn[501] == random_score(0, 0, 1, 1)
    assert all(0 <= number < 1 for number in drawn)
    assert len(set(drawn)) > 0.999 * len(drawn)
    assert statistics.mean(drawn) == pytest.approx(0.5, abs=0.01)
    tenths = [sum(int(10 * number) == i for number in drawn) for i in range(10)]
    assert all(abs(count - 900) < 4 * 900**0.5 for count in tenths), tenths


@pytest.mark.parametrize("of", ["seed", "layer", "head", "position"])
def test_random_scores_are_independent(of: str) -> None:
    """Neighbours in any one argument are not correlated."""
    base = {"seed": 3, "layer": 2, "head": 1, "position": 0}
    pairs = []
    for position in range(2000):
        one = {**base, "position": 3 * position}
        pairs.append((random_score(**one), random_score(**{**one, of: one[of] + 1})))
    assert abs(statistics.correlation(*zip(*pairs, strict=True))) < 0.08
