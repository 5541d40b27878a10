"""What one step asks of the kernels, whatever device they are for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_h2o.kernels.sinks import SinkLogits


@dataclass(frozen=True)
class ScoringPass:
    """Queries of a prompt that score once more, when their chunk is stored.

    ``score[j] += weight * age[j] * E[j]``, where E is what the queries give to a token, over
    queries and the GQA group: its mean over the tokens so far, or the largest contribution.

    Args:
        weight: relative to a mean over all queries.
        rotated: whether the chunk's queries are rotated past its end, and see every token; or the
            prompt's last queries, its observation window, score as they are.
        by_maximum: whether the largest contribution counts, and not the mean.
        reach: a token takes the largest of its own contribution and of so many tokens' before it.
        power: of the probabilities.
        block: a rotated query sees the block of so many slots that it is in, and the first
            ``page`` slots, to which it adds only from the first block; 0: it sees every token.
        page: slots of a page; blocks are whole pages: see :meth:`in_pages`.
        reads_again: whether the queries of a rotated pass are those that the model has when it
            reads the tokens a second time, and not those that it had, rotated.
        skip_recent: queries that are not rotated add to tokens at least so many positions older.

    """

    weight: float
    rotated: bool
    by_maximum: bool = False
    reach: int = 0
    power: int = 2
    block: int = 0
    page: int = 0
    reads_again: bool = False
    skip_recent: int = 0

    def __post_init__(self) -> None:
        if self.block and (self.reach or not self.rotated):
            raise ValueError(f"only a rotated pass without a reach goes block by block: {self}")
        if self.skip_recent and self.rotated:
            raise ValueError(f"rotated queries are older than no token: {self}")

    def in_pages(self, page_size: int) -> ScoringPass:
        """The same, with blocks of whole pages: as many as fit, or one."""
        if not self.block:
            return self
        block = max(self.block // page_size, 1) * page_size
        return replace(self, block=block, page=page_size)


@dataclass(frozen=True)
class Scoring:
    """What attention adds to the score of a token, and what is ranked.

    Args:
        power: 0 adds nothing: scores stay the initial ones; 1 adds each probability, 2 its square.
        skip_recent: a query adds to tokens that are at least so many positions older than it; 0
            lets each token's own query count.
        by_page: whether pages are ranked, by the sum of their tokens' scores, and not tokens.
        by_age: whether a score is ranked as a mean: divided by the number of queries since the
            token was stored, its own among them.
        passes: those in which a prompt's queries score once more, one after the other.
        by_maximum: whether what a prompt's queries give to a token is the largest of their
            contributions, over queries and the GQA group, and not their sum.
        reach: when survivors are chosen, a token's score becomes the largest of its own and of so
            many tokens' before it.
        merge: cosine above which a victim is merged into the key nearest to it, when a new token
            overwrites it; 0: victims are dropped, and pages hold no masses.

    """

    power: int = 1
    skip_recent: int = 0
    by_page: bool = False
    by_age: bool = False
    passes: tuple[ScoringPass, ...] = ()
    by_maximum: bool = False
    reach: int = 0
    merge: float = 0.0


WINDOW_REACH = 12
"""Tokens after one that an observation window's queries look at, which stay with it: a written-out
date has ten."""

WINDOW_SKIP = 16
"""Tokens right before an observation window's queries, to which they add nothing: any token looks
at those before it, and what is no more than that would outlive the facts of a prompt."""

MEAN_SECOND_PASS = ScoringPass(weight=4.0, rotated=True)
LARGEST_SECOND_PASS = ScoringPass(weight=0.1, rotated=True, by_maximum=True, block=256)
RECONSTRUCTION_PASS = replace(LARGEST_SECOND_PASS, reads_again=True)
WINDOW_PASS = ScoringPass(
    weight=0.3, rotated=False, by_maximum=True, reach=WINDOW_REACH, skip_recent=WINDOW_SKIP
)
"""What scores are made of besides the attention that was paid: see docs/options.md."""


@dataclass(frozen=True)
class StepTensors:
    """One layer's tensors of one step: a row for each of its T tokens.

    Args:
        query: [T, Hq, D], the model's dtype.
        key: [T, H, D], the model's dtype.
        value: [T, H, D], the model's dtype.
        out: [T, Hq, D], written: the model's dtype, or float32.
        initial_score: [T, H], float32: scores that tokens are stored with; None: zero.
        scale: of the logits.
        sink_logits: [Hq], float32, of the layer's attention sinks; None: it has none.
        layer_index: the layer's place in the chunks' ``window_scores``.

    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    initial_score: torch.Tensor | None
    scale: float
    sink_logits: SinkLogits = None
    layer_index: int = 0


DECODE_FIELDS = (
    "token",
    "attended_len",
    "overwrites",
    "selects",
    "logical_start",
    "recent_start",
    "num_sinks",
    "seed",
    "next_offset",
    "num_free_slots",
    "scores",
    "in_prompt",
    "split",
)
"""Rows of :attr:`DecodeBatch.fields`. Triton's and C++'s constants are derived from these names."""


