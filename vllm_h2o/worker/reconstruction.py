# SPDX-License-Identifier: Apache-2.0
"""The model reads a prompt a second time, block by block: the queries of a ``reread`` term.

Each block is read by itself, at the positions after its own end, and sees what a rotated query
sees: the prompt's first page, its block, and the part of the block that was reread before. Nothing
is stored. Source: context reconstruction, KVzip (arXiv 2505.23416).

Differs from that paper: no words ask for the repetition, which models do without; a block sees no
other one, so a prompt of any length costs a second forward pass and hardly any attention; and the
value is one term of the ranking, next to the attention that was paid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionMetadata

from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.batch import PromptChunk, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.pages import num_pages
from vllm_h2o.policy import Term

MAX_GATHERED = 1 << 23
"""Elements of K that are gathered at once, one KV head for each query head: 32 MiB in float32."""


@dataclass(frozen=True)
class Block:
    """Tokens of one prompt that are read again together.

    Args:
        request_id: the request.
        start: index of the first token.
        chunk: the slots that they see: a block of :meth:`PromptChunk.in_blocks`; ``tokens`` are
            their rows in the second reading.

    """

    request_id: str
    start: int
    chunk: PromptChunk

    @property
    def end(self) -> int:
        """One past the index of the last token."""
        return self.start + self.chunk.num_tokens


def blocks_of(
    prompts: Sequence[tuple[str, PromptChunk, int]], term: Term, page: int
) -> Iterator[Block]:
    """Cut a step's chunks into the blocks that are read again, in order of their rows.

    A block's own chunk ends where ages are counted from: it gives what it would give if all tokens
    up to there were read again together.

    Args:
        prompts: each with its request, and one past the last position when it is ranked.
        term: the ``reread`` term.
        page: slots of a page.

    """
    row = 0
    for request_id, chunk, end in prompts:
        for block in chunk.in_blocks(term, page):
            start = chunk.logical_start + block.tokens.start - chunk.tokens.start
            rows = slice(row, row := row + block.num_tokens)
            own = replace(block, tokens=rows, logical_start=end - block.num_tokens)
            yield Block(request_id, start, own)


@dataclass(frozen=True)
class Alike:
    """Blocks of one shape, which attend together.

    Args:
        rows: [n, T], int64: theirs in the second reading.
        tables: [n, P], int32: the blocks of the cache that they see.
        attended_len: slots of those, L.

    """

    rows: torch.Tensor
    tables: torch.Tensor
    attended_len: int

    @classmethod
    def of(cls, chunks: Sequence[PromptChunk], device: torch.device) -> Alike:
        """Batch some blocks of the same number of tokens and slots."""
        starts = sent(torch.tensor([chunk.tokens.start for chunk in chunks]), device)
        rows = starts[:, None] + torch.arange(chunks[0].num_tokens, device=device)
        tables = torch.stack([chunk.block_table for chunk in chunks])
        return cls(rows, tables, chunks[0].attended_len)

    def seen_of(self, view: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """[n, H, L, D]: what they see of a layer's keys, or values."""
        used = self.tables[:, : num_pages(self.attended_len, cache.block_size)]
        return view[cache.rows(used)].flatten(2, 3)[:, :, : self.attended_len]


