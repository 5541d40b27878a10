# SPDX-License-Identifier: Apache-2.0
"""A 4-bit copy of rows, which estimates their products with a token, and says how far to trust it.

::

    rows[i, j]  ~ scales[i, g] * (code[i, j] - 8)         g = j // 64
    estimate[i] = bias[i] + scaled codes[i] . x           x rounded to 8 bits, by group of columns
    left out    : estimate[i] <= -cuts[i] * |x|           cuts[i] = z * sigma[i]

The error of an estimate is about normal: its deviation is ``sigma[i] * |x|``, with sigma the root
mean square of a row's rounding errors, where these have nothing to do with x.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch.nn.functional import pad

GROUP = 64
"""Columns with one scale."""
BLOCK = 16
"""Rows whose codes lie side by side, for vectors of rows."""
X_ERROR = GROUP / (12 * 127**2)
"""Most that rounding x to 8 bits adds to an estimate's variance: of the row's own square."""
_DRAWN = 2**29
"""Products of single numbers in a measurement of recall: a second of one core."""
_TOKENS = (16, 4096)
"""Tokens of a measurement, at least and at most."""
_LEAST = 100
"""Positive products below the cut in a measurement, at least."""


@dataclass(frozen=True)
class Coarse:
    """The copy of one matrix, rows and columns padded with zeros.

    Args:
        codes: [blocks, octets, 16, 4] of uint8. A byte has columns ``8 * octet + k`` (its lower
            half) and ``8 * octet + 4 + k``.
        scales: [blocks, groups, 16] of bfloat16.
        cuts: [blocks * 16] of float32: a row is left out at an estimate of -cuts * |x| or less.

    """

    codes: torch.Tensor
    scales: torch.Tensor
    cuts: torch.Tensor


def coarsen(rows: torch.Tensor, bias: torch.Tensor | None, recall: float) -> Coarse:
    """Make the copy, with cuts that keep this share of the positive products.

    Args:
        rows: [rows, columns].
        bias: [rows], or None.
        recall: the share that is asked for, in (0, 1).

    """
    count, width = rows.shape
    padded = pad(rows.float(), (0, -width % GROUP, 0, -count % BLOCK))
    groups = padded.view(len(padded), -1, GROUP)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (largest / -8).bfloat16()  # the largest has the code 0: there is no code 16
    steps = torch.where(scales == 0, 1.0, scales.float())
    codes = ((groups / steps).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
    halves = codes.view(-1, BLOCK, padded.shape[1] // 8, 2, 4).transpose(1, 2)
    packed = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    by_row = scales.view(-1, BLOCK, groups.shape[1]).transpose(1, 2)
    made = Coarse(packed.contiguous(), by_row.contiguous(), rows.new_zeros(len(padded)).float())
    errors = (widen(made)[:count, :width] - rows.float()).square().sum(1)
    sigma = ((errors + X_ERROR * rows.float().square().sum(1)) / width).sqrt()
    made.cuts[:count] = sigma * deviations(rows, bias, made, sigma, recall)
    return made


def widen(coarse: Coarse) -> torch.Tensor:
    """Return the rows of a copy: float32 [blocks * 16, groups * 64]."""
    codes = torch.stack((coarse.codes & 15, coarse.codes >> 4), 3)  # [blocks, octets, 16, 2, 4]
    whole = codes.transpose(1, 2).reshape(-1, coarse.scales.shape[1], GROUP).float() - 8
    scales = coarse.scales.float().transpose(1, 2).reshape(len(whole), -1, 1)
    return (whole * scales).flatten(1)


def rounded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return tokens as they are multiplied by codes: float32 [tokens, width], padded with zeros.

    Each group of columns is rounded to whole multiples of its largest magnitude / 127.
    """
    groups = pad(x.float(), (0, width - x.shape[1])).view(len(x), -1, GROUP)
    steps = groups.abs().amax(2, keepdim=True) / 127
    return ((groups / torch.where(steps == 0, 1.0, steps)).round() * steps).flatten(1)


def estimates(x: torch.Tensor, bias: torch.Tensor | None, coarse: Coarse) -> torch.Tensor:
    """Estimate the products of tokens with rows: float32 [tokens, blocks * 16]."""
    rows = widen(coarse)
    products = rounded(x, rows.shape[1]) @ rows.t()
    return products if bias is None else products + pad(bias.float(), (0, len(rows) - len(bias)))


def kept(x: torch.Tensor, bias: torch.Tensor | None, coarse: Coarse) -> torch.Tensor:
    """Return which rows each token keeps: booleans [tokens, blocks * 16]; what is NaN is kept."""
    norms = x.float().norm(dim=1, keepdim=True)
    return ~(estimates(x, bias, coarse) <= -coarse.cuts * norms)


def deviations(
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    coarse: Coarse,
    sigma: torch.Tensor,
    recall: float,
) -> float:
    """Return z: the estimates' deviations below zero at which a share of positive products is kept.

    It is measured on the rows themselves, with tokens of independent normal numbers, as a layer
    norm without gains gives. Where too few products are positive, z is that of products of
    zero, which need the most.

    Args:
        rows: [rows, columns].
        bias: [rows], or None.
        coarse: their copy, without cuts.
        sigma: [rows], deviations of the estimates, in units of |x|.
        recall: the share.

    """
    count, width = rows.shape
    chance = torch.Generator().manual_seed(0)
    tokens = min(max(_DRAWN // (count * width), _TOKENS[0]), _TOKENS[1])
    # While it loads a model, vLLM's default type is the model's.
    x = torch.randn(tokens, width, generator=chance, dtype=torch.float32).to(rows.device)
    products = x @ rows.float().t() + (0 if bias is None else bias.float())
    spread = sigma.clamp_min(torch.finfo(torch.float32).tiny) * x.norm(dim=1, keepdim=True)
    below = (-estimates(x, bias, coarse)[:, :count] / spread)[products > 0]
    if len(below) * (1 - recall) < _LEAST:
        return NormalDist().inv_cdf(recall)
    return below.kthvalue(round(len(below) * recall)).values.item()
