# SPDX-License-Identifier: Apache-2.0
"""The 4-bit copy of rows, and the recall of its cuts."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch

from vllm_h2o.kernels.coarse import GROUP, coarsen, estimates, kept, rounded, widen


def test_codes_keep_the_largest_of_a_group_and_half_a_step_of_others() -> None:
    """The largest magnitude is 8 steps; only its opposite, 8 steps the other way, has no code."""
    torch.manual_seed(0)
    rows = torch.randn(20, 3 * GROUP)
    coarse = coarsen(rows, None, 0.99)
    groups = rows.view(20, 3, GROUP)
    steps = groups.abs().amax(2, keepdim=True) / 8
    errors = (widen(coarse)[:20].view(20, 3, GROUP) - groups).abs()
    assert (errors <= 1.1 * steps).all()
    assert (errors <= 0.55 * steps).float().mean() > 0.98
    assert coarse.codes.numel() == 32 * 3 * GROUP // 2


def test_padding_is_zero_and_left_out() -> None:
    """Rows up to a block, columns up to a group."""
    rows = torch.randn(5, 70)
    coarse = coarsen(rows, None, 0.99)
    wide = widen(coarse)
    assert wide.shape == (16, 128)
    assert not wide[5:].any() and not wide[:, 70:].any()
    assert not kept(torch.randn(3, 70), None, coarse)[:, 5:].any()


def test_rows_of_zeros_have_no_error() -> None:
    """They have no scale."""
    coarse = coarsen(torch.zeros(16, 64), None, 0.99)
    assert not widen(coarse).any() and not coarse.cuts.any()


def test_tokens_are_rounded_by_group() -> None:
    """An outlier coarsens the columns of its group alone."""
    torch.manual_seed(0)
    x = torch.randn(2, 2 * GROUP)
    x[:, 0] = 100
    errors = (rounded(x, 2 * GROUP) - x).abs()
    assert errors[:, GROUP:].max() < 4 / 127 and errors[:, :GROUP].max() > 4 / 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("recall", "most"), [(0.9, 1.1), (0.99, 1.4), (0.999, 2.0)])
@pytest.mark.parametrize("zeros", [0.5, 0.9, 0.95])
def test_recall_is_what_was_asked(
    zeros: float, recall: float, most: float, dtype: torch.dtype
) -> None:
    """Within .005, of tokens as a layer norm gives them; ``most`` are kept for each used one."""
    torch.manual_seed(1)
    rows = (0.02 * torch.randn(1024, 256)).to(dtype)
    bias = torch.full((1024,), -NormalDist().inv_cdf(zeros) * 0.02 * 256**0.5).to(dtype)
    coarse = coarsen(rows, bias, recall)
    x = torch.nn.functional.layer_norm(torch.randn(500, 256), (256,)).to(dtype)
    used = x.float() @ rows.float().t() + bias.float() > 0
    keeps = kept(x, bias, coarse)[:, :1024]
    assert (keeps & used).sum() / used.sum() == pytest.approx(recall, abs=0.005)
    assert keeps.sum() < most * used.sum()


def test_cuts_without_used_neurons_are_those_of_products_of_zero() -> None:
    """Nothing can be measured: 2.33 deviations, by the normal distribution."""
    torch.manual_seed(0)
    rows = torch.randn(64, 64)
    coarse = coarsen(rows, torch.full((64,), -1e3), 0.99)
    x = torch.randn(4000, 64)
    errors = (estimates(x, None, coarse) - x @ rows.t()) / x.norm(dim=1, keepdim=True)
    misses = (errors < -coarse.cuts).float().mean().item()
    assert misses == pytest.approx(0.01, abs=0.004)