@dataclass(frozen=True)
class Reconstruction:
    """A step's prompts, read again once its forward pass is through.

    Args:
        blocks: in order of their rows.
        prompts: the chunks that they are cut from.
        kernels: what scores.
        term: the ``reread`` term.
        by_age: whether scores are ranked as means.

    """

    blocks: Sequence[Block]
    prompts: Sequence[PromptChunk]
    kernels: Kernels
    term: Term
    by_age: bool
    rows: list[PromptChunk] = field(default_factory=list, init=False)
    batches: list[Alike] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.rows.extend(block.chunk for block in self.blocks)

    def positions(self, most: int) -> torch.Tensor:
        """[T], int64, on the host: those after each block's end, or as far as positions reach.

        Args:
            most: positions that the model has. Of a block that is read where others are, queries
                look at those instead.

        """
        each = []
        for block in self.blocks:
            length = block.chunk.num_tokens
            start = max(min(block.end, most - length), 0)
            each.append(torch.arange(start, start + length))
        return torch.cat(each)

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Each block over what it sees of the prompt, and causally over itself, read again.

        Args:
            cache: read.
            query: [T, Hq, D].
            key: [T, H, D].
            value: [T, H, D].
            scale: of the logits.
            out: [T, Hq, D], written.

        Returns:
            [T, Hq], float32: the log-sum-exp of each query's logits of the block, read again. It
            stands for those keys where the query scores what it sees of the prompt.

        """
        others = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for alike in self._alike(query):
            q, k, v = (x[alike.rows].transpose(1, 2) for x in (query, key, value))
            stored = zip((cache.key, cache.value), (k, v), cache.scales, strict=True)
            keys, values = (_read(alike.seen_of(view, cache), x, by) for view, x, by in stored)
            seen, seen_sum = _attend(q, keys, values, scale, is_causal=False)
            own, own_sum = _attend(q, k, v, scale, is_causal=True)
            share = (own_sum - seen_sum).sigmoid()[..., None]  # of all that a query pays
            out[alike.rows] = torch.lerp(seen.float(), own.float(), share).transpose(1, 2).to(out)
            others[alike.rows] = own_sum.transpose(1, 2)
        return others

    def _alike(self, query: torch.Tensor) -> list[Alike]:
        """The blocks by their shape, as many at once as :data:`MAX_GATHERED` allows; made once."""
        if not self.batches:
            shapes = {(chunk.num_tokens, chunk.attended_len): None for chunk in self.rows}
            for length, seen in shapes:
                same = [c for c in self.rows if (c.num_tokens, c.attended_len) == (length, seen)]
                size = max(1, MAX_GATHERED // (query[0].numel() * (seen + length)))
                for at in range(0, len(same), size):
                    self.batches.append(Alike.of(same[at : at + size], query.device))
        return self.batches

    def score(self, cache: LayerCache, tensors: StepTensors) -> None:
        """Add the term to the scores, and to those without the term that has a lifetime.

        It is added up separately: the difference of two large scores would lose it in float32.

        Args:
            cache: scores are written.
            tensors: of the second reading, a row for each of its tokens; ``sink_logits`` are what
                :meth:`attend` returned.

        """
        without = cache.score_without_window
        if without is None:
            self.kernels.score_term(cache, self.rows, tensors, self.term, self.by_age)
            return
        used = [num_pages(chunk.attended_len, cache.block_size) for chunk in self.prompts]
        pages = [cache.rows(c.block_table[:n]) for c, n in zip(self.prompts, used, strict=True)]
        before = [cache.score[rows] for rows in pages]
        for rows in pages:
            cache.score[rows] = 0
        self.kernels.score_term(cache, self.rows, tensors, self.term, self.by_age)
        for rows, score in zip(pages, before, strict=True):
            given = cache.score[rows]
            without[rows] += given
            cache.score[rows] = score + given


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of V, [n, Hq, T, D], and the log-sum-exp of logits, [n, Hq, T] float32.

    Torch computes both, and its public function returns the means alone.

    Args:
        query: [n, Hq, T, D].
        key: [n, H, L, D].
        value: the same.
        scale: of the logits.
        is_causal: whether query i sees the keys up to i; L is T then.

    """
    if query.device.type == "cpu":
        cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = cpu(query, key, value, 0.0, is_causal, scale=scale)
        return out, sums
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    gpu = torch.ops.aten._scaled_dot_product_efficient_attention
    out, sums, *_ = gpu(query, key, value, None, True, 0.0, is_causal, scale=scale)
    return out, sums[..., : query.shape[2]]  # it is padded


def _read(held: torch.Tensor, like: torch.Tensor, scale: float) -> torch.Tensor:
    """Stored K or V, scaled, in the dtype of the new one."""
    return held.to(like.dtype) if scale == 1.0 else (held.to(torch.float32) * scale).to(like.dtype)


@dataclass(frozen=True)
class Rereading:
    """The forward pass that reads a step's prompts again.

    Args:
        reconstruction: which tokens, and how they attend and score.
        metadata: the attention metadata of the pass, which carries ``reconstruction``.
        layer_names: of the policy's group.
        reader: what runs the model.

    """

    reconstruction: Reconstruction
    metadata: AttentionMetadata
    layer_names: Sequence[str]
    reader: Reader | None

    def run(self) -> None:
        """Read, and score in every layer."""
        if self.reader is None:
            raise IntegrityError("a prompt is to be read again, and nothing runs the model")
        self.reader(self.reconstruction, dict.fromkeys(self.layer_names, self.metadata))


class Reader:
    """Has vllm's model read tokens that it has read before, with attention metadata of its own.

    Args:
        worker: vLLM's, whose model runner has the model, and the tokens of its requests.

    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    @torch.inference_mode()
    def __call__(
        self, reconstruction: Reconstruction, metadata: dict[str, AttentionMetadata]
    ) -> None:
        """Run one forward pass over all blocks of a step, with metadata by layer."""
        runner = self.worker.model_runner
        ids = torch.cat([self._tokens(block) for block in reconstruction.blocks])
        # A prompt may fill the engine's positions; the model often has more.
        most = max(self.worker.vllm_config.model_config.max_model_len, self.worker.num_positions)
        positions = sent(reconstruction.positions(most), runner.device)
        with set_forward_context(metadata, self.worker.vllm_config, num_tokens=len(ids)):
            runner.model(
                input_ids=ids,
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )

    def _tokens(self, block: Block) -> torch.Tensor:
        """[T], int32, on the device."""
        span, runner = slice(block.start, block.end), self.worker.model_runner
        if self.worker.use_v2_model_runner:
            states = runner.req_states
            row = states.req_id_to_index[block.request_id]
            found: torch.Tensor = states.all_token_ids.gpu[row, span]
            return found
        batch = runner.input_batch
        row = batch.req_id_to_index[block.request_id]
        return sent(torch.from_numpy(batch.token_ids_cpu[row, span]), runner.device)


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without a wait."""
    pinned = host.pin_memory() if device.type == "cuda" else host
    return pinned.to(device, non_blocking=True)
