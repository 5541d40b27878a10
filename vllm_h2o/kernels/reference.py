"""The truth: one layer, one KV head, in plain torch; float64 where the caller's tensors are.

Every other kernel is held to these functions: the definition, line by line, of a strip (strip.py).

Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs", arXiv 2306.14048,
Algorithm 1, in the form that really drops K and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_h2o.kernels.batch import ScoringPass
from vllm_h2o.kernels.merge import nearest
from vllm_h2o.kernels.sinks import SinkLogits, softmax
from vllm_h2o.kernels.strip import Rotation, Strip


def attend_and_score(
    query: torch.Tensor,
    strip: Strip,
    scale: float,
    power: int = 1,
    skip_recent: int = 0,
    first_scoring_query: int = 0,
    by_maximum: bool = False,
    sink_logits: SinkLogits = None,
) -> torch.Tensor:
    """``P = softmax(q K^T * scale + causal); out = P V; score[j] += sum_{queries, group} P[., j]``.

    Where tokens were merged, the logits gain ``log(mass)``.
    With ``by_maximum``: ``score[j] = max(score[j], max_{queries, group} P[., j])``.

    Args:
        query: [T, G, D], of the T newest tokens, whose K and V are in the last T slots (T > 1) or
            in any one slot (T = 1).
        strip: written: scores, unless ``power`` is 0.
        scale: of the logits.
        power: of the probabilities that are added; 0 adds nothing.
        skip_recent: queries add to tokens that are at least so many positions older.
        first_scoring_query: queries from here on, in [0, T], add to scores.
        by_maximum: whether a score becomes the largest contribution, and not their sum.
        sink_logits: [G], of the attention sinks, if there are any: see sinks.py.

    Returns:
        [T, G, D].

    """
    num_queries, length = query.shape[0], len(strip)
    logits = torch.einsum("tgd,jd->tgj", query, strip.key) * scale + strip.mass.log()
    last_visible = torch.arange(length - num_queries, length)
    hidden = torch.arange(length)[None, :] > last_visible[:, None]
    hidden = hidden | (strip.position < 0)
    probs = softmax(logits.masked_fill(hidden[:, None, :], float("-inf")), sink_logits)
    if power:
        query_position = int(strip.position.max()) - torch.arange(num_queries - 1, -1, -1)
        old = query_position[:, None] - strip.position >= skip_recent
        contributions = (probs.pow(power) * old[:, None, :])[first_scoring_query:]
        if by_maximum:
            each = contributions.flatten(0, 1).to(strip.score.dtype)  # [T * G, L]
            strip.score = torch.cat([strip.score[None], each]).amax(dim=0)
        else:
            strip.score = strip.score + contributions.sum(dim=(0, 1)).to(strip.score.dtype)
    return torch.einsum("tgj,jd->tgd", probs, strip.value)


def score_pass(
    query: torch.Tensor, strip: Strip, scale: float, scoring_pass: ScoringPass, sink: SinkLogits
) -> None:
    """``P = softmax(q K^T * scale); score[j] += w * age[j] * E[j]``, E from the columns of P^p.

    Not of the paper. Two kinds of queries score once more: a chunk's, rotated past its end, as if
    the text were read again by the queries that it had (a *second pass*): so a token scores that
    only a later mention of what stands before it would look for. They may go block by block: then
    they see the first page, too, where sinks are, and add to their own. And the prompt's last ones,
    where a question stands, to all but the ``skip_recent`` tokens before each. E[j] is the sum over
    queries and the group by n, the tokens so far; or the largest, of j and of ``reach`` before it.

    Args:
        query: [T, G, D], those that score: in a rotated pass at as many positions later as the
            chunk has tokens; otherwise the last ones, each of which sees tokens up to its own.
        strip: written: scores. The chunk is in its last slots.
        scale: of the logits.
        scoring_pass: what is added.
        sink: [G], as in :func:`attend_and_score`.

    """
    logits = torch.einsum("tgd,jd->tgj", query, strip.key) * scale
    end, slot = int(strip.position.max()) + 1, torch.arange(len(strip))
    block = slot // (scoring_pass.block or len(strip))
    adds = block[-len(query) :, None] == block  # [T, L]
    hidden = ~adds & (slot >= scoring_pass.page)
    if not scoring_pass.rotated:
        age = torch.arange(end - len(query), end)[:, None] - strip.position
        hidden, adds = age < 0, age >= scoring_pass.skip_recent
    probs = softmax(logits.masked_fill(hidden[:, None, :], float("-inf")), sink)  # [T, G, L]
    each = probs.pow(scoring_pass.power) * adds[:, None]
    if scoring_pass.by_maximum:
        column = reached(each.amax(dim=(0, 1)), strip.position, scoring_pass.reach)
    else:
        column = each.sum(dim=(0, 1)) / end
    added = scoring_pass.weight * (end - strip.position) * column
    strip.score = strip.score + added.to(strip.score.dtype)


def select_victim(
    strip: Strip, logical_len: int, num_recent: int, num_sinks: int, by_age: bool = False
) -> int:
    """The slot that the next token takes: the lowest score; of equals, the newest.

    Args:
        strip: a full one.
        logical_len: tokens computed so far.
        num_recent: most recent positions that are no candidates.
        num_sinks: first positions that are no candidates.
        by_age: compare means over the queries since a token was stored.

    """
    slots = [
        slot
        for slot, position in enumerate(strip.position.tolist())
        if num_sinks <= position < logical_len - num_recent
    ]
    ranks = strip.ranks(logical_len, by_age)
    return min(slots, key=lambda slot: (float(ranks[slot]), -int(strip.position[slot])))


def pack_survivors(
    strip: Strip,
    logical_len: int,
    num_survivors: int,
    num_recent: int,
    num_sinks: int,
    by_age: bool = False,
) -> Strip:
    """The ``num_survivors`` tokens that survive the prompt, in order of position.

    The recent window and the sinks survive; then the best scores; of equals, the older ones.
    """
    slots = sorted(range(len(strip)), key=lambda slot: int(strip.position[slot]))
    ranks = strip.ranks(logical_len, by_age)

    def rank(slot: int) -> tuple[bool, float]:
        position = int(strip.position[slot])
        candidate = num_sinks <= position < logical_len - num_recent
        return candidate, -float(ranks[slot]) if candidate else 0.0

    best = sorted(slots, key=rank)[:num_survivors]
    return strip.taken(sorted(best, key=lambda slot: int(strip.position[slot])))


def reached(score: torch.Tensor, position: torch.Tensor, reach: int) -> torch.Tensor:
    """``W[j] = max_{0 <= d <= reach} U[j - d]``, by position: [L].

    Not of the paper: a query looks for where something begins, and what follows must stay with it.

    Args:
        score: [L], what an observation window gave each token, U.
        position: [L], int64.
        reach: positions that a score reaches.

    """
    distance = position[:, None] - position
    within = (distance >= 0) & (distance <= reach)
    return score.expand_as(within).masked_fill(~within, float("-inf")).amax(dim=1)


def select_page(
    strip: Strip, logical_len: int, num_recent: int, num_sinks: int, page_size: int
) -> int:
    """The first slot of the page that goes: the lowest sum; of equals, the newest.

    A page with a sink or a recent token is no candidate.
    """
    able = (strip.position >= num_sinks) & (strip.position < logical_len - num_recent)
    starts = [s for s in range(0, len(strip), page_size) if able[s : s + page_size].all()]
    sums = strip.page_sums(page_size)
    return min(starts, key=lambda slot: (float(sums[slot]), -int(strip.position[slot])))


_MASK = (1 << 64) - 1


def random_score(seed: int, layer: int, head: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone (splitmix64 over their mix)."""
    state = (seed * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9) & _MASK
    state = (state + head * 0x94D049BB133111EB + position * 0xD6E8FEB86659FD93) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) >> 40) / (1 << 24)


