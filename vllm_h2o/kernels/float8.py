# SPDX-License-Identifier: Apache-2.0
"""K and V in a cache of float8: what is stored, and what attention makes of it.

One scale for all keys of a layer, and one for all its values, as vLLM has them: ``stored = value /
scale``, rounded to the nearest float8, ties to even; what is larger than the largest becomes that.
Attention reads ``stored * scale``: keys' scales go into that of the logits, values' into the
output. A survivor moves as it is stored. vLLM rounds like this on GPUs; its own attention on a CPU
cuts off what does not fit, which makes every number a little smaller: see docs/quality.md.
"""

from __future__ import annotations

import torch

DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The cache's types, by vLLM's names."""


def quantised(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Round ``x``, of any shape and type, to ``dtype``: as a cache stores it.

    Args:
        x: keys or values.
        dtype: one of :data:`DTYPES`.
        scale: of the layer's keys, or values.

    """
    largest = torch.finfo(dtype).max
    return (x.to(torch.float32) * (1.0 / scale)).clamp(-largest, largest).to(dtype)


def as_read(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Round ``x`` as a cache does, and scale it back: as attention reads it, in float64.

    Args:
        x: keys or values, of any shape.
        dtype: of the cache; a type of 16 bits and more keeps ``x`` as it is.
        scale: of the layer's keys, or values.

    """
    x = x.double()
    if dtype not in DTYPES.values():
        return x
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x / scale)  # x / scale = m 2^exponent, 1/2 <= m < 1
    smallest = torch.tensor(info.tiny, dtype=torch.float64)
    step = torch.maximum(torch.ldexp(torch.ones_like(x), exponent - 1), smallest) * info.eps
    return ((x / scale / step).round() * step).clamp(-info.max, info.max) * scale
