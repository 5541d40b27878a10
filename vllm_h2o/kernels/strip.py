"""The truth, what it is about: a *strip*, all that one KV head holds of one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_h2o.kernels.merge import merged

Rotation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(keys [..., D], distances [...], int64, not negative) -> [..., D]: what the rotary embedding
makes of the keys so many positions earlier."""


@dataclass
class Strip:
    """What one KV head holds of one request: L slots.

    Args:
        key: [L, D].
        value: [L, D].
        score: [L], sum of attention probabilities received, over queries and the GQA group; where
            an observation window scores by maximum, the largest of them in the prompt.
        position: [L], int64; -1 where a slot is empty.
        mass: [L], tokens that each stands for; ones where it is left out.
        score_without_window: [L], of a prompt's tokens, what they get back when the lifetime of its
            observation window is over; zeros where it is left out.
        keeps_scores: whether they will get that back.

    """

    key: torch.Tensor
    value: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor
    mass: torch.Tensor = field(default_factory=lambda: torch.ones(()))
    score_without_window: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    keeps_scores: bool = False

    def __post_init__(self) -> None:
        for name in ("mass", "score_without_window"):
            setattr(self, name, getattr(self, name).to(self.score.dtype).expand(len(self)).clone())

    def ranks(self, logical_len: int, by_age: bool) -> torch.Tensor:
        """[L]: what is compared: scores, or their means over the queries since a token came."""
        return self.score / (logical_len - self.position) if by_age else self.score

    @classmethod
    def empty(cls, head_size: int, dtype: torch.dtype) -> Strip:
        """A strip without slots."""
        return cls(
            torch.empty(0, head_size, dtype=dtype),
            torch.empty(0, head_size, dtype=dtype),
            torch.empty(0, dtype=dtype),
            torch.empty(0, dtype=torch.int64),
        )

    def __len__(self) -> int:
        return self.key.shape[0]

    def store(
        self, slot: int, key: torch.Tensor, value: torch.Tensor, position: int, score: float = 0.0
    ) -> None:
        """Write one token, [D] each, into ``slot``: a victim's, or the next new one."""
        if slot == len(self):
            self.key = torch.cat([self.key, key[None]])
            self.value = torch.cat([self.value, value[None]])
            self.score = torch.cat([self.score, self.score.new_tensor([score])])
            self.position = torch.cat([self.position, self.position.new_tensor([position])])
            self.mass = torch.cat([self.mass, self.mass.new_ones(1)])
            before = self.score_without_window
            self.score_without_window = torch.cat([before, before.new_zeros(1)])
        else:
            self.key[slot], self.value[slot] = key, value
            self.score[slot], self.position[slot], self.mass[slot] = score, position, 1.0

    def page_sums(self, page_size: int) -> torch.Tensor:
        """[L]: of each slot, the sum of the scores in its page."""
        sums = [part.sum().expand_as(part) for part in self.score.split(page_size)]
        return torch.cat(sums) if sums else self.score

    def taken(self, slots: Sequence[int]) -> Strip:
        """The tokens in these slots, in this order."""
        at, without = list(slots), self.score_without_window
        views = (self.key, self.value, self.score, self.position, self.mass, without)
        key, value, score, position, mass, without = (view[at] for view in views)
        return Strip(key, value, score, position, mass, without, self.keeps_scores)

    def in_order(self) -> Strip:
        """Its tokens in order of position; no slot is empty."""
        order = self.position.argsort()
        return self.taken(order[self.position[order] >= 0].tolist())

    def renumber(self, end: int, rotate_back: Rotation, accumulates: bool) -> int:
        """Give tokens positions 0, 1, ... in their order; keys are rotated back by the difference.

        What attention accumulated is multiplied by the new age over the old one, each the number
        of queries from the token's own on. So a mean stays what it was; and a sum is what the token
        got per query, times the queries that its new position says: the past counts for less. Else
        sums of long ago would freeze what is kept, however far a text goes.

        Args:
            end: one past the position of the newest token.
            rotate_back: what the rotary embedding makes of keys some positions earlier.
            accumulates: whether scores are of attention, as sums or means.

        Returns:
            How many tokens there are.

        """
        live = self.position >= 0
        num_live = int(live.sum())
        rank = self.position.argsort().argsort() - (len(self) - num_live)
        rank = torch.where(live, rank, -1)
        self.key = rotate_back(self.key, torch.where(live, self.position - rank, 0))
        if accumulates:
            self.score = self.score * ((num_live - rank) / (end - self.position))
        self.position = rank
        return num_live

    def keep_scores(self) -> None:
        """Before an observation window scores: what tokens have without it."""
        self.score_without_window, self.keeps_scores = self.score, True

    def restore_scores(self, prompt_len: int) -> None:
        """Give the tokens of a prompt that again, once."""
        of_prompt = (self.position < prompt_len) & self.keeps_scores
        self.keeps_scores = False
        self.score = torch.where(of_prompt, self.score_without_window, self.score)

    def merge(self, survivor: int, victim: int) -> None:
        """Let ``survivor`` take a victim in; it keeps its own score and position."""
        self.key[survivor] = merged(self.key, self.mass, survivor, victim)
        self.value[survivor] = merged(self.value, self.mass, survivor, victim)
        self.mass[survivor] += self.mass[victim]