@dataclass
class Head:
    """One layer, one KV head, one request, or a conversation, from its first prompt token on.

    Args:
        strip: what is held.
        capacity: slots of a full request.
        num_recent: most recent positions kept.
        num_sinks: first positions kept.
        scale: of the logits.
        power: of the probabilities that are added to scores; 0 adds nothing.
        skip_recent: queries add to tokens that are at least so many positions older.
        packs_chunks: whether survivors are packed after every chunk of the prompt, not at its end.
        by_age: whether scores are compared as means over the queries since a token was stored.
        page_size: tokens that are evicted together, and ranked by the sum of their scores.
        by_maximum: whether a prompt's queries score by maximum.
        reach: when survivors are packed, a score becomes the largest of the token's own and of
            so many tokens' before it. A prompt that is not packed keeps its scores.
        splits: whether a layer's heads share its slots at the prompt's end: see split.py.
        grows: whether nothing is evicted for now, however many tokens there are. Set to false, the
            strip is packed after its next step.
        merge: the next token's victim goes to the nearest key whose cosine exceeds it, right
            before that token is stored; 0: victims are dropped.
        window_lifetime: tokens after the prompt for which what its observation window gave
            counts; 0: for good.
        evict_every: tokens that are evicted at a time past the prompt. With 1 the next token takes
            the slot of one; with more, the step that fills the last of ``capacity`` slots packs
            ``capacity - evict_every`` survivors, with the scores that they have.
        position_limit: positions that tokens may have; what is held is renumbered before a step
            that would need more. None: positions are indices.
        rotate_back: what the rotary embedding makes of a key some positions earlier.
        at_every_step: whether it is renumbered before every step, without the victim, as in
            StreamingLLM (arXiv 2309.17453): to compare with.
        sink_logits: [G], of the query heads, where they have attention sinks.
        offset: what a new token's position is less than its index.
        logical_len: tokens computed so far.
        prompt_len: of them, those of the prompt, once it is complete.
        in_prompt: whether the prompt is not complete yet.
        victim: the slot that the next token takes, once the strip is full: where pages are
            evicted, the first slot of one.
        survivor: the slot that takes the victim in; None: it is dropped.
        next_offset: of that page's slots, the one that the next token takes.

    """

    strip: Strip
    capacity: int
    num_recent: int
    num_sinks: int
    scale: float
    power: int = 1
    skip_recent: int = 0
    packs_chunks: bool = False
    by_age: bool = False
    page_size: int = 1
    by_maximum: bool = False
    reach: int = 0
    splits: bool = False
    grows: bool = False
    merge: float = 0.0
    window_lifetime: int = 0
    evict_every: int = 1
    position_limit: int | None = None
    rotate_back: Rotation | None = None
    at_every_step: bool = False
    sink_logits: SinkLogits = None
    offset: int = 0
    logical_len: int = 0
    prompt_len: int = 0
    in_prompt: bool = True
    victim: int | None = None
    survivor: int | None = None
    next_offset: int = 0

    @property
    def end(self) -> int:
        """One past the position of the newest token."""
        return self.logical_len - self.offset

    def make_room(self, num_new: int) -> int:
        """The position of the next of ``num_new`` tokens: queries and keys are rotated for it."""
        limit = self.position_limit
        if limit is not None and (self.at_every_step or self.end + num_new > limit):
            self.renumber()
        return self.end

    def renumber(self) -> None:
        """Tokens get positions 0, 1, ... in their order."""
        assert self.rotate_back is not None
        if self.at_every_step and self.victim is not None:
            self.strip.position[self.victim] = -1
        start = self.strip.renumber(self.end, self.rotate_back, self.power > 0)
        self.offset = self.logical_len - start

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends_prompt: bool = False,
        initial_scores: Sequence[float] | None = None,
        scoring_start: int = 0,
        passes: Sequence[tuple[ScoringPass, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """Compute T tokens: a chunk of the prompt, or one token after it.

        Args:
            query: [T, G, D].
            key: [T, D].
            value: [T, D].
            ends_prompt: whether the last of them is the last of the prompt.
            initial_scores: [T]; zeros when None.
            scoring_start: position from which on queries add to scores.
            passes: those in which queries score once more, and their [T', G, D].

        Returns:
            [T, G, D].

        """
        self.make_room(key.shape[0])
        for i in range(key.shape[0]):
            slot = len(self.strip) if self.victim is None else self._vacate()
            initial = 0.0 if initial_scores is None else initial_scores[i]
            self.strip.store(slot, key[i], value[i], self.end, initial)
            self.logical_len += 1
        num_new = key.shape[0]
        first = min(max(scoring_start - (self.logical_len - num_new), 0), num_new)
        by_maximum = self.by_maximum and self.in_prompt
        limits = (self.power, self.skip_recent, first, by_maximum, self.sink_logits)
        out = attend_and_score(query, self.strip, self.scale, *limits)
        for scoring_pass, scoring_query in passes:
            if self.window_lifetime and not scoring_pass.rotated:
                self.strip.keep_scores()
            score_pass(scoring_query, self.strip, self.scale, scoring_pass, self.sink_logits)
        length = len(self.strip)
        if self.in_prompt:
            full = length > self.capacity - self.evict_every and not self.grows
            if full and (ends_prompt or self.packs_chunks) and not self.splits:
                self.extend_scores()
                self.pack()
            self.in_prompt, self.prompt_len = not ends_prompt, self.logical_len
        elif length > self.capacity and not self.grows:
            self.extend_scores()
            self.pack()
        elif length == self.capacity and not self.grows:
            if self.evict_every > 1:
                self.pack()
            elif not self.next_offset:
                self._select()
        if not self.in_prompt and self.logical_len - self.prompt_len == self.window_lifetime:
            self.strip.restore_scores(self.prompt_len)
        return out

    def begin_turn(self) -> None:
        """A conversation goes on: next come chunks of a prompt, after all that is held.

        So a conversation of k turns is one request that is evicted from at the end of each turn's
        prompt. An observation window's lifetime is over, and the next victim is kept.
        """
        self.strip.restore_scores(self.prompt_len)
        self.strip = self.strip.in_order()
        self.victim, self.survivor, self.next_offset, self.in_prompt = None, None, 0, True

    def _vacate(self) -> int:
        """The slot of the next token; its page is emptied when it is the first there."""
        assert self.victim is not None
        if self.survivor is not None:
            self.strip.merge(self.survivor, self.victim)
        if self.next_offset == 0:
            self.strip.position[self.victim : self.victim + self.page_size] = -1
        slot = self.victim + self.next_offset
        self.next_offset = (self.next_offset + 1) % self.page_size
        return slot

    def extend_scores(self) -> None:
        """Let scores reach later tokens."""
        if self.reach:
            held = self.strip
            held.score = reached(held.score, held.position, self.reach)

    def pack(self) -> None:
        """Keep ``capacity - evict_every`` tokens."""
        limits = (self.num_recent, self.num_sinks, self.by_age)
        held = self.strip
        if self.page_size > 1:
            ranked = Strip(held.key, held.value, held.page_sums(self.page_size), held.position)
        else:
            ranked = held
        num_survivors = self.capacity - self.evict_every
        best = pack_survivors(ranked, self.end, num_survivors, *limits)
        if self.page_size > 1:  # then slots are in order of position
            best.score = held.score[torch.isin(held.position, best.position)]
        self.strip = best

    def _select(self) -> None:
        limits = (self.strip, self.end, self.num_recent, self.num_sinks)
        if self.page_size > 1:
            self.victim = select_page(*limits, self.page_size)
        else:
            self.take_victim(select_victim(*limits, self.by_age))

    def take_victim(self, slot: int) -> None:
        """Enter the slot that the next token takes, and, of all others, the one it goes to."""
        self.victim = slot
        self.survivor = nearest(self.strip.key, slot, self.merge) if self.merge else None
