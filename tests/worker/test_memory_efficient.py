# SPDX-License-Identifier: Apache-2.0
"""What xformers is asked, answered here by plain torch behind xformers' own signature."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch

from tests.kernels.caches import SHAPE, copied, filled, number, same
from tests.kernels.harness import Shape, builder
from tests.worker.chunks import CASES
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.worker import selector
from vllm_h2o.worker.memory_efficient import (
    FUNCTION,
    MASK,
    MemoryEfficientPrompt,
    XformersUnavailableError,
)

CPU = torch.device("cpu")


class LowerTriangularFromBottomRightMask:
    """xformers' mask has no state."""


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As 0.0.35 documents it: [B, M, H, K], or [B, M, G, H, K] with all shapes expanded.

    The log-sum-exp is [B, (G,) H, M], with M rounded up to 32 where its CUTLASS kernel computes.
    """
    assert type(attn_bias) is LowerTriangularFromBottomRightMask
    assert p == 0.0 and op is None and output_dtype is None and scale is not None
    assert query.ndim == key.ndim == value.ndim and query.ndim in (4, 5)
    assert key.shape[2:] == query.shape[2:] and value.shape == key.shape
    flat = [each.flatten(2, -2) for each in (query, key, value)]
    logits = torch.einsum("bthd,bjhd->bhtj", flat[0], flat[1]) * scale
    num, length = logits.shape[2:]
    late = torch.arange(length) > torch.arange(length - num, length)[:, None]
    logits.masked_fill_(late, float("-inf"))
    out = torch.einsum("bhtj,bjhd->bthd", logits.softmax(-1), flat[2])
    lse = torch.full((1, logits.shape[1], -(-num // 32) * 32), float("inf"))
    lse[..., :num] = logits.logsumexp(-1)
    return out.reshape(query.shape), lse.unflatten(1, tuple(query.shape[2:-1]))


FUNCTIONS: dict[str, Any] = {FUNCTION: memory_efficient_attention_forward_requires_grad}
MASKS: dict[str, Any] = {MASK: LowerTriangularFromBottomRightMask}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_heads", [2, 6])
def test_xformers_prompts_equal_torch(name: str, num_heads: int) -> None:
    """Outputs and scores are those of the torch kernels, however the chunks lie."""
    chunks: list[PromptChunk] = CASES[name][0]
    theirs = filled(SHAPE, 20, seed=1)
    number(theirs, chunks)
    ours = copied(theirs, SHAPE)
    query, (key, value) = torch.randn(50, num_heads, 64), torch.randn(2, 50, 2, 64)
    outs = [torch.full_like(query, 7.0) for _ in range(2)]
    attention = MemoryEfficientPrompt.of(FUNCTIONS, MASKS)
    own = TritonKernels(CPU, 8, num_heads, 2, 64, attention)
    for kernels, cache, out in zip((TorchKernels(), own), (theirs, ours), outs, strict=True):
        tensors = StepTensors(query, key, value, out, 0.2)
        kernels.prefill(cache, chunks, tensors, Scoring())
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    same(ours, theirs, 20)


def test_what_is_missing_is_said() -> None:
    """Each name, and each parameter."""

    def older(query: Any, key: Any, value: Any, attn_bias: Any) -> None:
        """Has no scale."""

    with pytest.raises(XformersUnavailableError, match=f"lacks {MASK}$"):
        MemoryEfficientPrompt.of(FUNCTIONS, {})
    with pytest.raises(XformersUnavailableError, match=f"the parameter scale of {FUNCTION}"):
        MemoryEfficientPrompt.of({FUNCTION: older}, MASKS)


def test_what_the_device_does_not_take_is_said() -> None:
    """xformers refuses by ValueError or NotImplementedError, with its own reasons."""

    def refuses(*inputs: Any, attn_bias: Any, scale: float) -> Any:
        """As where no operator takes a device."""
        raise NotImplementedError("No operator found")

    attention = MemoryEfficientPrompt(refuses, None)
    with pytest.raises(XformersUnavailableError, match="No operator found"):
        attention.try_on((4, 2, 64), torch.float16, CPU)
    MemoryEfficientPrompt.of(FUNCTIONS, MASKS).try_on((4, 2, 64), torch.float32, CPU)


def test_the_installed_one() -> None:
    """Has the signature that stands in for it here."""
    pytest.importorskip("xformers")
    loaded = MemoryEfficientPrompt.load()
    theirs, ours = (
        [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]
        for function in (loaded.function, memory_efficient_attention_forward_requires_grad)
    )
    assert theirs == ours and type(loaded.mask).__name__ == MASK


def chosen(capability: int, asked: bool = False, quantised: bool = False) -> str:
    """What attends prompts on a device, by its name in the log."""
    spec = builder(Shape(), "h2o").kv_cache_spec
    _, name = selector._prompts(spec, CPU, 4, capability, quantised, asked)
    return name


def test_choice_is_xformers_before_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """xformers before Ampere, where it is there; elsewhere a kernel of our own, or a refusal."""
    load = MemoryEfficientPrompt.load
    monkeypatch.setattr(
        MemoryEfficientPrompt, "load", lambda: MemoryEfficientPrompt.of(FUNCTIONS, MASKS)
    )
    assert chosen(7) == chosen(8, asked=True) == "xformers, but for attention sinks"
    assert chosen(8) == "a Triton kernel of our own"  # float32
    assert chosen(7, quantised=True) == "a Triton kernel of our own"
    with pytest.raises(UnsupportedError, match="float8"):
        chosen(7, asked=True, quantised=True)
    monkeypatch.setattr(MemoryEfficientPrompt, "load", load)
    monkeypatch.setitem(sys.modules, "xformers", None)
    assert chosen(7) == "a Triton kernel of our own"
    with pytest.raises(UnsupportedError, match=r"xformers cannot be imported.*\[xformers\]"):
        chosen(7, asked=True)
