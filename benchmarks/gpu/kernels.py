"""The Triton kernels on a device: against the torch ones, in a captured graph, and their speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch, PromptChunk, Scoring
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.kernels.triton.kernels import PromptAttention, TritonKernels

VIEWS = ("key", "value", "score", "position")


@dataclass(frozen=True)
class Size:
    """Of a check.

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
        """Of one request."""
        return -(-self.tokens // self.block_size)

    @property
    def scale(self) -> float:
        """Of the logits."""
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
SMALL = (Size(3, 100, 6, 2, 64, 16, torch.float32), Size(2, 64, 4, 4, 64, 16, torch.float16))


def filled(size: Size, device: torch.device) -> LayerCache:
    """Random pages for all requests; positions are those of prompts."""
    content = 2 * size.head_size + 8 // size.dtype.itemsize
    blocks = size.requests * size.pages + 1
    shape = (blocks, size.num_kv_heads, size.block_size, content)
    page = LayerCache.of(torch.zeros(shape, dtype=size.dtype, device=device), size.head_size)
    page.key.normal_()
    page.value.normal_()
    page.score.uniform_()
    position = torch.arange(size.pages * size.block_size, device=device)
    each = position.view(size.pages, 1, size.block_size)
    rows = each.expand(-1, size.num_kv_heads, -1).reshape(-1, size.block_size)
    page.position[: rows.shape[0] * size.requests] = rows.repeat(size.requests, 1).int()
    return page


def on_cpu(page: LayerCache) -> LayerCache:
    """The same tokens, in float32, for the torch kernels."""
    views = {name: getattr(page, name).cpu().clone() for name in VIEWS}
    exact = {name: views[name].float().clone() for name in ("key", "value")}
    return replace(page, **{**views, **exact})


def full_batch(size: Size, device: torch.device, evicts: int = 1) -> DecodeBatch:
    """Requests that are full: each overwrites, and selects where it ``evicts``."""
    table = torch.arange(size.requests * size.pages, dtype=torch.int32, device=device)
    orders = torch.zeros(size.requests, len(DECODE_FIELDS), dtype=torch.int64)
    values = {
        "token": torch.arange(size.requests),
        "attended_len": size.tokens,
        "overwrites": 1,
        "selects": evicts,
        "position": size.tokens + 5,
        "recent_from": size.tokens // 2,
        "scores": 1,
    }
    for name, value in values.items():
        orders[:, DECODE_FIELDS.index(name)] = value
    return DecodeBatch(table.view(size.requests, size.pages), orders.to(device).T)


def tokens(size: Size, number: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k, v of a step."""
    heads = (size.num_heads, size.num_kv_heads, size.num_kv_heads)
    shapes = [(number, num, size.head_size) for num in heads]
    return tuple(torch.randn(shape, device=device).to(size.dtype) for shape in shapes)


def make(size: Size, device: torch.device, attention: PromptAttention | None) -> TritonKernels:
    """The kernels for a size."""
    shape = (size.num_heads, size.num_kv_heads, size.head_size)
    return TritonKernels(device, size.requests, *shape, attention)


def check_decode(size: Size, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Yields (what, largest error, allowed)."""
    page, batch = filled(size, device), full_batch(size, device)
    twin = on_cpu(page)
    blocks = (page.num_blocks, size.num_kv_heads)
    victims = torch.randint(0, size.tokens // 2, blocks, dtype=torch.int32, device=device)
    theirs = victims.cpu().clone()
    query, key, value = tokens(size, size.requests, device)
    out = torch.empty_like(query)
    make(size, device, None).decode(
        page, batch, victims, query, key, value, None, size.scale, Scoring(), out
    )
    expected = torch.empty(query.shape)
    there = DecodeBatch(batch.table.cpu(), batch.fields.cpu())
    exact = (t.float().cpu() for t in (query, key, value))
    TorchKernels().decode(twin, there, theirs, *exact, None, size.scale, Scoring(), expected)
    yield from _compare(page, twin, out, expected, size)
    owner = batch.first_block_ids.cpu().long()
    yield "victims that differ", float((victims.cpu() != theirs)[owner].float().mean()), 1e-3


def check_prompt(
    size: Size, device: torch.device, attention: PromptAttention | None, behind: bool
) -> Iterator[tuple[str, float, float]]:
    """A prompt's first chunk and another's, ``behind`` a resident half or not; asked again; packed.

    FlashAttention reads keys from the pages where any chunk is behind others, else from the step.
    """
    half = size.tokens // 2
    page = filled(size, device)
    twin = on_cpu(page)
    chunks = [
        _chunk(size, 0, slice(0, half), 0, device),
        _chunk(size, 1, slice(half, size.tokens), half if behind else 0, device),
    ]
    there = [replace(chunk, table=chunk.table.cpu()) for chunk in chunks]
    query, key, value = tokens(size, size.tokens, device)
    out, expected = torch.empty_like(query), torch.empty(query.shape)
    kernels = make(size, device, attention)
    step = (query, key, value)
    kernels.prefill(page, chunks, *step, None, size.scale, Scoring(), out)
    exact = tuple(t.float().cpu() for t in step)
    TorchKernels().prefill(twin, there, *exact, None, size.scale, Scoring(), expected)
    yield from _compare(page, twin, out, expected, size)
    again = Scoring(power=2, by_age=True, second_pass=True)
    kernels.replay(page, chunks, query, size.scale, again)
    TorchKernels().replay(twin, there, exact[0], size.scale, again)
    yield "replayed score, relative", _score_error(page, twin), 1e-3
    yield _check_pack(page, chunks, kernels)


def check_long(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """The survivors of a very long prompt."""
    page = filled(LONG, device)
    chunks = [_chunk(LONG, 0, slice(0, LONG.tokens), 0, device)]
    yield _check_pack(page, chunks, make(LONG, device, None))


def _check_pack(
    page: LayerCache, chunks: list[PromptChunk], kernels: TritonKernels
) -> tuple[str, float, float]:
    # The same scores on both sides: what is compared is the choice and the move.
    twin = on_cpu(page)
    there = [replace(chunk, table=chunk.table.cpu()) for chunk in chunks]
    kernels.pack_survivors([page], chunks, Scoring())
    TorchKernels().pack_survivors([twin], there, Scoring())
    kept = _positions(page, chunks), _positions(twin, there)
    return "survivors that differ", float((kept[0] != kept[1]).float().mean()), 0.0


def _positions(page: LayerCache, chunks: list[PromptChunk]) -> torch.Tensor:
    first = page.position.view(page.num_blocks, page.num_kv_heads, -1).cpu()
    strips = [first[chunk.table.cpu().long()].transpose(0, 1).flatten(1) for chunk in chunks]
    return torch.cat([s[:, : c.keep].flatten() for s, c in zip(strips, chunks, strict=True)])


def _chunk(size: Size, request: int, part: slice, start: int, device: torch.device) -> PromptChunk:
    first = request * size.pages
    table = torch.arange(first, first + size.pages, dtype=torch.int32, device=device)
    end = start + part.stop - part.start
    return PromptChunk(part, table, start, start, end // 3, end - end // 6, 4, 0)


def _score_error(page: LayerCache, twin: LayerCache) -> float:
    error = (page.score.cpu() - twin.score).abs() / twin.score.abs().clamp(min=1e-3)
    return float(error.max())


def _compare(
    page: LayerCache, twin: LayerCache, out: torch.Tensor, expected: torch.Tensor, size: Size
) -> Iterator[tuple[str, float, float]]:
    rough = 1e-5 if size.dtype == torch.float32 else 2e-2
    yield "output", float((out.float().cpu() - expected).abs().max()), rough
    yield "score, relative", _score_error(page, twin), 1e-3
    moved = (page.position.cpu() != twin.position).float().mean()
    yield "positions that differ", float(moved), 0.0


def check_graph(size: Size, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """A captured decode, replayed over other orders, against the same without a graph."""
    page, batch = filled(size, device), full_batch(size, device)
    victims = torch.zeros(page.num_blocks, size.num_kv_heads, dtype=torch.int32, device=device)
    query, key, value = tokens(size, size.requests, device)
    out, kernels = torch.empty_like(query), make(size, device, None)
    orders = batch.fields.clone()
    batch.fields[DECODE_FIELDS.index("attended_len")] = 0

    def step() -> None:
        kernels.decode(page, batch, victims, query, key, value, None, size.scale, Scoring(), out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batch.fields.copy_(orders)
    # One request is padding.
    batch.fields[DECODE_FIELDS.index("attended_len"), -1] = 0
    before = [getattr(page, name).clone() for name in VIEWS]
    graph.replay()
    replayed = [out.clone(), victims.clone(), *(getattr(page, name).clone() for name in VIEWS)]
    for name, held in zip(VIEWS, before, strict=True):
        getattr(page, name).copy_(held)
    victims.zero_()
    step()
    eager = [out, victims, *(getattr(page, name) for name in VIEWS)]
    differ = sum(not torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
    yield f"{size.requests}x{size.tokens}: graph and eager differ", float(differ), 0.0


def seconds(action: Callable[[], Any], repeats: int = 20, captured: bool = True) -> float:
    """Median time of one call on the device: of a captured graph, so that Python's is left out."""
    for _ in range(3):
        action()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            action()
        action = graph.replay
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) / 1000)
    return statistics.median(spans)


def speed(size: Size, device: torch.device, attention: PromptAttention | None) -> dict[str, float]:
    """Decode against the device's copy; what scores, victims and survivors add."""
    page = filled(size, device)
    victims = torch.zeros(page.num_blocks, size.num_kv_heads, dtype=torch.int32, device=device)
    step = tokens(size, size.requests, device)
    out, kernels = torch.empty_like(step[0]), make(size, device, attention)
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source))

    def decode(power: int, evicts: int) -> float:
        batch, scoring = full_batch(size, device, evicts), Scoring(power=power)
        arguments = (page, batch, victims, *step, None, size.scale, scoring, out)
        return seconds(lambda: kernels.decode(*arguments))

    scored, plain = decode(1, 1), decode(0, 0)
    moved = size.requests * size.tokens * size.num_kv_heads * 2 * size.head_size
    chunk = [_chunk(size, 0, slice(0, size.tokens), 0, device)]
    long = tokens(size, size.tokens, device)
    answer = torch.empty_like(long[0])

    def prompt(power: int) -> float:
        arguments = (page, chunk, *long, None, size.scale, Scoring(power=power), answer)
        return seconds(lambda: kernels.prefill(*arguments))

    def replay() -> float:
        again = Scoring(power=2, by_age=True, second_pass=True)
        return seconds(lambda: kernels.replay(page, chunk, long[0], size.scale, again))

    full, bare = prompt(1), prompt(0)
    # Its orders are sent by every call, so that it is not captured.
    packed = seconds(lambda: kernels.pack_survivors([page], chunk, Scoring()), captured=False)
    return {
        "copy_GB_per_s": copy / 1e9,
        "decode_GB_per_s": moved * size.dtype.itemsize / scored / 1e9,
        "decode_share_of_copy": moved * size.dtype.itemsize / scored / copy,
        "decode_ms": scored * 1e3,
        "decode_scoring_adds": scored / plain - 1,
        "prompt_ms": full * 1e3,
        "prompt_scoring_adds": full / bare - 1,
        "prompt_replay_adds": replay() / bare,
        "pack_ms": packed * 1e3,
    }
