# SPDX-License-Identifier: Apache-2.0
"""The reference beside the layer: a ``Head`` for each request and KV head, compared every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tests.kernels.harness import Layer, Life, rope_of, views
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.float8 import as_read
from vllm_h2o.kernels.merge import cosines, nearest
from vllm_h2o.kernels.reference import Head
from vllm_h2o.kernels.split import pack_layer
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Eviction, Term
from vllm_h2o.wire import RequestPlan

RTOL, SCORE_ATOL, OUTPUT_ATOL = 1e-5, 1e-7, 5e-6
"""Float32 against float64, whatever the cache's dtype: both sides read the same rounded inputs."""
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Error of a merged token's K and V, relative to the largest: one rounding to the cache's dtype."""
NEAR = 1e-5
"""Scores that differ by less, relatively, may be ranked either way in float32."""


@dataclass
class Count:
    """Selections, near ties among them that came out the other way, splits into unequal numbers of
    slots, and victims that were merged, or dropped where they could be merged.
    """

    num_selections: int = 0
    num_near_ties: int = 0
    num_unequal: int = 0
    num_merged: int = 0
    num_dropped: int = 0

    def check(self) -> None:
        """At most one selection in a thousand."""
        assert self.num_near_ties <= self.num_selections / 1000, self


def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Two choices, as scores [M], are so close that float32 may take either."""
    ours, theirs = ours.double().sort().values, theirs.double().sort().values
    assert ours.shape == theirs.shape
    apart = (ours - theirs).abs() / torch.maximum(ours.abs(), theirs.abs())
    assert (apart <= NEAR).all(), f"scores of different choices: {ours} and {theirs}"


@dataclass
class Truth:
    """Follows a layer.

    Args:
        layer: is compared with the reference.
        count: of selections and near ties.
        output_atol: largest error of an output.

    """

    layer: Layer
    count: Count
    output_atol: float = OUTPUT_ATOL
    heads: dict[str, list[Head]] = field(default_factory=dict)

    def begin(self, life: Life) -> None:
        """A reference head for each KV head of a new request."""
        shape, builder = self.layer.shape, self.layer.builder
        sinks = self.layer.impl.sink_logits
        num_heads = shape.num_heads_of_all
        of_head = [None] * num_heads if sinks is None else sinks.chunk(num_heads)
        self.heads[life.request_id] = [
            Head(
                strip=Strip.empty(shape.head_size, torch.float64),
                budget=life.budget,
                ranking=builder.ranking,
                eviction=Eviction(at=life.at),
                scale=shape.scale,
                merge=builder.scoring.merge,
                splits=life.splits,
                sink_logits=sink_logits,
            )
            for sink_logits in of_head
        ]

    def follow(self, life: Life, plan: RequestPlan, output: torch.Tensor) -> None:
        """Compute the plan, and compare all that the layer holds and returned."""
        name, group = life.request_id, self.layer.shape.group
        query, *new = (t.double() for t in life.tokens(plan))
        shape = self.layer.shape
        key, value = (as_read(t, shape.stored, s) for t, s in zip(new, shape.scales, strict=True))
        ends_prompt = plan.in_prompt and plan.logical_end == life.prompt_len
        heads, victims = self.heads[name], self.layer.victims(name)
        merge = heads[0].merge
        if plan.overwrites and merge:
            for head, strip in zip(heads, self.layer.held(name, plan), strict=True):
                merged, tied = follow_merge(head, strip, self.layer.shape.dtype)
                self.count.num_selections += 1
                self.count.num_merged += merged
                self.count.num_dropped += not merged
                self.count.num_near_ties += tied
        terms = list(self._terms(plan, query))
        for h, head in enumerate(heads):
            of_group = slice(h * group, (h + 1) * group)
            head.grows, head.merge = plan.grows, 0.0
            expected = head.step(
                query[:, of_group],
                key[:, h],
                value[:, h],
                ends_prompt,
                [(term, asking[:, of_group]) for term, asking in terms],
                shape.block_size,
                falls_back=plan.grows and plan.num_survivors > 0,
            )
            head.merge = merge
            same(output[:, of_group], expected, self.output_atol, f"{name}, head {h}: outputs")
        if plan.splits:
            pack_layer(heads, shape.block_size, 7 if shape.num_layers == 1 else 9)
            self.count.num_unequal += len({head.budget.capacity for head in heads}) > 1
        for h, (head, strip) in enumerate(zip(heads, self.layer.held(name, plan), strict=True)):
            if plan.num_survivors:
                self._follow_packing(head, strip)
            compare(strip, head.strip, f"{name}, head {h}, {plan}")
            if plan.selects:
                assert victims is not None
                self._follow_selection(head, strip, int(victims[h]))

    def _terms(self, plan: RequestPlan, query: torch.Tensor) -> Iterator[tuple[Term, torch.Tensor]]:
        """The terms of a chunk of a prompt, each with the queries that count."""
        if not plan.in_prompt or plan.num_new == 1:
            return
        builder = self.layer.builder
        window_start = plan.prompt_end - builder.chunks.num_window_queries
        for term in builder.ranking.passes:
            if term.queries != "window":
                distance = torch.full(query.shape[:1], plan.num_new)
                yield term, rope_of(self.layer.shape.head_size)(query, distance)
            elif window_start < plan.logical_end:
                yield term, query[max(window_start - plan.logical_start, 0) :]

    def _follow_packing(self, head: Head, strip: Strip) -> None:
        """Take over the layer's survivors where only near ties tell them from the reference's."""
        self.count.num_selections += 1
        ours = ~torch.isin(strip.position, head.strip.position)
        theirs = ~torch.isin(head.strip.position, strip.position)
        if ours.any():
            unit = head.budget.unit
            chosen = (ranks(head, strip)[ours], ranks(head, head.strip)[theirs])
            near(*(each.view(-1, unit).sum(1) for each in chosen))
            self.count.num_near_ties += 1
            head.strip = strip

    def _follow_selection(self, head: Head, strip: Strip, slot: int) -> None:
        """Take over the layer's victim where only a near tie tells it from the reference's."""
        self.count.num_selections += 1
        assert head.victim is not None
        position = strip.position[slot]
        ours = int((head.strip.position == position).nonzero())
        if ours != head.victim:
            low, high = (head.strip.position[s] for s in (ours, head.victim))
            recent_start = head.logical_len - head.budget.recent_at(head.num_after)
            assert head.budget.num_sinks <= min(low, high) and max(low, high) < recent_start
            ranked = ranks(head, head.strip)
            near(ranked[ours, None], ranked[head.victim, None])
            self.count.num_near_ties += 1
            head.victim = ours


