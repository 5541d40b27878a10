# SPDX-License-Identifier: Apache-2.0
"""Finds later turns that might have continued from an earlier request, and do not.

A later turn begins with the earlier request's prompt and has more tokens. It continues if the
answer follows as it was generated. A chat template that gives the answer back changed, or a client
that edits it, breaks this at some token. A template may also give the end of the prompt back
changed, where it had begun the answer, as with an empty thought.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_h2o.scheduler.prefixes import Name, Names, Prefixes

logger = init_logger("vllm.kv_policy")

HEAD = 8
"""Most tokens at a prompt's end that may begin the answer."""
AGAIN = 4
"""Tokens of the answer, one after the other, by which it is known where such a prompt breaks."""


@dataclass(frozen=True, eq=False)
class _Answer:
    """An earlier request's tokens from where they may differ in a later turn.

    Args:
        name: the name of the tokens before ``start``.
        start: index of the first of ``tokens``.
        prompt_len: tokens of the prompt.
        tokens: the end of the prompt, and the answer.

    """

    name: Name
    start: int
    prompt_len: int
    tokens: array[int]

    def breaks_at(self, request: Request) -> int | None:
        """The index of the first token that differs; None: the request is no later turn."""
        tokens = request.all_token_ids[self.start : self.start + len(self.tokens)]
        pairs = enumerate(zip(self.tokens, tokens, strict=False), self.start)
        broken = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
        if broken is None or broken >= self.prompt_len:
            return broken
        # Another question may begin likewise; a later turn has some of the answer next.
        answer = self.tokens[self.prompt_len - self.start :]
        size = min(AGAIN, len(answer))
        given = array("i", request.all_token_ids[broken : broken + size])
        starts = range(len(answer) - size + 1)
        return broken if size and any(answer[i : i + size] == given for i in starts) else None


class Misses:
    """Knows the answers of entries, and compares later turns with them.

    Args:
        names: names the beginnings of prompts.

    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._answers: Prefixes[_Answer] = Prefixes(names)
        self._of: dict[Hashable, _Answer] = {}
        self._has_reported = False

    def add(self, cached: Hashable, request: Request, length: int, same: Hashable) -> None:
        """Remember the answer of a request that leaves its cache.

        Args:
            cached: its cache.
            request: a request that ends.
            length: tokens that the cache stands for.
            same: what else must be the same for a request that continues.

        """
        prompt_len = request.num_prompt_tokens
        start = max(prompt_len - HEAD, min(prompt_len, HEAD))
        name = self._names.name(request, start, same)
        tokens = array("i", request.all_token_ids[start:length])
        answer = _Answer(name, start, prompt_len, tokens)
        self._answers.put(name, answer)
        self._of[cached] = answer

    def forget(self, cached: Hashable) -> None:
        """Forget the answer of a cache that is gone."""
        answer = self._of.pop(cached, None)
        if answer is not None:
            self._answers.drop(answer.name, answer)

    def is_miss(self, request: Request, same: Hashable, num_begun: int) -> bool:
        """Whether a request might have continued from more tokens than it does.

        Args:
            request: it begins.
            same: what else must be the same.
            num_begun: tokens that it need not compute.

        """
        for answer in self._answers.longest_first(request, same, request.num_tokens):
            broken = answer.breaks_at(request)
            if broken is not None and broken > num_begun:
                self._report(broken, answer)
                return True
        return False

    def _report(self, broken: int, answer: _Answer) -> None:
        """Log the first miss."""
        if self._has_reported:
            return
        self._has_reported = True
        logger.info(
            "continuation: a later turn does not continue. It differs from the earlier one at "
            "token %d of %d, counted from 0; the answer begins at %d. `vllm-h2o check-template "
            "MODEL` shows what a chat template changes. Later ones are only counted: "
            "vllm:kv_policy_continuation_misses_total.",
            broken,
            answer.start + len(answer.tokens),
            answer.prompt_len,
        )
