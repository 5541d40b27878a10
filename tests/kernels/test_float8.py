# SPDX-License-Identifier: Apache-2.0
"""K and V as float8, stored and read: every number, every tie, every build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.kernels.caches import SHAPE, VIEWS, copied, filled, number, prompt_chunks, same
from tests.kernels.decodes import KERNELS, compare_decodes, decode_batch, slow_on_triton
from tests.kernels.harness import Shape, empty_cache, views
from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import cache_rows
from vllm_h2o.kernels.float8 import as_read, quantised
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy.h2o2 import COMBINED

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
ALL: dict[str, Callable[[Shape], Kernels]] = {"torch": lambda _: TorchKernels(), **KERNELS}
every_float8 = pytest.mark.parametrize("dtype", FLOAT8, ids=str)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every float8 but infinities and NaNs, in order."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return every[every.isfinite()].unique()


def between(dtype: torch.dtype) -> torch.Tensor:
    """Every float8, what is halfway to the next one, on both sides of that, and far too much."""
    exact = numbers(dtype)
    middle = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(middle, middle.new_tensor(end)) for end in (-torch.inf, torch.inf)]
    return torch.cat([exact, middle, *beside, torch.tensor([1e6, -1e6, 65504.0, 1e-30, -0.0])])


@every_float8
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0137, 3.0])
def test_what_is_stored(dtype: torch.dtype, scale: float) -> None:
    """The nearest, ties to even, and the largest for all that is larger: as the truth says."""
    exact = numbers(dtype)
    x = between(dtype) if scale in (1.0, 0.25) else torch.linspace(-500, 500, 9973)
    read = as_read(x * scale, dtype, scale)
    assert torch.equal(quantised(x * scale, dtype, scale).double() * scale, read)
    kept = x.double().clamp(exact[0], exact[-1])
    nearest = (kept[:, None] - exact.double()).abs().amin(1)
    torch.testing.assert_close((read / scale - kept).abs(), nearest, rtol=1e-6, atol=1e-4)


def test_wider_types_are_read_as_they_are() -> None:
    """Their rounding is the step's own."""
    x = torch.tensor([0.1, 1e-9], dtype=torch.bfloat16)
    assert torch.equal(as_read(x, torch.bfloat16, 1.0), x.double())


@every_float8
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_float8_number_is_stored_alike(
    make: Callable[[Shape], Kernels], dtype: torch.dtype, model: torch.dtype
) -> None:
    """Stored alike by all, and read again: a token that attends to itself alone says its V."""
    if make is KERNELS["triton"] and model == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")
    x = between(dtype).to(model)
    x = x[x.isfinite()]
    num_tokens = -(-len(x) // 64)
    values = torch.nn.functional.pad(x, (0, 64 * num_tokens - len(x))).view(num_tokens, 1, 64)
    shape = Shape(1, 1, 64, 16, model, dtype, (0.5, 4.0))
    cache = views(empty_cache(shape, num_tokens), shape)
    chunks = [
        PromptChunk(
            tokens=slice(i, i + 1),
            block_table=torch.tensor([i], dtype=torch.int32),
            resident_start=0,
            logical_start=0,
        )
        for i in range(num_tokens)
    ]
    out = torch.empty(num_tokens, 1, 64)
    tensors = StepTensors(values * 0, values, values, out, 1.0)
    make(shape).prefill(cache, chunks, tensors, Scoring())
    for view, scale in ((cache.key, 0.5), (cache.value, 4.0)):
        stored = quantised(values[:, 0], dtype, scale).float()
        torch.testing.assert_close(view[:, 0].float(), stored, rtol=0, atol=0)
    # Triton's interpreter, which is no GPU, loses bits of subnormal numbers that become float16.
    tiny = 2**-12 if make is KERNELS["triton"] and model == torch.float16 else 0.0
    torch.testing.assert_close(out[:, 0], cache.value[:, 0].float() * 4.0, rtol=1e-6, atol=tiny)


SHAPES = [
    replace(SHAPE, float8=torch.float8_e4m3fn, scales=(0.3, 1.7)),
    replace(SHAPE, float8=torch.float8_e5m2, dtype=torch.float16, scales=(2.0, 0.05)),
    replace(SHAPE, float8=torch.float8_e4m3fn, dtype=torch.bfloat16),
    Shape(1, 1, 128, 16, torch.float32, torch.float8_e4m3fn, (0.5, 0.5)),
]


def skips(make: Callable[[Shape], Kernels], shape: Shape) -> None:
    """Where Triton's interpreter does not help."""
    if make is KERNELS["triton"] and shape.dtype == torch.bfloat16 and shape.group > 1:
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_decode_of_float8_equals_torch(
    make: Callable[[Shape], Kernels], shape: Shape, split: bool
) -> None:
    """Outputs, pages and victims are those of the torch kernels."""
    skips(make, shape)
    if split and shape.num_kv_heads != 2:
        pytest.skip("the rows are of two heads")
    scoring = Scoring(power=2)
    batch, owned = decode_batch(shape, split)
    theirs = filled(shape, owned + 1, seed=2, splits=split)
    if theirs.first_rows is not None:
        for request, bounds in ((2, (0, 1, 4)), (5, (0, 13, 18)), (6, (0, 2, 12))):
            theirs.first_rows[batch.first_block_ids[request]] = torch.tensor(bounds).int()
    victims = torch.zeros(owned + 1, shape.num_kv_heads, dtype=torch.int32)
    compare_decodes(make, shape, scoring, batch, theirs, victims)


@slow_on_triton(KERNELS)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.num_kv_heads == 2], ids=str)
def test_prompts_of_float8_equal_torch(make: Callable[[Shape], Kernels], shape: Shape) -> None:
    """Attention, terms and packing, one after the other."""
    if make is KERNELS["triton"] and shape.dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")
    chunks, owned = prompt_chunks(shape, packs=True)
    theirs = filled(shape, owned + 1, seed=4)
    number(theirs, chunks)
    ours = copied(theirs, shape)
    torch.manual_seed(5)
    query = torch.randn(140, 6, 64).to(shape.dtype)
    key, value = torch.randn(2, 140, 2, 64).to(shape.dtype)
    outs = [torch.full(query.shape, 7.0) for _ in range(2)]
    for kernels, cache, out in zip(
        (TorchKernels(), make(shape)), (theirs, ours), outs, strict=True
    ):
        tensors = StepTensors(query, key, value, out, 0.2)
        kernels.prefill(cache, chunks, tensors, Scoring())
        for term in COMBINED.passes:
            kernels.score_term(cache, chunks, tensors, term, by_age=True)
    torch.testing.assert_close(
        *outs, rtol=1e-5, atol=1e-5 if shape.dtype == torch.float32 else 5e-3
    )
    same(ours, theirs, owned)
    ours.score.copy_(theirs.score)
    for kernels, cache in ((TorchKernels(), theirs), (make(shape), ours)):
        kernels.pack_survivors([cache], chunks, Scoring())
    for chunk in chunks:
        rows = cache_rows(chunk.block_table[: -(-chunk.num_survivors // 16)], 2)
        for view in VIEWS:
            held = [
                getattr(c, view)[rows].flatten(1, 2)[:, : chunk.num_survivors].float()
                for c in (ours, theirs)
            ]
            assert torch.equal(*held), (view, chunk)
