# SPDX-License-Identifier: Apache-2.0
"""How tokens are ranked: a list of terms. Pure Python: no vLLM, no torch.

The rank of token j of a KV head is a weighted sum over terms::

    rank[j] = sum_t weight_t * value_t[j]

    P[i, j]     attention probability that query i of the KV head's group pays to token j
    value[j]    sum:  sum_i P[i, j] ** power
                mean: that sum / the queries since j was stored, its own among them
                max:  max_i P[i, j] ** power
    then        value[j] = max_{0 <= d <= reach} value[j - d], by position

A page stores one number for each token, the score: the sum of all terms, times the token's age
where the first term is a mean. Source of the sum: H2O, arXiv 2306.14048, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Queries = Literal["all", "window", "rotated", "reread"]
Reduce = Literal["sum", "mean", "max"]


@dataclass(frozen=True)
class Term:
    """Attention that some queries pay to each token.

    Args:
        queries: ``all``: every query of prompt and output. ``window``: the prompt's last
            ``observation_window`` queries. ``rotated``: the prompt's queries, rotated to positions
            past the prompt, so that they also see later tokens. ``reread``: the queries that the
            model has when it reads the prompt a second time.
        reduce: how the queries' contributions become one number.
        power: exponent of the probabilities, 1 or 2.
        weight: factor of the term.
        reach: a token takes the largest value of its own and of this many tokens before it.
        skip: a query gives nothing to tokens fewer than this many positions before it.
        block: ``rotated`` and ``reread`` queries see their own block of this many tokens and the
            prompt's first page; 0: the whole prompt.
        lifetime: tokens after the prompt for which the term counts; 0: always.

    """

    queries: Queries
    reduce: Reduce = "sum"
    power: int = 1
    weight: float = 1.0
    reach: int = 0
    skip: int = 0
    block: int = 0
    lifetime: int = 0

    def __post_init__(self) -> None:
        if self.queries not in ("all", "window", "rotated", "reread"):
            raise ValueError(f"queries are all, window, rotated or reread: {self}")
        if self.reduce not in ("sum", "mean", "max"):
            raise ValueError(f"contributions are reduced by sum, mean or max: {self}")
        if self.power not in (1, 2):
            raise ValueError(f"power is 1 or 2: {self}")
        if min(self.reach, self.skip, self.block, self.lifetime) < 0 or self.weight < 0:
            raise ValueError(f"a term has a negative part: {self}")
        if self.block and (self.reach or not self.sees_later):
            raise ValueError(f"only rotated or reread queries without reach go by blocks: {self}")
        if self.skip and self.queries != "window":
            raise ValueError(f"only window queries skip the tokens before them: {self}")
        if self.lifetime and self.queries != "window":
            raise ValueError(f"only a window term has a lifetime: {self}")

    @property
    def sees_later(self) -> bool:
        """Whether a query also sees tokens after its own."""
        return self.queries in ("rotated", "reread")

    def block_slots(self, page_size: int) -> int:
        """Slots of a block: ``block`` rounded down to whole pages, at least one page.

        Args:
            page_size: slots of a page.

        """
        return max(self.block // page_size, 1) * page_size


@dataclass(frozen=True, init=False)
class Ranking:
    """The terms of a policy, in the order in which they are added. No terms: position decides.

    The first term is the one that goes on after the prompt: every later query adds its
    probabilities, to the first term's power. It is ``all``, or ``window`` where no other query of
    the prompt counts. The others are computed once, when the prompt is stored.

    Raises:
        ValueError: for terms that do not add up to one score.

    """

    terms: tuple[Term, ...]

    def __init__(self, *terms: Term) -> None:
        object.__setattr__(self, "terms", terms)
        if not terms:
            return
        first, *later = terms
        if first.queries not in ("all", "window"):
            raise ValueError(f"the first term goes on after the prompt: all or window, not {first}")
        if first.queries == "all" and (first.reduce == "max" or first.reach):
            raise ValueError(f"all queries are reduced by sum or mean, without reach: {first}")
        if first.weight != 1 or first.lifetime:
            raise ValueError(f"the first term has weight 1 and counts always: {first}")
        if any(term.queries == "all" for term in later):
            raise ValueError(f"only the first term counts all queries: {terms}")
        if any(term.reduce == "mean" for term in self.passes):
            raise ValueError(f"only a term over all queries is a mean: {terms}")
        if any(term.lifetime for term in later[:-1]):
            raise ValueError(f"a term with a lifetime comes last: {terms}")
        kinds = [term.queries for term in terms]
        if len(set(kinds)) < len(kinds) or {"rotated", "reread"} <= set(kinds):
            raise ValueError(f"there is one term of a kind, and rotated or reread: {terms}")

    @property
    def power(self) -> int:
        """Exponent of the probabilities that every query after the prompt adds; 0: none adds."""
        return self.terms[0].power if self.terms else 0

    @property
    def by_age(self) -> bool:
        """Whether a score is divided by the token's age when tokens are ranked."""
        return bool(self.terms) and self.terms[0].reduce == "mean"

    @property
    def scores_every_query(self) -> bool:
        """Whether every query of a prompt adds to scores."""
        return bool(self.terms) and self.terms[0].queries == "all"

    @property
    def passes(self) -> tuple[Term, ...]:
        """The terms that are computed once, when a chunk of the prompt is stored."""
        return tuple(term for term in self.terms if term.queries != "all")

    def term(self, *queries: Queries) -> Term | None:
        """The term of one of these kinds, if there is one."""
        return next((term for term in self.terms if term.queries in queries), None)

    @property
    def lifetime(self) -> int:
        """Tokens after the prompt for which the last term counts; 0: always."""
        return self.terms[-1].lifetime if self.terms else 0

    def without(self, queries: Queries) -> Ranking:
        """The ranking without the terms of one kind."""
        return Ranking(*(term for term in self.terms if term.queries != queries))
