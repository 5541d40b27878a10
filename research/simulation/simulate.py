# SPDX-License-Identifier: Apache-2.0
"""Eviction on given tokens in plain torch: an oracle for the engine, and a place to try scores.

What one layer evicts depends on its own queries and keys alone, and the tokens are given. So texts
are run layer by layer: one matrix product makes all logits of a layer, and the loop over steps only
picks the resident ones. Questions are run step by step, from a context that is computed once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own custom)

from benchmarks.quality.llama import Llama
from research.simulation.variants import Ranks, Variant, given, novelty, prompt_score, replayed


class Slots:
    """The slots of one layer: scores and positions of what is resident.

    Args:
        variant: what stays.
        capacity: slots.
        key: [W, H, n, D], of the prompt.
        score: [W, H, n], that it has given.

    """

    def __init__(
        self, variant: Variant, capacity: int, key: torch.Tensor, score: torch.Tensor
    ) -> None:
        self.ranks = Ranks(variant, capacity)
        num_windows, num_heads, length, head_size = key.shape
        self.total = key.new_zeros(num_windows, num_heads, head_size)
        worth, self.total = novelty(variant, key, self.total)
        position = torch.arange(length).expand_as(score)
        self.kept = self.ranks.survivors(position, score, worth)
        self.count = self.kept.shape[2]
        room = (0, max(capacity - self.count, 0))
        self.position = F.pad(self.kept, room)
        self.score = F.pad(score.gather(2, self.kept), room)
        self.worth = F.pad(worth.gather(2, self.kept), room)
        self.victim: torch.Tensor | None = None

    def store(self, position: int, key: torch.Tensor) -> torch.Tensor:
        """Give a token, [W, H, 1, D], its slot: [W, H, 1]."""
        if self.victim is None:
            slot = torch.full((*key.shape[:2], 1), self.count)
            self.count += 1
        else:
            slot = self.victim
        worth, self.total = novelty(self.ranks.variant, key, self.total)
        self.position.scatter_(2, slot, position)
        self.score.scatter_(2, slot, 0.0)
        self.worth.scatter_(2, slot, worth)
        return slot

    def observe(self, probs: torch.Tensor, position: int) -> None:
        """Score the [W, H, G, L] probabilities of the query there; choose a victim when full."""
        variant, held = self.ranks.variant, slice(0, self.count)
        received = given(variant, probs, position - self.position[..., held])
        score = self.score[..., held]
        if variant.running_max:
            torch.maximum(score, received, out=score)
        else:
            score.mul_(variant.decay).add_(received)
        if self.count == self.position.shape[2]:
            ranks = self.ranks.ranks(self.position, self.score, self.worth, position + 1)
            self.victim = ranks.argmin(-1, keepdim=True)


def ask_again(model: Llama, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Probabilities [W, H, G, n, n] of a prompt's queries, asked once more from behind its end.

    Query ``i`` is turned to position ``n + i``, and sees every token: as if the prompt were read a
    second time, by the queries that it had when it was read first.
    """
    again = model.rotate(query, key.shape[2], step=0) * model.scale
    logits = torch.matmul(again.flatten(2, 3), key.transpose(2, 3))
    return logits.softmax(-1).unflatten(2, query.shape[2:4])