def follow_merge(
    head: Head, strip: Strip, dtype: torch.dtype, apart: float = NEAR
) -> tuple[bool, bool]:
    """Merge the victim before the reference's step does, and take over how the layer rounded.

    Args:
        head: about to take a victim's slot.
        strip: what the layer holds after its step.
        dtype: the cache's.
        apart: of scores, relatively: they weigh what is merged.

    Returns:
        Whether it was merged, and whether the layer chose otherwise at a near tie.

    """
    assert head.victim is not None
    order = {int(position): slot for slot, position in enumerate(head.strip.position)}
    masses = zip(strip.position.tolist(), strip.mass.tolist(), strict=True)
    before = head.strip.mass.tolist()
    grown = [order[p] for p, mass in masses if p in order and mass != before[order[p]]]
    assert len(grown) <= 1, grown
    ours = grown[0] if grown else None
    theirs = nearest(head.strip.key, head.victim, head.merge)
    if ours != theirs:
        cosine = cosines(head.strip.key, head.victim)
        chosen = [head.merge if slot is None else float(cosine[slot]) for slot in (ours, theirs)]
        near(torch.tensor(chosen[:1]), torch.tensor(chosen[1:]))
    if ours is not None:
        head.take_in(ours)
        slot = int((strip.position == head.strip.position[ours]).nonzero())
        for view in ("key", "value"):
            rounded, exact = getattr(strip, view)[slot], getattr(head.strip, view)[ours]
            error = (rounded - exact).abs().max() / exact.abs().max()
            assert error <= ROUNDING[dtype] + 2 * apart, f"{view} of a merged token: {error}"
            exact.copy_(rounded)
    return ours is not None, ours != theirs


def ranks(head: Head, strip: Strip) -> torch.Tensor:
    """[L]: ranks of a strip of the head's tokens."""
    return strip.ranks(head.logical_len, head.ranking.by_age)


def same(actual: torch.Tensor, expected: torch.Tensor, atol: float, what: str) -> None:
    """Equal but for float32."""
    torch.testing.assert_close(
        actual.double(), expected, rtol=RTOL, atol=atol, msg=lambda text: f"{what}: {text}"
    )


def compare(actual: Strip, expected: Strip, what: str) -> None:
    """The same positions, in whatever slots, the same K, V, masses and, but for float32, scores."""
    order, other = actual.position.argsort(), expected.position.argsort()
    assert torch.equal(actual.position[order], expected.position[other]), (
        f"{what}: retained {actual.position[order]}, expected {expected.position[other]}"
    )
    assert torch.equal(actual.mass[order], expected.mass[other]), f"{what}: masses"
    assert torch.equal(actual.key[order], expected.key[other]), f"{what}: keys"
    assert torch.equal(actual.value[order], expected.value[other]), f"{what}: values"
    same(actual.score[order], expected.score[other], SCORE_ATOL, f"{what}: scores")


def bits(view: torch.Tensor) -> torch.Tensor:
    """The view as integers, among which a NaN equals itself."""
    return view.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[view.element_size()])