@dataclass(frozen=True)
class DecodeBatch:
    """B requests with one query each; P pages in the longest.

    A request whose ``attended_len`` is 0 is padding: of it only the output is written, with zeros.

    Args:
        block_table: [B, P], int32: block ids; what follows a request's own is never touched.
        fields: [len(DECODE_FIELDS), B], int64, of any strides, one row each:

            token: row of the request's token in the step's tensors.
            attended_len: slots [0, attended_len) are attended to, less the free ones.
            overwrites: 1 where the new token takes slot ``victim + next_offset``; elsewhere it
                takes slot ``attended_len - 1``.
            selects: 1 where a victim is chosen after this step.
            logical_start: position of the new token.
            recent_start: positions from here on are never victims.
            num_sinks: positions below are never victims.
            seed: of the ``random`` policy.
            next_offset: offset in the victim block that the new token takes; 0 where single tokens
                are evicted.
            num_free_slots: slots after the new token's that hold evicted tokens: not attended to.
            scores: 1 where the query adds to scores.
            in_prompt: 1 where the token is of the prompt: its query scores as those of a chunk do.
            split: 1 where KV heads have unequal numbers of slots, which are all taken: rows of the
                cache that :attr:`LayerCache.first_rows` tells, and ``attended_len`` on average.

    """

    block_table: torch.Tensor
    fields: torch.Tensor

    def field(self, name: str) -> torch.Tensor:
        """[B], int64: one of the fields."""
        return self.fields[DECODE_FIELDS.index(name)]

    @property
    def first_block_ids(self) -> torch.Tensor:
        """[B], int32: each request's first block id, under which its victims are kept."""
        return self.block_table[:, 0]


@dataclass(frozen=True, kw_only=True)
class PromptChunk:
    """T tokens of one request's prompt, or the one with which it is packed past it.

    Args:
        tokens: rows of the chunk in the step's tensors.
        block_table: [P], int32: ids of the blocks that hold slots [0, attended_len); what follows
            them is never touched.
        resident_start: slots in use before the chunk; query i attends to slots
            [0, resident_start + i].
        logical_start: position of the first token.
        num_survivors: tokens that survive the chunk; 0 when nothing is packed; where all do, they
            are copied as they are.
        recent_start: positions from here on survive.
        num_sinks: positions below survive.
        seed: of the ``random`` policy.
        first_scoring_query: queries of the chunk from here on, in [0, T], add to the pages' scores.
        first_scored_slot: a scoring pass sees the slots before it, and adds nothing to them.
        first_window_query: queries from here on, in [0, T], are of the observation window: they
            score into ``window_scores``, where there are any, and in its scoring pass.
        destination_blocks: [P'], int32: ids of the blocks that survivors are copied to, because
            others read the chunk's own; None: they move to the first slots of their own blocks.
        splits: whether KV heads share the slots of all survivors, and those for the next tokens;
            ``num_survivors`` is their mean then.
        window_scores: [num_layers, H, attended_len], float32: what the observation window gives to
            each token, of a chunk with ``destination_blocks``; written by each layer, read when
            survivors are packed. None where attention does not score.

    """

    tokens: slice
    block_table: torch.Tensor
    resident_start: int
    logical_start: int
    num_survivors: int = 0
    recent_start: int = 0
    num_sinks: int = 0
    seed: int = 0
    first_scoring_query: int = 0
    first_window_query: int = 0
    first_scored_slot: int = 0
    destination_blocks: torch.Tensor | None = None
    splits: bool = False
    window_scores: torch.Tensor | None = None

    def first_query(self, scoring_pass: ScoringPass) -> int:
        """Queries of the chunk from here on score in a pass."""
        return self.first_scoring_query if scoring_pass.rotated else self.first_window_query

    def in_blocks(self, scoring_pass: ScoringPass) -> list[PromptChunk]:
        """What the pass's queries see, as chunks: all, or the first page and a block for each.

        A block's chunk ends where this one does, so that its tokens are as old.
        """
        size, page = scoring_pass.block, scoring_pass.page
        first, blocks = self.resident_start + self.first_query(scoring_pass), []
        if first == self.attended_len:
            return []
        if not size:
            return [self]
        for start in range(first // size * size, self.attended_len, size):
            begin, end = max(start, first), min(start + size, self.attended_len)
            lead, at = (page if start else 0), start // page
            table = self.block_table[at : at + size // page]
            table = torch.cat([self.block_table[:1], table]) if lead else table
            block = replace(
                self,
                tokens=slice(*(self.tokens.start + s - self.resident_start for s in (begin, end))),
                block_table=torch.nn.functional.pad(table, (0, size // page + 1 - len(table))),
                resident_start=lead + begin - start,
                logical_start=self.logical_end - (end - begin),
                first_scoring_query=0,
                first_scored_slot=lead,
            )
            blocks.append(block)
        return blocks

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.stop - self.tokens.start

    @property
    def logical_end(self) -> int:
        """One past the position of the last token."""
        return self.logical_start + self.num_tokens

    @property
    def num_heavy(self) -> int:
        """Survivors that are neither sinks nor recent."""
        return self.num_survivors - self.num_sinks - (self.logical_end - self.recent_start)

    @property
    def attended_len(self) -> int:
        """Slots in use after the chunk, before anything is packed."""
        return self.resident_start + self.num_tokens