def attend_layer(
    variant: Variant,
    capacity: int,
    prompt: int,
    logits: torch.Tensor,
    key: torch.Tensor,
    again: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn a layer's logits into probabilities of what is resident.

    Args:
        variant: what stays.
        capacity: slots.
        prompt: tokens that are evicted from at their end.
        logits: [W, H, G, T, T], overwritten.
        key: [W, H, T, D].
        again: [W, H, G, n, n], of the prompt: see :func:`ask_again`.

    Returns:
        ``logits``.

    """
    first = (..., slice(0, prompt), slice(0, prompt))
    causal = torch.ones(prompt, prompt, dtype=torch.bool).triu(1)
    probs = torch.softmax(logits[first].masked_fill(causal, -torch.inf), dim=-1)
    score = prompt_score(variant, probs)
    if again is not None:
        score = score + replayed(variant, again)
    logits[..., :prompt, :] = 0.0
    logits[first] = probs
    slots = Slots(variant, capacity, key[:, :, :prompt], score)
    for position in range(prompt, logits.shape[-1]):
        slots.store(position, key[:, :, position : position + 1])
        held = slots.position[..., : slots.count]
        where = held[:, :, None].expand(*logits.shape[:3], -1)
        row = logits[..., position, :]
        probs = torch.softmax(row.gather(3, where), dim=-1)
        row.zero_()
        row.scatter_(3, where, probs)
        slots.observe(probs, position)
    return logits


@torch.no_grad()
def teacher_forced_nll(
    model: Llama, ids: torch.Tensor, prompt: int, variant: Variant | None, capacity: int = 0
) -> torch.Tensor:
    """Judge each token, given the resident ones before it.

    Args:
        model: the model.
        ids: [W, T] tokens.
        prompt: tokens that are attended to in full, and evicted from at their end.
        variant: what stays; None: everything.
        capacity: slots.

    Returns:
        [W, T - 1] nats.

    """
    x = model.embed(ids)
    groups = model.num_heads // model.num_kv_heads
    buffer = torch.empty(len(ids), model.num_kv_heads, groups, ids.shape[1], ids.shape[1])
    for layer in range(model.num_layers):
        query, key, value = model.qkv(layer, x, 0)
        flat = (query * model.scale).flatten(2, 3)
        torch.matmul(flat, key.transpose(2, 3), out=buffer.flatten(2, 3))
        if variant is None:
            causal = torch.ones(buffer.shape[-2:], dtype=torch.bool).triu(1)
            probs = buffer.masked_fill_(causal, -torch.inf).softmax(-1)
        else:
            again = None
            if variant.replay:
                again = ask_again(model, query[..., :prompt, :], key[:, :, :prompt])
            probs = attend_layer(variant, capacity, prompt, buffer, key, again)
        attended = torch.matmul(probs.flatten(2, 3), value).view_as(query)
        x = model.finish(layer, x, attended)
    return model.nll(x[:, :-1], ids[:, 1:])


class Context:
    """A context, computed once: keys, values, and the scores that each variant gives it.

    Args:
        model: the model.
        ids: [W, n] tokens.
        variants: those that will evict from it.

    """

    @torch.no_grad()
    def __init__(self, model: Llama, ids: torch.Tensor, variants: tuple[Variant, ...]) -> None:
        self.model, self.length = model, ids.shape[1]
        self.layers: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []
        causal = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        x = model.embed(ids)
        for layer in range(model.num_layers):
            query, key, value = model.qkv(layer, x, 0)
            outs, scores = [], {variant.name: [] for variant in variants}
            for q, k, v in zip(query.split(4), key.split(4), value.split(4), strict=True):
                logits = torch.matmul((q * model.scale).flatten(2, 3), k.transpose(2, 3))
                probs = logits.unflatten(2, q.shape[2:4]).masked_fill_(causal, -torch.inf)
                probs = probs.softmax(-1)
                outs.append(torch.matmul(probs.flatten(2, 3), v).view_as(q))
                shared: dict[object, torch.Tensor] = {}
                again = ask_again(model, q, k) if any(v.replay for v in variants) else probs
                for variant in variants:
                    score = prompt_score(variant, probs, shared)
                    if variant.replay:
                        score = score + replayed(variant, again)
                    scores[variant.name].append(score)
            x = model.finish(layer, x, torch.cat(outs))
            self.layers.append((key, value, {n: torch.cat(parts) for n, parts in scores.items()}))
        self.guess = model.logits(x[:, -1]).argmax(-1)

    @torch.no_grad()
    def hits(self, tail: torch.Tensor, variant: Variant, capacity: int) -> torch.Tensor:
        """[W, S], bool: whether each token of a tail is the most probable, after eviction."""
        model, guesses = self.model, [self.guess]
        states = [
            (Slots(variant, capacity, key, scores[variant.name]), *_padded(key, value, capacity))
            for key, value, scores in self.layers
        ]
        for slots, keys, values in states:
            at = slots.kept[..., None].expand(-1, -1, -1, model.head_size)
            for cache in (keys, values):
                cache[:, :, : slots.count] = cache.gather(2, at)
        for position, token in enumerate(tail[:, :-1].unbind(1), start=self.length):
            x = model.embed(token[:, None])
            for layer, (slots, keys, values) in enumerate(states):
                query, key, value = model.qkv(layer, x, position)
                at = slots.store(position, key)[..., None].expand_as(key)
                keys.scatter_(2, at, key)
                values.scatter_(2, at, value)
                k, v = keys[:, :, : slots.count], values[:, :, : slots.count]
                logits = torch.matmul(query[:, :, :, 0] * model.scale, k.transpose(2, 3))
                probs = logits.softmax(-1)
                slots.observe(probs, position)
                x = model.finish(layer, x, torch.matmul(probs, v)[:, :, :, None])
            guesses.append(model.logits(x[:, 0]).argmax(-1))
        return torch.stack(guesses, 1) == tail


def _padded(
    key: torch.Tensor, value: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    room = (0, 0, 0, max(capacity - key.shape[2], 0))
    return F.pad(key, room).clone(), F.pad(value, room).clone()
