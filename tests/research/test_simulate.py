# SPDX-License-Identifier: Apache-2.0
"""The simulation and the engine are two implementations of one definition, and agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality.forced import judge
from benchmarks.quality.llama import Llama
from benchmarks.quality.plans import POLICIES
from research.simulation.simulate import Context, teacher_forced_nll
from research.simulation.variants import BUILT, CANDIDATES, Variant
from tests.e2e.harness import tiny_llama

PROMPT, LENGTH, CAPACITY = 40, 120, 32
VARIANTS = {variant.name: variant for variant in (*BUILT, *CANDIDATES)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of random weights, GQA 3."""
    return tiny_llama(tmp_path_factory.mktemp("llama"), 6, 2)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """Three windows of random tokens."""
    return torch.randint(256, (3, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", *(name for name in VARIANTS if name in POLICIES)])
def test_the_engine_agrees(policy: str, folder: str, ids: torch.Tensor) -> None:
    """The same cost of every forced token, and the same first choices."""
    texts = [(window[:PROMPT], window[PROMPT:]) for window in ids.tolist()]
    name, options = POLICIES.get(policy, (policy, {}))
    tried = VARIANTS.get(policy)
    options = options if tried is None else {**options, "budget": CAPACITY}
    judged = judge(folder, name, options, texts, LENGTH, progress=False)
    model = Llama(Path(folder))
    nll = teacher_forced_nll(model, ids, PROMPT, tried, CAPACITY)[:, PROMPT - 1 :]
    torch.testing.assert_close(torch.tensor([j.nll for j in judged]), nll, rtol=1e-4, atol=1e-4)
    plain = tried or VARIANTS["h2o"]
    context = Context(model, ids[:, :PROMPT], (plain,))
    hits = context.hits(ids[:, PROMPT:], plain, LENGTH if tried is None else CAPACITY)
    assert torch.equal(torch.tensor([j.first for j in judged]), hits)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_changes_nothing_with_room_for_all(
    name: str, folder: str, ids: torch.Tensor
) -> None:
    """With room for everything it changes nothing; with less room, it does."""
    model, variant = Llama(Path(folder)), VARIANTS[name]
    full = teacher_forced_nll(model, ids, PROMPT, None)
    torch.testing.assert_close(teacher_forced_nll(model, ids, PROMPT, variant, LENGTH), full)
    evicted = teacher_forced_nll(model, ids, PROMPT, variant, CAPACITY)
    torch.testing.assert_close(evicted[:, : PROMPT - 1], full[:, : PROMPT - 1])
    assert (evicted[:, PROMPT:] - full[:, PROMPT:]).abs().max() > 1e-3


def test_questions_are_asked_of_what_is_left(folder: str, ids: torch.Tensor) -> None:
    """Step by step from a context is the same as layer by layer over the whole."""
    model, variant = Llama(Path(folder)), Variant("h2o", recent=0.25, diversity=0.5)
    nll = teacher_forced_nll(model, ids, PROMPT, variant, CAPACITY)
    tail = ids[:, PROMPT:]
    first = Context(model, ids[:, :PROMPT], (variant,)).hits(tail, variant, CAPACITY)
    assert first.shape == tail.shape
    assert (nll[:, PROMPT - 1 :][first] < torch.log(torch.tensor(256.0))).all()
