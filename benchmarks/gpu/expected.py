# SPDX-License-Identifier: Apache-2.0
"""Predictions of a device, from the CSVs in results: written before anything was measured."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu import mlp, roofline
from benchmarks.gpu.card import Card
from benchmarks.gpu.devices import device_of
from benchmarks.gpu.kernels import Size
from benchmarks.throughput.profiles import Profile

RESULTS = Path(__file__).parents[1] / "results"
KERNELS, PROFILES = RESULTS / "gpu-predicted.csv", RESULTS / "gpu-predicted-profiles.csv"


def of_kernels(card: Card, size: Size) -> dict[str, float]:
    """Figures of one size by their names in ``speed``; empty where the model says nothing."""
    if size.dtype.itemsize != 2 or size.head_size != 128:
        return {}
    heads = size.num_heads, size.num_kv_heads
    names = {(shape.num_heads, shape.num_kv_heads): shape.name for shape in roofline.SHAPES}
    found = {}
    for row in _rows(KERNELS, card):
        batch = 1 if row["figure"].startswith("prompt") else size.requests
        where = row["shape"], int(row["batch"]), int(row["size"])
        if where == (names.get(heads), batch, size.tokens):
            found[row["figure"]] = float(row["predicted"])
    return found


def of_mlp(card: Card, layer: mlp.Layer, tokens: int) -> dict[str, float]:
    """Figures of a ReLU model's MLP by their names in ``mlp``."""
    where = layer.name, str(tokens)
    found = (row for row in _rows(KERNELS, card) if (row["shape"], row["batch"]) == where)
    named = {row["figure"]: float(row["predicted"]) for row in found}
    return {name: value for name, value in named.items() if name.startswith("mlp_")}


def of_profile(card: Card, profile: Profile) -> dict[tuple[str, str], float]:
    """Figures of a profile by (side, name); the ratio's side is ''."""
    return {
        (row["side"], row["figure"]): float(row["predicted"])
        for row in _rows(PROFILES, card)
        if row["profile"] == profile.id
    }


def _rows(path: Path, card: Card) -> Iterator[dict[str, str]]:
    """Rows of the device with a data sheet that the card is; none for others."""
    device = device_of(card.name)
    if device is None:
        return
    with path.open(newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["device"] == device.name)
