"""The policy that vllm_h2o/policy/README.md adds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_h2o import policy
from vllm_h2o.policy import base


def add_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what the README says one of the policies."""
    text = (Path(policy.__file__).parent / "README.md").read_text()
    assert len(text.splitlines()) <= 20
    names = dict(vars(base))
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)  # type: ignore[index]
    monkeypatch.setitem(policy.POLICIES, "scatter", names["SCATTER"])
