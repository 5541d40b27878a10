# SPDX-License-Identifier: Apache-2.0
"""Each family of decoders is stock vLLM's at 100 %, the reference's at less, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import zoo
from tests.e2e.zoo import EQUAL, FAMILIES, Family
from vllm_h2o.options.refusals import MODEL_REFUSALS
from vllm_h2o.patches._patch import SUPPORTED_VLLM, installed_version, minor_of


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_becomes_of(family: Family, tmp_path: Path) -> None:
    """What docs/compatibility.md says of it; ``python -m tools.zoo`` writes it anew."""
    known = zoo.recorded()[family.name, minor_of(installed_version())]
    assert zoo.become(family, tmp_path) == known


def test_record_has_every_family_equal_or_refused() -> None:
    """All families, on the versions that are supported, equal or refused for a reason of ours."""
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    recorded = zoo.recorded()
    assert set(recorded) == {(name, minor) for name in names for minor in SUPPORTED_VLLM}
    reasons = {f"refused: {refusal.what}" for refusal in MODEL_REFUSALS}
    assert set(recorded.values()) <= {EQUAL} | reasons


def test_a_wrong_answer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale of attention that is not the model's is neither stock's nor excused."""
    from vllm_h2o.worker.attention import HeavyHitterImpl

    init = HeavyHitterImpl.__init__

    def scaled(
        self: HeavyHitterImpl, num_heads: int, size: int, scale: float, *rest: object, **kw: object
    ) -> None:
        init(self, num_heads, size, scale * 1.5, *rest, **kw)

    monkeypatch.setattr(HeavyHitterImpl, "__init__", scaled)
    with pytest.raises(AssertionError):
        zoo.become(FAMILIES[0], tmp_path)
