"""Survivors of a prompt, in plain torch, for any device.

Twin of ``reference.pack_survivors``, batched over KV heads. What runs on the pages that requests
share: scores of an observation window are kept beside them, and survivors are copied out of them.
And what a prompt's queries add to scores when they are asked a second time.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import REPLAY_WEIGHT, PromptChunk, Scoring, page_rows
from vllm_h2o.kernels.cache import Page

PLAIN = Scoring()

QUERY_TILE = 128
"""Queries whose probabilities are held at once: num_heads * QUERY_TILE * length floats."""

MOST_PROBABILITIES = 1 << 26
"""Those of fewer queries where a prompt is long: 256 MiB."""


def own_rows(page: Page, chunk: PromptChunk) -> torch.Tensor:
    """[H, P], int64: rows of the page views that hold the chunk and what precedes it."""
    num_pages = -(-chunk.end // page.block_size)
    return page_rows(chunk.table[:num_pages], page.num_kv_heads)


def probabilities(
    query: torch.Tensor, key: torch.Tensor, last_seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """``softmax(q K^T * scale)`` of a few queries, each over the slots that it sees.

    Args:
        query: [T, Hq, D].
        key: [H, L, D], float32.
        last_seen: [T]: the slot of each query's own token.
        scale: of the logits.

    Returns:
        [H, G, T, L], float32: the queries of a GQA group side by side.

    """
    grouped = query.unflatten(1, (key.shape[0], -1)).permute(1, 2, 0, 3).to(torch.float32) * scale
    logits = torch.matmul(grouped.flatten(1, 2), key.transpose(1, 2))
    logits = logits.unflatten(1, (-1, query.shape[0]))
    hidden = torch.arange(key.shape[1], device=key.device) > last_seen[:, None]
    return torch.softmax(logits.masked_fill_(hidden, float("-inf")), dim=-1)


def given(
    probs: torch.Tensor, asked: torch.Tensor, position: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """What queries add to scores.

    Args:
        probs: [H, G, T, L].
        asked: [T]: position of each query.
        position: [H, L]: of each token.
        scoring: what is added.

    Returns:
        [H, L]: sums over the queries and the GQA group.

    """
    each = probs.pow(scoring.power)
    if scoring.skip_recent:
        age = asked[:, None] - position[:, None, :]
        each = each.masked_fill((age < scoring.skip_recent)[:, None], 0.0)
    return each.sum(dim=(1, 2))


def window_scores(
    page: Page, chunk: PromptChunk, query: torch.Tensor, scale: float, scoring: Scoring
) -> torch.Tensor:
    """What the chunk's last queries give to every token, with nothing written.

    Args:
        page: read; the chunk is stored.
        chunk: the last one of a prompt.
        query: [T, Hq, D], of the chunk; those from ``chunk.watch_from`` on score.
        scale: of the logits.
        scoring: what is added.

    Returns:
        [H, end], float32: sums over the queries and the GQA group.

    """
    rows, heads, end = own_rows(page, chunk), page.num_kv_heads, chunk.end
    key = page.key[rows].view(heads, -1, query.shape[2])[:, :end].to(torch.float32)
    position = page.position[rows].flatten(1)[:, :end]
    received = torch.zeros(heads, end, device=query.device)
    for first in range(chunk.watch_from, chunk.num_tokens, QUERY_TILE):
        tile = query[first : first + QUERY_TILE]
        asked = first + torch.arange(len(tile), device=query.device)
        probs = probabilities(tile, key, chunk.start + asked, scale)
        received += given(probs, chunk.position + asked, position, scoring)
    return received


def replay(
    page: Page, chunk: PromptChunk, again: torch.Tensor, scale: float, scoring: Scoring
) -> None:
    """Add to the scores what a chunk's queries give when they are asked again, from behind its end.

    Twin of ``reference.replay``: every query sees every token, its own and later ones too.

    Args:
        page: the chunk is stored; scores are written.
        chunk: of a prompt.
        again: [T, Hq, D], its queries, turned T positions onwards; those that score are asked.
        scale: of the logits.
        scoring: the power of what is added; its mean over all queries so far, as means are ranked.

    """
    if chunk.scores_from >= chunk.num_tokens:
        return
    rows, heads, end = own_rows(page, chunk), page.num_kv_heads, chunk.end
    key = page.key[rows].view(heads, -1, again.shape[2])[:, :end].to(torch.float32)
    received = torch.zeros(heads, end, device=again.device)
    fits = MOST_PROBABILITIES // (again.shape[1] * end)
    for tile in again[chunk.scores_from :].split(max(1, min(QUERY_TILE, fits))):
        last_seen = torch.full((len(tile),), end - 1, device=again.device)
        received += probabilities(tile, key, last_seen, scale).pow(scoring.power).sum(dim=(1, 2))
    slot = torch.arange(end, device=again.device).expand(heads, end)
    at = _at(rows, slot, page.block_size)
    age = chunk.position_end - page.position[at]
    page.score[at] += REPLAY_WEIGHT / chunk.position_end * age * received


def pack_survivors(
    page: Page, chunk: PromptChunk, scoring: Scoring = PLAIN, score: torch.Tensor | None = None
) -> None:
    """Move the ``keep`` survivors of each KV head into slots [0, keep), in order of position.

    Sinks and the recent window survive, then the best scores; of equals, the older ones.

    Args:
        page: rewritten: in place, or in the pages ``chunk.into``.
        chunk: the last chunk of a prompt.
        scoring: what is ranked; where pages are, tokens by the sum of their page's scores.
        score: [H, end], float32, of slots [0, end); None: those of the pages.

    """
    rows = own_rows(page, chunk)
    if score is None:
        score = page.score[rows].flatten(1)[:, : chunk.end]
    own = score
    position = page.position[rows].flatten(1)[:, : chunk.end].to(torch.int64)
    if scoring.by_age:
        score = score / (chunk.position_end - position)
    if scoring.by_page:
        whole = torch.nn.functional.pad(score, (0, -chunk.end % page.block_size))
        sums = whole.unflatten(1, (-1, page.block_size)).sum(dim=2)
        score = sums.repeat_interleave(page.block_size, dim=1)[:, : chunk.end]
    safe = (position >= chunk.recent_from) | (position < chunk.num_sinks)
    ranked = score.masked_fill(safe, float("inf"))
    # Slots of a prompt are in order of position, so a stable sort leaves the older of equals first.
    best = ranked.sort(dim=1, descending=True, stable=True).indices[:, : chunk.keep]
    survivor = best.sort(dim=1).values

    targets = rows if chunk.into is None else page_rows(chunk.into, page.num_kv_heads)
    source = _at(rows, survivor, page.block_size)
    kept = torch.arange(chunk.keep, device=survivor.device).expand_as(survivor)
    target = _at(targets, kept, page.block_size)
    for view in (page.key, page.value, page.position):
        view[target] = view[source]
    page.score[target] = own.gather(1, survivor)


def _at(rows: torch.Tensor, slot: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.gather(1, slot // size), slot % size
