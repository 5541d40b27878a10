# SPDX-License-Identifier: Apache-2.0
"""Check the Triton kernels on a device: against the torch ones there, and in a captured graph.

All tensors stay on the device. The host gets figures alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch, PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.rope import Rope
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.kernels.triton.kernels import PromptAttention, TritonKernels
from vllm_h2o.policy import Term
from vllm_h2o.policy.h2o2 import H2O2
from vllm_h2o.policy.snapkv import SNAPKV

VIEWS = ("key", "value", "score", "position", "score_without_window")
ROTATED, WINDOW = H2O2.ranking.passes
TERMS = {
    "rotated queries": ROTATED,
    "sum of rotated queries": replace(ROTATED, reduce="sum"),
    "an observation window": WINDOW,
    "snapkv": SNAPKV.ranking.terms[0],
}


@dataclass(frozen=True)
class Size:
    """The size of a check.

    Args:
        requests: in the batch.
        tokens: that each holds.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_size: of K and V.
        block_size: of a page.
        dtype: of K and V.

    """

    requests: int
    tokens: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype

    @property
    def pages(self) -> int:
        """Pages of one request."""
        return -(-self.tokens // self.block_size)

    @property
    def scale(self) -> float:
        """Scale of the logits."""
        return self.head_size**-0.5


REAL = (
    Size(64, 2048, 32, 32, 128, 16, torch.float16),
    Size(64, 2048, 32, 8, 128, 16, torch.bfloat16),
    Size(16, 8192, 32, 8, 128, 16, torch.bfloat16),
    Size(8, 1000, 9, 3, 64, 32, torch.float32),
)
ODD = (
    Size(4, 777, 28, 4, 128, 128, torch.bfloat16),
    Size(4, 700, 8, 1, 256, 16, torch.float16),
    Size(4, 1000, 12, 12, 64, 64, torch.float16),
    Size(4, 500, 6, 2, 80, 16, torch.bfloat16),
    Size(4, 500, 4, 4, 96, 32, torch.float16),
)
"""Other heads, groups and pages."""
LONG = Size(1, 1 << 17, 32, 8, 128, 16, torch.bfloat16)
"""A prompt whose survivors are chosen of 128k tokens."""
PROMPTS = 2
"""Requests of a check of prompts."""
SMALL = (Size(3, 100, 6, 2, 64, 16, torch.float32), Size(2, 64, 4, 4, 64, 16, torch.float16))


def filled(size: Size, device: torch.device, copies: int = 0) -> LayerCache:
    """Random pages for all requests; positions are those of prompts.

    Args:
        size: of the check.
        device: of the pages.
        copies: requests for whose survivors there are as many pages more.

    """
    content = 2 * size.head_size + 12 // size.dtype.itemsize
    blocks = (size.requests + copies) * size.pages + 1
    shape = (blocks, size.num_kv_heads, size.block_size, content)
    pages = torch.zeros(shape, dtype=size.dtype, device=device)
    cache = LayerCache.of(pages, size.head_size, keeps_scores=True)
    cache.key.normal_()
    cache.value.normal_()
    cache.score.uniform_()
    position = torch.arange(size.pages * size.block_size, device=device)
    each = position.view(size.pages, 1, size.block_size)
    rows = each.expand(-1, size.num_kv_heads, -1).reshape(-1, size.block_size)
    cache.position[: rows.shape[0] * size.requests] = rows.repeat(size.requests, 1).int()
    return cache


def twin_of(cache: LayerCache) -> LayerCache:
    """The same tokens, in the same types: the torch kernels compute in float32 all the same."""
    return replace(cache, **{name: getattr(cache, name).clone() for name in VIEWS})


def full_batch(size: Size, device: torch.device, evicts: int = 1) -> DecodeBatch:
    """Requests that are full: each overwrites, and selects where it ``evicts``."""
    block_table = torch.arange(size.requests * size.pages, dtype=torch.int32, device=device)
    fields = torch.zeros(size.requests, len(DECODE_FIELDS), dtype=torch.int64)
    values: dict[str, torch.Tensor | int] = {
        "token": torch.arange(size.requests),
        "attended_len": size.tokens,
        "overwrites": 1,
        "selects": evicts,
        "logical_start": size.tokens + 5,
        "recent_start": size.tokens // 2,
        "scores": 1,
    }
    for name, value in values.items():
        fields[:, DECODE_FIELDS.index(name)] = value
    return DecodeBatch(block_table.view(size.requests, size.pages), fields.to(device).T)


def step_tensors(size: Size, num_tokens: int, device: torch.device) -> StepTensors:
    """Random q, k and v, and room for what is written."""
    heads = (size.num_heads, size.num_kv_heads, size.num_kv_heads)
    shapes = [(num_tokens, num, size.head_size) for num in heads]
    query, key, value = (torch.randn(shape, device=device).to(size.dtype) for shape in shapes)
    angle = torch.arange(2 * num_tokens + 1, device=device)[:, None] * torch.rand(
        size.head_size // 2, device=device
    )
    rope = Rope(torch.cat([angle.cos(), angle.sin()], dim=1), is_neox=True)
    return StepTensors(query, key, value, torch.empty_like(query), size.scale, rope=rope)


def exact_tensors(tensors: StepTensors) -> StepTensors:
    """The same with an ``out`` of its own, in float32."""
    return replace(tensors, out=torch.empty_like(tensors.out, dtype=torch.float32))


def make(size: Size, device: torch.device, attention: PromptAttention | None) -> TritonKernels:
    """The kernels for a size."""
    shape = (size.num_heads, size.num_kv_heads, size.head_size)
    return TritonKernels(device, size.requests, *shape, attention)


def check_decode(size: Size, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Yields (what, largest error, allowed)."""
    cache, batch = filled(size, device), full_batch(size, device)
    twin = twin_of(cache)
    blocks = (cache.num_blocks, size.num_kv_heads)
    victims = torch.randint(0, size.tokens // 2, blocks, dtype=torch.int32, device=device)
    theirs = victims.clone()
    tensors = step_tensors(size, size.requests, device)
    expected = exact_tensors(tensors)
    make(size, device, None).decode(cache, batch, victims, tensors, Scoring())
    for i in range(size.requests):  # one by one: the torch kernels copy K and V in float32
        one = DecodeBatch(batch.block_table[i : i + 1], batch.fields[:, i : i + 1])
        TorchKernels().decode(twin, one, theirs, expected, Scoring())
    yield from _compare(cache, twin, tensors.out, expected.out, size)
    written = batch.first_block_ids.long()
    yield "victims that differ", float((victims != theirs)[written].float().mean()), 1e-3


def asked(size: Size, chunks: list[PromptChunk], term: Term) -> list[PromptChunk]:
    """The chunks that a term's queries see, or their blocks."""
    return [block for chunk in chunks for block in chunk.in_blocks(term, size.block_size)]


def check_prompt(
    size: Size, device: torch.device, attention: PromptAttention | None, later: bool
) -> Iterator[tuple[str, float, float]]:
    """A prompt's first chunk, and another's first or, if ``later``, its second half; packing too.

    FlashAttention reads keys from the pages where any chunk is a later one, else from the step.
    """
    half, size = size.tokens // 2, replace(size, requests=PROMPTS)
    cache = filled(size, device)
    twin = twin_of(cache)
    chunks = [
        chunk_of(size, 0, slice(0, half), 0, device),
        chunk_of(size, 1, slice(half, size.tokens), half if later else 0, device),
    ]
    tensors = step_tensors(size, size.tokens, device)
    expected = exact_tensors(tensors)
    kernels = make(size, device, attention)
    lse = kernels.prefill(cache, chunks, tensors, Scoring())
    TorchKernels().prefill(twin, chunks, expected, Scoring())
    yield from _compare(cache, twin, tensors.out, expected.out, size)
    tensors = replace(tensors, lse=lse)
    for what, term in TERMS.items():
        twin.score.copy_(cache.score)
        seen = asked(size, chunks, term)
        kernels.score_term(cache, seen, tensors, term, by_age=True)
        TorchKernels().score_term(twin, seen, expected, term, by_age=True)
        # A rotated query may be rounded to the next number of 16 bits.
        is_rough = term.queries == "rotated" and size.dtype != torch.float32
        yield f"score of {what}, relative", _score_error(cache, twin), 2e-2 if is_rough else 1e-3
    yield _check_pack(cache, chunks, kernels)
    yield _check_pack(cache, _by_page(size, chunks), kernels, by_page=True)
    yield from _check_copies(size, chunks, kernels, device)


def check_long(size: Size, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """The survivors of a very long prompt."""
    cache = filled(size, device)
    chunks = [chunk_of(size, 0, slice(0, size.tokens), 0, device)]
    yield _check_pack(cache, chunks, make(size, device, None))


def _by_page(size: Size, chunks: list[PromptChunk]) -> list[PromptChunk]:
    """The chunks, of whose whole pages one is evicted if any may be."""
    evicted = []
    for chunk in chunks:
        may_go = chunk.recent_start // size.block_size - -(-chunk.num_sinks // size.block_size)
        num = chunk.attended_len - min(max(may_go, 0), 1) * size.block_size
        evicted.append(replace(chunk, num_survivors=num))
    return evicted


def _check_pack(
    cache: LayerCache, chunks: list[PromptChunk], kernels: TritonKernels, by_page: bool = False
) -> tuple[str, float, float]:
    # The same scores on both sides: what is compared is the choice and the move.
    scoring = Scoring(by_page=by_page)
    ours, twin = twin_of(cache), twin_of(cache)
    kernels.pack_survivors([ours], chunks, scoring)
    TorchKernels().pack_survivors([twin], chunks, scoring)
    kept = _kept(ours, chunks, "position"), _kept(twin, chunks, "position")
    what = "survivors by page that differ" if by_page else "survivors that differ"
    return what, float((kept[0] != kept[1]).float().mean()), 0.0


def _check_copies(
    size: Size, chunks: list[PromptChunk], kernels: TritonKernels, device: torch.device
) -> Iterator[tuple[str, float, float]]:
    """Survivors that leave pages which others read: copies of the same bytes, and those pages."""
    cache = filled(size, device, copies=PROMPTS)
    before, twin = twin_of(cache), twin_of(cache)
    places = torch.arange(PROMPTS * size.pages, dtype=torch.int32, device=device)
    targets = (places + size.requests * size.pages).view(PROMPTS, -1)
    for chunk, target in zip(chunks, targets, strict=True):
        copied = replace(chunk, destination_blocks=target)
        score = torch.rand(1, size.num_kv_heads, chunk.attended_len, device=device)
        TorchKernels().copy_survivors([twin], copied, Scoring(), score)
        kernels.copy_survivors([cache], copied, Scoring(), score)
    at = [replace(chunk, block_table=target) for chunk, target in zip(chunks, targets, strict=True)]
    for name in VIEWS:
        ours, theirs = (_kept(held, at, name) for held in (cache, twin))
        yield f"copied survivors: {name} that differs", float((ours != theirs).sum()), 0.0
    own = slice(0, size.requests * size.pages * size.num_kv_heads)
    changed = sum(
        int((getattr(cache, name)[own] != getattr(before, name)[own]).sum()) for name in VIEWS
    )
    yield "copied survivors: what changes in the pages that they leave", float(changed), 0.0


def _kept(cache: LayerCache, chunks: list[PromptChunk], name: str) -> torch.Tensor:
    """One of :data:`VIEWS` of all survivors, flat."""
    view = getattr(cache, name)
    pages = view.unflatten(0, (cache.num_blocks, cache.num_kv_heads))
    strips = [pages[c.block_table.long()].transpose(0, 1).flatten(1, 2) for c in chunks]
    kept = [s[:, : c.num_survivors].flatten() for s, c in zip(strips, chunks, strict=True)]
    return torch.cat(kept)


def chunk_of(
    size: Size, request: int, tokens: slice, resident_start: int, device: torch.device
) -> PromptChunk:
    first_block = request * size.pages
    end = resident_start + tokens.stop - tokens.start
    return PromptChunk(
        tokens=tokens,
        block_table=torch.arange(
            first_block, first_block + size.pages, dtype=torch.int32, device=device
        ),
        resident_start=resident_start,
        logical_start=resident_start,
        num_survivors=end // 3,
        recent_start=end - end // 6,
        num_sinks=4,
        first_window_query=max(tokens.stop - tokens.start - 32, 0),
        shift=tokens.stop - tokens.start,
    )


def _score_error(cache: LayerCache, twin: LayerCache) -> float:
    error = (cache.score - twin.score).abs() / twin.score.abs().clamp(min=1e-3)
    return float(error.max())


def _compare(
    cache: LayerCache, twin: LayerCache, out: torch.Tensor, expected: torch.Tensor, size: Size
) -> Iterator[tuple[str, float, float]]:
    rough = 1e-5 if size.dtype == torch.float32 else 2e-2
    yield "output", float((out.float() - expected).abs().max()), rough
    yield "score, relative", _score_error(cache, twin), 1e-3
    moved = (cache.position != twin.position).float().mean()
    yield "positions that differ", float(moved), 0.0


def check_graph(size: Size, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """A decode, captured, and run over other fields, against the same without a graph."""
    cache, batch = filled(size, device), full_batch(size, device)
    victims = torch.zeros(cache.num_blocks, size.num_kv_heads, dtype=torch.int32, device=device)
    tensors = step_tensors(size, size.requests, device)
    kernels = make(size, device, None)
    fields = batch.fields.clone()
    batch.fields[DECODE_FIELDS.index("attended_len")] = 0

    def step() -> None:
        kernels.decode(cache, batch, victims, tensors, Scoring())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batch.fields.copy_(fields)
    # One request is padding.
    batch.fields[DECODE_FIELDS.index("attended_len"), -1] = 0
    before = [getattr(cache, name).clone() for name in VIEWS]
    graph.replay()
    written = [tensors.out, victims, *(getattr(cache, name) for name in VIEWS)]
    of_graph = [tensor.clone() for tensor in written]
    for name, held in zip(VIEWS, before, strict=True):
        getattr(cache, name).copy_(held)
    victims.zero_()
    step()
    differ = sum(not torch.equal(a, b) for a, b in zip(of_graph, written, strict=True))
    yield f"{size.requests}x{size.tokens}: graph and eager differ", float(differ), 0.0
