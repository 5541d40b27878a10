# SPDX-License-Identifier: Apache-2.0
"""A *strip*: all that one KV head holds of one request. Reference.py defines what is done to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_h2o.kernels.merge import attention_paid, merged

Rotation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(keys [..., D], distances [...], int64, not negative) -> [..., D]: what the rotary embedding
makes of each key that many positions earlier."""


@dataclass
class Strip:
    """The L slots of one KV head, of one request.

    Args:
        key: [L, D].
        value: [L, D].
        score: [L], the sum of the ranking's terms; times the token's age where it is a mean.
        position: [L], int64.
        mass: [L], tokens that each stands for; ones where it is left out.
        score_without_window: [L], of a prompt's tokens, the score that they get back when the
            lifetime of a term is over; zeros where it is left out.
        keeps_scores: whether they will get that back.

    """

    key: torch.Tensor
    value: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor
    mass: torch.Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float32))
    score_without_window: torch.Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float32)
    )
    keeps_scores: bool = False

    def __post_init__(self) -> None:
        for name in ("mass", "score_without_window"):
            setattr(self, name, getattr(self, name).to(self.score.dtype).expand(len(self)).clone())

    def ranks(self, logical_len: int, by_age: bool) -> torch.Tensor:
        """[L]: scores, or with ``by_age`` their means over the queries since a token was stored."""
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

    def store(self, slot: int, key: torch.Tensor, value: torch.Tensor, position: int) -> None:
        """Write one token, [D] each, into ``slot``: a victim's, or the next new one."""
        if slot == len(self):
            self.key = torch.cat([self.key, key[None]])
            self.value = torch.cat([self.value, value[None]])
            self.score = torch.cat([self.score, self.score.new_zeros(1)])
            self.position = torch.cat([self.position, self.position.new_tensor([position])])
            self.mass = torch.cat([self.mass, self.mass.new_ones(1)])
            before = self.score_without_window
            self.score_without_window = torch.cat([before, before.new_zeros(1)])
        else:
            self.key[slot], self.value[slot] = key, value
            self.score[slot], self.position[slot], self.mass[slot] = 0.0, position, 1.0

    def taken(self, slots: Sequence[int]) -> Strip:
        """The tokens in these slots, in this order."""
        at, without = list(slots), self.score_without_window
        views = (self.key, self.value, self.score, self.position, self.mass, without)
        key, value, score, position, mass, without = (view[at] for view in views)
        return Strip(key, value, score, position, mass, without, self.keeps_scores)

    def in_order(self) -> Strip:
        """Its tokens in order of position."""
        return self.taken(self.position.argsort().tolist())

    def renumber(self, end: int, rotate_back: Rotation, accumulates: bool) -> int:
        """Give tokens positions 0, 1, ... in their order; keys are rotated back by the difference.

        Accumulated attention is multiplied by the new age over the old one, each the number of
        queries from the token's own on. So a mean stays as it was; and a sum becomes the token's
        mean, times the queries that its new position says: the past counts for less. Else sums of
        long ago would freeze what is kept, however far a text goes.

        Args:
            end: one past the position of the newest token.
            rotate_back: what the rotary embedding makes of keys some positions earlier.
            accumulates: whether scores are of attention, as sums or means.

        Returns:
            How many tokens there are.

        """
        rank = self.position.argsort().argsort()
        self.key = rotate_back(self.key, self.position - rank)
        if accumulates:
            self.score = self.score * ((len(self) - rank) / (end - self.position))
        self.position = rank
        return len(self)

    def keep_scores(self) -> None:
        """Before a term with a lifetime is added: keep the scores that tokens have without it."""
        self.score_without_window, self.keeps_scores = self.score, True

    def restore_scores(self, prompt_len: int) -> None:
        """When a term's lifetime is over: give a prompt's tokens the scores without it, once."""
        of_prompt = (self.position < prompt_len) & self.keeps_scores
        self.keeps_scores = False
        self.score = torch.where(of_prompt, self.score_without_window, self.score)

    def merge(self, survivor: int, victim: int, end: int = 0, power: int = 0) -> None:
        """Let ``survivor`` take a victim in; it keeps its own score and position.

        Args:
            survivor: a slot.
            victim: a slot.
            end: one past the position of the newest token; read with a power.
            power: of the probabilities whose mean is ranked; 0: tokens weigh by their masses.

        """
        weight = self.mass
        if power:
            weight = attention_paid(self.score, end - self.position, power)
        self.key[survivor] = merged(self.key, weight, survivor, victim)
        self.value[survivor] = merged(self.value, weight, survivor, victim)
        self.mass[survivor] += self.mass[victim]
