# SPDX-License-Identifier: Apache-2.0
"""The definition: one layer, one KV head, in plain torch; float64 where the caller's tensors are.

Every other kernel is held to these functions, over a strip (strip.py).

Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs", arXiv 2306.14048,
Algorithm 1, in the form that really drops K and V. policy/ranking.py has the formula of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm_h2o.kernels.merge import nearest
from vllm_h2o.kernels.sinks import SinkLogits, softmax
from vllm_h2o.kernels.strip import Rotation, Strip
from vllm_h2o.policy import Budget, Eviction, Ranking, Term


def attend_and_score(
    query: torch.Tensor,
    strip: Strip,
    scale: float,
    power: int = 1,
    first_scoring_query: int = 0,
    sink_logits: SinkLogits = None,
) -> torch.Tensor:
    """``P = softmax(q K^T * scale + causal); out = P V; score[j] += sum_{queries, group} P[., j]``.

    Where tokens were merged, the logits gain ``log(mass)``.

    Args:
        query: [T, G, D], of the T newest tokens, whose K and V are in the last T slots (T > 1) or
            in any one slot (T = 1).
        strip: written: scores, unless ``power`` is 0.
        scale: of the logits.
        power: of the probabilities that are added; 0 adds nothing.
        first_scoring_query: queries from here on, in [0, T], add to scores.
        sink_logits: [G], of the attention sinks, if there are any: see sinks.py.

    Returns:
        [T, G, D].

    """
    num_queries, length = query.shape[0], len(strip)
    logits = torch.einsum("tgd,jd->tgj", query, strip.key) * scale + strip.mass.log()
    last_visible = torch.arange(length - num_queries, length)
    hidden = torch.arange(length)[None, :] > last_visible[:, None]
    probs = softmax(logits.masked_fill(hidden[:, None, :], float("-inf")), sink_logits)
    if power:
        added = probs[first_scoring_query:].pow(power).sum(dim=(0, 1))
        strip.score = strip.score + added.to(strip.score.dtype)
    return torch.einsum("tgj,jd->tgd", probs, strip.value)


def score_term(
    query: torch.Tensor,
    strip: Strip,
    scale: float,
    term: Term,
    by_age: bool = False,
    page_size: int = 1,
    sink_logits: SinkLogits = None,
    end: int | None = None,
) -> None:
    """``P = softmax(q K^T * scale); score[j] += weight * (age[j] if by_age else 1) * value[j]``.

    ``value`` is the sum or the maximum of ``P[., j] ** power`` over queries and the GQA group, then
    the maximum over j and the ``reach`` tokens before it: see policy/ranking.py. The queries of a
    window see tokens up to their own, and give nothing to the ``skip`` tokens right before them.
    Rotated or reread ones see every token; by blocks they see their own block and the first page,
    where sinks are, and give to their own block alone.

    Args:
        query: [T, G, D], those that count, of the T newest tokens; rotated already.
        strip: written: scores. The prompt is in order, its newest tokens in the last slots.
        scale: of the logits.
        term: what is added.
        by_age: whether scores are ranked as means.
        page_size: slots of a page; blocks are whole pages.
        sink_logits: [G], as in :func:`attend_and_score`, or [T, G].
        end: one past the last position when the strip is next ranked: ages are those of then;
            None: after the newest token.

    """
    logits = torch.einsum("tgd,jd->tgj", query, strip.key) * scale
    newest, slot = int(strip.position.max()) + 1, torch.arange(len(strip))
    if term.sees_later:
        size = term.block_slots(page_size) if term.block else len(strip)
        block = slot // size
        gives = block[-len(query) :, None] == block  # [T, L]
        hidden = ~gives & (slot >= page_size)
    else:
        before = torch.arange(newest - len(query), newest)[:, None] - strip.position
        hidden, gives = before < 0, before >= term.skip
    probs = softmax(logits.masked_fill(hidden[:, None, :], float("-inf")), sink_logits)  # [T, G, L]
    each = probs.pow(term.power) * gives[:, None]
    value = each.amax(dim=(0, 1)) if term.reduce == "max" else each.sum(dim=(0, 1))
    value = reached(value, strip.position, term.reach)
    age = (newest if end is None else end) - strip.position if by_age else 1
    strip.score = strip.score + (term.weight * age * value).to(strip.score.dtype)


def reached(value: torch.Tensor, position: torch.Tensor, reach: int) -> torch.Tensor:
    """``W[j] = max_{0 <= d <= reach} value[j - d]``, by position: [L].

    A query looks for where something begins, and what follows must stay with it.

    Args:
        value: [L], of the tokens.
        position: [L], int64.
        reach: positions that a value reaches.

    """
    distance = position[:, None] - position
    within = (distance >= 0) & (distance <= reach)
    return value.expand_as(within).masked_fill(~within, float("-inf")).amax(dim=1)


def candidates(strip: Strip, logical_len: int, budget: Budget, num_after: int = -1) -> torch.Tensor:
    """[L]: whether each token may be evicted: it is neither a sink nor recent.

    Args:
        strip: what is held.
        logical_len: one past the position of the newest token.
        budget: how many are sinks or recent.
        num_after: tokens after the prompt, as in ``Budget.recent_at``.

    """
    recent_start = logical_len - budget.recent_at(num_after)
    return (strip.position >= budget.num_sinks) & (strip.position < recent_start)


def select_victim(
    strip: Strip, logical_len: int, budget: Budget, by_age: bool = False, num_after: int = -1
) -> int:
    """The slot that the next token takes: the lowest rank; of equals, the newest.

    Args:
        strip: a full one.
        logical_len: one past the position of the newest token.
        budget: its sinks and recent tokens are no candidates.
        by_age: whether scores are ranked as means.
        num_after: tokens after the prompt.

    """
    ranks = strip.ranks(logical_len, by_age)
    slots = candidates(strip, logical_len, budget, num_after).nonzero().flatten().tolist()
    return min(slots, key=lambda slot: (float(ranks[slot]), -int(strip.position[slot])))


def pack_survivors(
    strip: Strip, logical_len: int, budget: Budget, by_age: bool = False, num_after: int = -1
) -> Strip:
    """The tokens that survive, ``budget.survivors(len(strip))``, in order of position.

    Sinks and recent tokens survive; then those with the largest rank; of equals, the older ones.

    With whole pages, ``budget.unit`` is their size: page p is slots [p * unit, (p + 1) * unit), in
    order of position. A page that has a sink or a recent token, or is not full, survives whole;
    then those with the largest sum of ranks; of equal sums, the older ones. So the page goes whose
    tokens matter least together: one heavy hitter may save its neighbours.

    Args:
        strip: what is held.
        logical_len: one past the position of the newest token.
        budget: how many survive, and in which unit.
        by_age: whether scores are ranked as means.
        num_after: tokens after the prompt.

    """
    held, unit = strip.in_order(), budget.unit
    ranks = held.ranks(logical_len, by_age)
    may_go = candidates(held, logical_len, budget, num_after)
    slots = range(len(held))
    pages = [slots[start : start + unit] for start in slots[::unit]]

    def rank(page: range) -> tuple[bool, float]:
        goes = len(page) == unit and bool(may_go[page].all())
        return goes, -float(ranks[page].sum()) if goes else 0.0

    best = [slot for page in sorted(pages, key=rank) for slot in page]
    return held.taken(sorted(best[: budget.survivors(len(held))]))


@dataclass(frozen=True)
class Rolling:
    """Positions that are counted anew when they run out.

    Args:
        limit: one past the last position that a token may have.
        rotate_back: what the rotary embedding makes of a key some positions earlier.

    """

    limit: int
    rotate_back: Rotation


@dataclass
class Head:
    """One layer, one KV head, one request, or a conversation, from its first prompt token on.

    Args:
        strip: what is held.
        budget: slots, and what they are for.
        ranking: how tokens are ranked.
        eviction: ``chunk`` packs survivors after every chunk of the prompt, not at its end. It is
            also that of a preempted request that is computed again where its whole length has no
            room. A ranking without a term over all queries then has its window term's queries at
            the end of every chunk.
        scale: of the logits.
        merge: the next token's victim goes to the nearest key whose cosine exceeds it, right
            before that token is stored; 0: victims are dropped.
        splits: whether KV heads share slots once they are packed, by :func:`split.pack_layer`.
        grows: whether nothing is evicted for now, however many tokens there are.
        rolling: counts positions anew before a step that would need more; None: positions are
            indices.
        sink_logits: [G], of the query heads, where they have attention sinks.
        offset: a new token's index less its position.
        logical_len: tokens computed so far.
        prompt_len: of them, the prompt's, once it is complete.
        in_prompt: whether the prompt is not complete yet.
        victim: the slot that the next token takes, once the strip is full.

    """

    strip: Strip
    budget: Budget
    ranking: Ranking = field(default_factory=Ranking)
    eviction: Eviction = field(default_factory=Eviction)
    scale: float = 1.0
    merge: float = 0.0
    splits: bool = False
    grows: bool = False
    rolling: Rolling | None = None
    sink_logits: SinkLogits = None
    offset: int = 0
    logical_len: int = 0
    prompt_len: int = 0
    in_prompt: bool = True
    victim: int | None = None

    @property
    def end(self) -> int:
        """One past the position of the newest token."""
        return self.logical_len - self.offset

    def make_room(self, num_new: int) -> int:
        """The position of the next of ``num_new`` tokens: queries and keys are rotated for it."""
        if self.rolling is not None and self.end + num_new > self.rolling.limit:
            self.renumber(self.rolling)
        return self.end

    def renumber(self, rolling: Rolling) -> None:
        """Give tokens positions 0, 1, ... in their order."""
        accumulates = self.ranking.power > 0
        num_tokens = self.strip.renumber(self.end, rolling.rotate_back, accumulates)
        self.offset = self.logical_len - num_tokens

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends_prompt: bool = False,
        terms: Sequence[tuple[Term, torch.Tensor]] = (),
        page_size: int = 1,
        falls_back: bool = False,
        prompt_end: int | None = None,
        reread_sinks: SinkLogits = None,
    ) -> torch.Tensor:
        """Compute T tokens: a chunk of the prompt, or one token after it.

        Args:
            query: [T, G, D].
            key: [T, D].
            value: [T, D].
            ends_prompt: whether the last of them is the last of the prompt.
            terms: those that are added now, each with the queries that count, [T', G, D]. A token
                that ends a prompt and is computed alone adds its probabilities as later ones do.
            page_size: slots of a page, for the blocks of a term.
            falls_back: whether a head that grows is cut to its budget after this step, for good.
            prompt_end: one past the prompt's last position. A reread term is ranked there, unless
                chunks are evicted from, so that it does not depend on where they end.
            reread_sinks: [T', G], of the reread queries: what they see of the second reading.

        Returns:
            [T, G, D].

        """
        num_new = len(key)
        self.make_room(num_new)
        for i in range(num_new):
            slot = len(self.strip) if self.victim is None else self._vacate()
            self.strip.store(slot, key[i], value[i], self.end)
            self.logical_len += 1
        alone = ends_prompt and num_new == 1
        scores = self.ranking.scores_every_query or not self.in_prompt or alone
        power = self.ranking.power if scores else 0
        out = attend_and_score(query, self.strip, self.scale, power, 0, self.sink_logits)
        for term, asking in terms:
            if term.lifetime:
                self.strip.keep_scores()
            again = term.queries == "reread"
            end = prompt_end if again and self.eviction.at != "chunk" else None
            sinks = reread_sinks if again else self.sink_logits
            how = (self.ranking.by_age, page_size, sinks, end)
            score_term(asking, self.strip, self.scale, term, *how)
        self.grows = self.grows and not falls_back
        self._evict(ends_prompt, falls_back)
        lifetime = self.ranking.lifetime
        if not self.in_prompt and self.logical_len - self.prompt_len == lifetime:
            self.strip.restore_scores(self.prompt_len)
        return out

    def begin_turn(self, in_chunks: bool = True) -> None:
        """A conversation goes on: next come chunks of a prompt, after all that is held.

        So a conversation of k turns is one request that is evicted from at the end of each turn's
        prompt. A term's lifetime is over, and the next victim is kept.

        Args:
            in_chunks: False where heads share slots: then tokens of the next prompt come one by
                one, as if they had been generated, and each overwrites a victim.

        """
        self.strip.restore_scores(self.prompt_len)
        if not in_chunks:
            self.prompt_len = self.logical_len
            return
        self.strip = self.strip.in_order()
        self.victim, self.in_prompt = None, True

    def pack(self) -> None:
        """Keep the tokens that survive."""
        how = (self.budget, self.ranking.by_age, self.num_after)
        self.strip = pack_survivors(self.strip, self.end, *how)

    @property
    def num_after(self) -> int:
        """Tokens after the prompt; -1 within it."""
        return -1 if self.in_prompt else self.logical_len - self.prompt_len

    def _evict(self, ends_prompt: bool, falls_back: bool) -> None:
        """Pack survivors, or select the next victim, if it is time to."""
        if self.in_prompt:
            self.in_prompt, self.prompt_len = not ends_prompt, self.logical_len
            due = ends_prompt or self.eviction.at == "chunk"
            if due and not self.grows and not (self.splits and ends_prompt):
                self.pack()
            return
        full = len(self.strip) == self.budget.capacity and not self.grows
        if falls_back and self.splits:
            return
        if falls_back or (full and not self.budget.overwrites):
            self.pack()
        elif full:
            how = (self.budget, self.ranking.by_age, self.num_after)
            self.victim = select_victim(self.strip, self.end, *how)

    def take_in(self, survivor: int) -> None:
        """Merge the next token's victim into ``survivor``: by attention where scores are means."""
        assert self.victim is not None
        power = self.ranking.power if self.ranking.by_age else 0
        self.strip.merge(survivor, self.victim, self.end, power)

    def _vacate(self) -> int:
        """The slot of the next token; its victim is merged into the nearest key, or dropped."""
        assert self.victim is not None
        if self.merge:
            survivor = nearest(self.strip.key, self.victim, self.merge)
            if survivor is not None:
                self.take_in(survivor)
        return self.victim