class Fence:
    """The slots that a step may write, noted before it runs and checked after it."""

    def __init__(self, layer: Layer, plans: Mapping[str, RequestPlan]) -> None:
        self.layer, self.plans = layer, plans
        self.accumulates = layer.builder.scoring.power > 0
        self.before = layer.kv_cache.clone()
        self.victims = {name: layer.victims(name) for name in plans if name in layer.tables}

    def check(self) -> None:
        """Nothing was written but the new tokens' slots, the survivors' and scores attended to."""
        tokens = torch.zeros_like(self.layer.cache.score, dtype=torch.bool)
        scores = tokens.clone()
        block_size = self.layer.shape.block_size
        for name, plan in self.plans.items():
            is_split = plan.attends_split
            for h, rows in enumerate(self.layer.strips(name, plan.attended_len, is_split)):
                length = len(rows) * block_size if is_split else plan.attended_len
                for slot in self._written(name, plan, h, length):
                    tokens[rows[slot // block_size], slot % block_size] = True
                # Scores are restored in whole pages.
                num_scores = len(rows) * block_size if plan.restored_end else length
                for slot in range(num_scores) if self.accumulates else ():
                    scores[rows[slot // block_size], slot % block_size] = True
        now = self.layer.cache
        kinds = self.layer.impl.kinds
        then = views(self.before, self.layer.shape, *kinds)
        merged = self._merged(then, now) & ~tokens
        masses = () if now.mass is None else ("mass",)
        for view in ("key", "value", "position", "score", *masses):
            changed = bits(getattr(then, view)) != bits(getattr(now, view))
            allowed = tokens | {"score": scores, "position": tokens}.get(view, merged)
            foreign = (changed if changed.dim() == 2 else changed.any(-1)) & ~allowed
            assert not foreign.any(), f"{view} written at (row, slot) {foreign.nonzero()}"

    def _merged(self, then: LayerCache, now: LayerCache) -> torch.Tensor:
        """[rows, N]: which slots took a victim in: in each strip that has one, at most one."""
        merged = torch.zeros_like(now.score, dtype=torch.bool)
        if then.mass is None or now.mass is None:
            return merged
        for name, plan in self.plans.items():
            strips = self.layer.strips(name, plan.attended_len, plan.attends_split)
            for rows in strips if plan.overwrites else ():
                grown = now.mass[rows] > then.mass[rows]
                assert grown.sum() <= 1
                merged[rows] = grown
        return merged

    def _written(self, name: str, plan: RequestPlan, head: int, length: int) -> Sequence[int]:
        """Slots that take a token: new ones, a victim's, or all that survivors move to.

        The new token of heads that share slots takes the last one of each; ``length`` are there.
        """
        if plan.overwrites:
            victims = self.victims[name]
            assert victims is not None
            return [int(victims[head])]
        return range(0 if plan.num_survivors else length - plan.num_new, length)


def live(
    layer: Layer,
    lives: Sequence[Life],
    count: Count,
    pause: float = 0.2,
    output_atol: float = OUTPUT_ATOL,
) -> list[dict[str, tuple[torch.Tensor, torch.Tensor | None]]]:
    """Run the requests to their ends, with everything compared after every step.

    Args:
        layer: runs them; requests start when there are pages enough, in the order given.
        lives: the requests.
        count: of selections and near ties.
        pause: probability that a request is left out of a step.
        output_atol: largest error of an output.

    Returns:
        For each step, by request: outputs [T, Hq, D], and victims [H] if it selected any.

    """
    truth = Truth(layer, count, output_atol)
    waiting, running = list(lives), dict[str, Life]()
    packed: dict[str, int] = {}
    trace = []
    while waiting or running:
        for name, num_slots in packed.items():
            layer.release(name, num_slots)
        packed.clear()
        _admit(layer, truth, waiting, running)
        chosen = [name for name in running if layer.random.random() >= pause] or list(running)
        plans = {name: running[name].next_plan() for name in chosen}
        fence = Fence(layer, plans)
        outputs = layer.step(plans, running)
        fence.check()
        entry = {}
        for name, plan in plans.items():
            truth.follow(running[name], plan, outputs[name])
            selects = plan.selects
            entry[name] = (outputs[name], layer.victims(name) if selects else None)
            if plan.num_survivors:
                packed[name] = plan.held_end
            if not running[name].num_left:
                packed[name] = 0
                del running[name]
        trace.append(entry)
    for name in packed:
        layer.release(name)
    return trace


def _admit(layer: Layer, truth: Truth, waiting: list[Life], running: dict[str, Life]) -> None:
    """Start requests while every running one could still grow to its largest."""
    while waiting:
        together = [*running.values(), waiting[0]]
        need = sum(-(-life.max_slots // layer.shape.block_size) for life in together)
        if need >= layer.cache.num_blocks and running:
            return
        life = waiting.pop(0)
        life.prepare(layer.shape, layer.builder.ranking.lifetime)
        running[life.request_id] = life
        truth.begin(life)
