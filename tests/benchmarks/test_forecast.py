# SPDX-License-Identifier: Apache-2.0
"""Predictions of profiles: the scheduler as it was measured, and what a pool and a budget say."""

from __future__ import annotations

import csv
from statistics import fmean

import pytest

from benchmarks.gpu import expected, forecast
from benchmarks.gpu.devices import DEVICES
from benchmarks.gpu.forecast import MEMORY, SHAPES, capacity, fitting, rows, schedule
from benchmarks.throughput.models import MODELS
from benchmarks.throughput.profiles import CPU, GPU, Profile
from vllm_h2o.options.config import KVPolicyConfig

H100 = DEVICES["H100"]
MEASURED = expected.RESULTS / "throughput-cpu.csv"


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("profile", CPU[:2], ids=lambda profile: profile.id)
def test_schedule_has_as_many_sequences_as_were_measured(profile: Profile, index: int) -> None:
    """P1 and P2, both sides: within two percent of vLLM's own scheduler."""
    side = profile.sides[index]
    steps = list(schedule(profile, side, side.max_num_seqs or 256, 2048))
    given = sum(step.decodes + len(step.prompts) for step in steps)
    with MEASURED.open(newline="") as file:
        found = [
            float(row["mean_sequences"])
            for row in csv.DictReader(file)
            if (row["profile"], row["side"]) == (profile.id, side.name)
        ]
    assert given / len(steps) == pytest.approx(fmean(found), rel=0.02)
    assert given == profile.num_prompts * profile.output_len


def test_schedule_preempts_where_the_pool_binds_and_nowhere_else() -> None:
    """Stock vLLM computes prompts again in P1; with memory for all, and within budgets, not."""
    for profile, side, again in ((CPU[0], 1, True), (CPU[0], 0, False), (CPU[1], 1, False)):
        steps = schedule(profile, profile.sides[side], 256, 2048)
        assert (sum(len(step.prompts) for step in steps) > profile.num_prompts) is again


@pytest.mark.parametrize("profile", GPU, ids=lambda profile: profile.id)
def test_profile_fits_its_card(profile: Profile) -> None:
    """Weights and the pool of each side take at most 92 % of its memory; budgets are allowed."""
    shape, slot = SHAPES[profile.model], MODELS[profile.model].bytes_per_slot
    assert profile.card in (16, 24, 80, 141)
    for side in profile.sides:
        blocks = profile.num_blocks(side, slot)
        assert blocks is not None
        stored = slot + 8 * (side.budget is not None)
        pool = blocks * profile.block_size * stored * shape.num_kv_heads * shape.num_layers
        assert 2 * shape.parameters + pool <= 0.92 * profile.card * 1e9
        if side.budget is not None:
            config = KVPolicyConfig(name=side.policy, budget=side.budget, **side.options)
            config.check(profile.max_model_len, profile.block_size)


def test_capacity_is_none_where_nothing_is_evicted() -> None:
    """Stock vLLM, and a budget that every request fits into."""
    free = next(profile for profile in GPU if profile.id == "free-100")
    assert [capacity(free, side) for side in free.sides] == [None, None]
    first = GPU[0]
    assert capacity(first, first.sides[0]) == 224 and capacity(first, first.sides[1]) is None


def test_profiles_fit_the_devices_that_they_are_predicted_for() -> None:
    """A card of 24 GB gets the small ones, one of 141 GB all."""
    names = {name: [profile.id for profile in fitting(DEVICES[name])] for name in MEMORY}
    assert len(names["H200"]) == len(GPU) == len(names["H100"]) + 1
    assert set(names["L4"]) < set(names["H100"]) and "8B-short" in names["L4"]


@pytest.mark.parametrize("name", ["OPT-16-512+32", "OPT-30B-512+32", "8B-short", "batch-32"])
def test_profile_predictions_agree_with_their_csv(name: str) -> None:
    """The CSV is what the model says; the longer ones take minutes."""
    (profile,) = (profile for profile in GPU if profile.id == name)
    with expected.PROFILES.open(newline="") as file:
        written = [
            row for row in csv.DictReader(file) if (row["device"], row["profile"]) == ("H100", name)
        ]
    found = list(rows(H100, profile))
    assert [row["figure"] for row in written] == [row["figure"] for row in found]
    for was, now in zip(written, found, strict=True):
        assert float(was["predicted"]) == pytest.approx(now["predicted"], rel=1e-3)


def test_every_profile_that_fits_has_a_prediction() -> None:
    """Device by device, the ratio of each."""
    with expected.PROFILES.open(newline="") as file:
        ratios = [
            (row["device"], row["profile"])
            for row in csv.DictReader(file)
            if row["figure"] == "ratio"
        ]
    assert ratios == [
        (device.name, profile.id)
        for device in DEVICES.values()
        for profile in forecast.fitting(device)
    ]
