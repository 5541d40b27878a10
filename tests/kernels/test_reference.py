"""The reference, compared with statements of the definition that share no code with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.kernels.one_head import HEAD_SIZE, SCALE, Inputs, causal, close, head, run
from vllm_h2o.kernels.reference import (
    Head,
    Rolling,
    attend_and_score,
    pack_survivors,
    reached,
    select_victim,
)
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Budget, Eviction, Ranking, Term
from vllm_h2o.policy.ranking import Reduce


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


def budget(capacity: int, num_recent: int, num_sinks: int) -> Budget:
    """Slots of a head that evicts a token with each new one."""
    return Budget(capacity, capacity - 1 - num_recent - num_sinks, num_recent, num_sinks)


def same(ours: Strip, theirs: Strip) -> None:
    """Equal in all that a slot holds."""
    for name in ("key", "value", "score", "position"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


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
def test_packing(
    scores: list[float], keep: int, num_recent: int, num_sinks: int, survivors: list[int]
) -> None:
    """Sinks, the window and the best of the rest survive whole, in order; of equals the older."""
    packed = pack_survivors(strip(scores), 6, budget(keep + 1, num_recent, num_sinks))
    same(packed, strip([scores[i] for i in survivors], survivors))


@pytest.mark.parametrize(
    ("scores", "pages", "num_recent", "num_sinks", "survivors"),
    [
        # Sums of pages of two: 6, 6, 3, 1. Single tokens would keep 0, 1, 3, 4.
        ([1, 5, 0, 6, 3, 0, 1, 0], 2, 0, 0, [0, 1, 2, 3]),
        ([0, 0, 5, 6, 1, 2, 9, 9], 3, 1, 1, [0, 1, 2, 3, 6, 7]),  # a sink and a recent token
        ([1, 1, 1, 1, 1, 1, 1, 1], 2, 0, 0, [0, 1, 2, 3]),  # of equal sums the newest go
        ([0, 0, 0, 2, 9, 9, 9, 9, 0], 1, 0, 0, [4, 5, 8]),  # the last page is not full
        ([9, 9, 0, 0, 5, 5, 0, 0, 0], 2, 3, 0, [0, 1, 6, 7, 8]),  # recent tokens 6, 7 and 8
        ([9, 9, 0, 0, 5], 2, 0, 0, [0, 1, 2, 3, 4]),  # no more than two pages are full
    ],
)
def test_packing_of_pages(
    scores: list[float], pages: int, num_recent: int, num_sinks: int, survivors: list[int]
) -> None:
    """Pages of two tokens: those with the largest sums survive, and each that is protected."""
    heavy = 2 * pages - num_recent - num_sinks
    slots = Budget(2 * pages + 2, heavy, num_recent, num_sinks, evict_every=2, unit=2)
    packed = pack_survivors(strip(scores), len(scores), slots)
    same(packed, strip([scores[i] for i in survivors], survivors))


def test_packing_of_pages_by_mean() -> None:
    """Each token's mean counts, not the mean of the page's sum."""
    slots = Budget(4, 2, 0, 0, evict_every=2, unit=2)
    scores = [4.0, 3.0, 2.0, 1.5]  # sums 7 and 3.5; means 1 + 1 and 1 + 1.5
    packed = pack_survivors(strip(scores), 4, slots, by_age=True)
    assert packed.position.tolist() == [2, 3]


def by_pages(
    inputs: Inputs, prompt: int, num_pages: int, num_recent: int, num_sinks: int, size: int
) -> list[set[int]]:
    """Positions that are held after the prompt and each later token, from a mask alone.

    Pages are cut anew from what is held whenever one goes, by the sums of what was paid to them.
    """
    num_tokens = inputs.key.shape[0]
    visible = causal(num_tokens)
    score = inputs.probabilities(visible)[:prompt].sum(dim=(0, 1))
    held, seen = list(range(prompt)), []

    def best(end: int) -> list[int]:
        pages = [held[start : start + size] for start in range(0, len(held), size)]

        def protected(page: list[int]) -> bool:
            return len(page) < size or page[0] < num_sinks or page[-1] >= end - num_recent

        order = sorted(pages, key=lambda p: (not protected(p), -float(score[p].sum()), p[0]))
        kept = order[: num_pages + (len(held) % size > 0)]
        return sorted(token for page in kept for token in page)

    for position in range(prompt - 1, num_tokens):
        if position >= prompt:
            held.append(position)
            visible[position] = False
            visible[position, held] = True
            score = score + inputs.probabilities(visible)[position].sum(0)
        if position == prompt - 1 or len(held) == (num_pages + 1) * size:
            held = best(position + 1)
        seen.append(set(held))
    return seen


@pytest.mark.parametrize("prompt", [1, 11, 12, 13, 25])
@pytest.mark.parametrize(("num_recent", "num_sinks"), [(0, 0), (3, 0), (5, 2)])
def test_pages_as_a_mask(prompt: int, num_recent: int, num_sinks: int) -> None:
    """The lowest page goes whenever the next token would need another one."""
    inputs, num_pages, size = Inputs.draw(60, 2, seed=prompt), 4, 3
    heavy = num_pages * size - num_recent - num_sinks
    one = head(16, num_recent, num_sinks)
    one.budget = Budget((num_pages + 1) * size, heavy, num_recent, num_sinks, size, size)
    _, held = run(one, inputs, [prompt])
    assert held == by_pages(inputs, prompt, num_pages, num_recent, num_sinks, size)


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


SNAPKV = Term("window", "max", reach=2)


def test_an_observation_window_by_hand() -> None:
    """C = 4, R = 0, five tokens: the largest probability of two queries, which reaches two on."""
    weights = torch.tensor([1.0, 1.0, 8.0, 1.0, 2.0], dtype=torch.float64)
    key, query = weights.log()[:, None], torch.ones(5, 1, 1, dtype=torch.float64)
    one = Head(Strip.empty(1, torch.float64), budget(4, 0, 0), Ranking(SNAPKV))
    one.step(query, key, key, ends_prompt=True, terms=[(SNAPKV, query[3:])])
    # The query of token 3 gives 1, 1, 8 and 1 of 11; that of token 4 less, and itself 2 of 13.
    # Tokens 3 and 4 have the 8 of 11 of token 2.
    assert one.strip.position.tolist() == [2, 3, 4]
    assert one.strip.score.tolist() == pytest.approx([8 / 11] * 3)
    one.step(query[:1], key[:1], key[:1])
    assert one.strip.score.tolist() == pytest.approx(
        [8 / 11 + w / 12 for w in (8, 1, 2)] + [1 / 12]
    )
    assert one.victim == 3


@pytest.mark.parametrize("chunks", [[30], [10, 20], [22, 1, 7]])
@pytest.mark.parametrize("prompt", [30, 9])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_an_observation_window(chunks: list[int], prompt: int, reduce: Reduce) -> None:
    """No other query scores, in chunks of any size; all tokens have scores, kept or not."""
    term = Term("window", reduce, power=2, reach=8)
    inputs, one = Inputs.draw(32, group=2), head(10, 4)
    one.ranking = Ranking(term)
    chunks, start = chunks if prompt == 30 else [2, 7], 0
    for i, length in enumerate(chunks):
        part = slice(start, start := start + length)
        last = i == len(chunks) - 1
        asked = [(term, inputs.query[prompt - 5 : prompt])] if last else []
        one.step(inputs.query[part], inputs.key[part], inputs.value[part], last, asked)
    each = inputs.probabilities(causal(32))[prompt - 5 : prompt, :, :prompt].square().flatten(0, 1)
    value = [max(column) if reduce == "max" else sum(column) for column in each.T.tolist()]
    score = [max(value[max(j - 8, 0) : j + 1]) for j in range(prompt)]
    expected = list(range(prompt))
    if prompt == 30:
        best = sorted(range(prompt - 4), key=lambda j: (-score[j], j))[:5]
        expected = sorted([*best, *range(prompt - 4, prompt)])
    assert one.strip.position.tolist() == expected
    assert one.strip.score.tolist() == pytest.approx([score[j] for j in expected])


def test_a_last_token_computed_alone_scores_as_later_ones_do() -> None:
    """A prompt of one token, or a turn of one, has no window: its query adds its probabilities."""
    inputs, one = Inputs.draw(3, group=2), head(10, 4)
    one.ranking = Ranking(SNAPKV)
    for i in range(3):
        one.step(inputs.query[[i]], inputs.key[[i]], inputs.value[[i]], ends_prompt=i == 1)
    close(one.strip.score, inputs.probabilities(causal(3))[1:].sum(dim=(0, 1)))


def test_a_lifetime_ends() -> None:
    """Three tokens after the prompt its tokens have the scores that they have without the window.

    Later tokens keep theirs, and what was paid to the prompt since then is not given back.
    """
    brief, other = Term("window", "max", weight=0.3, lifetime=3), head(20, 4)
    inputs, one = Inputs.draw(14, group=2), head(20, 4)
    one.ranking = Ranking(Term("all", "sum"), brief)
    part = slice(0, 10)
    tokens = (inputs.query[part], inputs.key[part], inputs.value[part], True)
    other.step(*tokens)
    before = other.strip.score
    one.step(*tokens, terms=[(brief, inputs.query[5:10])])
    assert (one.strip.score[:9] > before[:9]).all()
    for i in range(10, 13):
        for each in (one, other):
            each.step(inputs.query[[i]], inputs.key[[i]], inputs.value[[i]])
    close(one.strip.score[:10], before)
    close(one.strip.score[10:], other.strip.score[10:])


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
    """The largest score of tokens up to ``reach`` positions before, wherever they lie."""
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
