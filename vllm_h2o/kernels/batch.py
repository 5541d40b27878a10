# SPDX-License-Identifier: Apache-2.0
"""Arguments of the kernels in one step, whatever the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_h2o.kernels.rope import Rope
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.policy import Ranking, Term


@dataclass(frozen=True)
class Scoring:
    """Numbers that each query adds to the scores of tokens, and how scores are ranked.

    Args:
        power: of the probabilities that are added; 0 adds nothing.
        in_prompt: whether the queries of a prompt add, too, while they attend; else only those past
            it do, and terms are added to what a prompt's tokens have.
        by_age: whether a score is divided by the token's age when tokens are ranked: the number of
            queries since it was stored, its own among them.
        by_page: whether survivors are chosen by whole pages, by the sum of their tokens' ranks.
        merge: cosine above which a victim is merged into the key nearest to it, when a new token
            overwrites it; 0: victims are dropped, and pages hold no masses.

    """

    power: int = 1
    in_prompt: bool = True
    by_age: bool = False
    by_page: bool = False
    merge: float = 0.0

    @classmethod
    def of(cls, ranking: Ranking, by_page: bool = False, merge: float = 0.0) -> Scoring:
        """Take it from a ranking."""
        return cls(ranking.power, ranking.scores_every_query, ranking.by_age, by_page, merge)


@dataclass(frozen=True)
class StepTensors:
    """One layer's tensors of one step: a row for each of its T tokens.

    Args:
        query: [T, Hq, D], the model's dtype.
        key: [T, H, D], the model's dtype.
        value: [T, H, D], the model's dtype.
        out: [T, Hq, D], written: the model's dtype, or float32.
        scale: of the logits.
        sink_logits: [Hq], float32, of the layer's attention sinks; None: it has none. For a term
            [T, Hq], too, where queries see other keys than their chunk's.
        layer_index: the layer's place in the chunks' ``window_scores``.
        rope: of the layer, for queries of a rotated term; None: they are rotated already.
        lse: [Hq, T], float32: the log-sum-exp of each query's logits, as ``Kernels.prefill`` found
            it; None: it is not known.

    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    scale: float
    sink_logits: SinkLogits = None
    layer_index: int = 0
    rope: Rope | None = None
    lse: torch.Tensor | None = None

    def rotates(self, term: Term | None) -> Rope | None:
        """Name what rotates the queries of a term; None: nothing does."""
        is_rotated = term is not None and term.queries == "rotated"
        return self.rope if is_rotated and self.rope and self.rope.size else None


DECODE_FIELDS = (
    "token",
    "attended_len",
    "overwrites",
    "selects",
    "logical_start",
    "recent_start",
    "num_sinks",
    "scores",
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
            attended_len: slots [0, attended_len) are attended to.
            overwrites: 1 where the new token takes its victim's slot; elsewhere it takes slot
                ``attended_len - 1``.
            selects: 1 where a victim is chosen after this step.
            logical_start: position of the new token.
            recent_start: positions from here on are never victims.
            num_sinks: positions below are never victims.
            scores: 1 where the query adds to scores.
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
        first_scoring_query: queries of the chunk from here on, in [0, T], add to the pages' scores
            while they attend, and are those of a rotated or reread term.
        first_scored_slot: a term's queries see the slots before it, and add nothing to them.
        first_window_query: queries from here on, in [0, T], are those of a window term.
        shift: positions by which queries of a rotated term are rotated.
        destination_blocks: [P'], int32: ids of the blocks that survivors are copied to, because
            others read the chunk's own; None: they move to the first slots of their own blocks.
        splits: whether KV heads share the slots of all survivors, and those for the next tokens;
            ``num_survivors`` is their mean then.
        window_scores: [num_layers, H, attended_len], float32: a window term's values, of a chunk
            with ``destination_blocks``: written by each layer, read when survivors are copied.
            None: a term's values are added to the pages' scores.

    """

    tokens: slice
    block_table: torch.Tensor
    resident_start: int
    logical_start: int
    num_survivors: int = 0
    recent_start: int = 0
    num_sinks: int = 0
    first_scoring_query: int = 0
    first_window_query: int = 0
    first_scored_slot: int = 0
    shift: int = 0
    destination_blocks: torch.Tensor | None = None
    splits: bool = False
    window_scores: torch.Tensor | None = None

    def first_query(self, term: Term) -> int:
        """Queries of the chunk from here on are those of a term."""
        return self.first_window_query if term.queries == "window" else self.first_scoring_query

    def in_blocks(self, term: Term, page: int) -> list[PromptChunk]:
        """Cut the chunk into what the term's queries see: all, or the first page and a block each.

        A block's chunk ends where this one does, so that its tokens are as old.

        Args:
            term: its blocks are rounded down to whole pages, at least one.
            page: slots of a page.

        """
        first, blocks = self.resident_start + self.first_query(term), []
        if first == self.attended_len:
            return []
        if not term.block:
            return [self]
        size = term.block_slots(page)
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
