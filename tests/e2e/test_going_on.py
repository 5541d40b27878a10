# SPDX-License-Identifier: Apache-2.0
"""A request that adds the token sampled last goes on as if both were one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import ranks
from tests.e2e.conversations import in_pieces, own_text, talkative
from tests.e2e.harness import engine, shrink_terms

SMALL = {"block_size": 16, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 128}
WHAT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("h2o", {}),
    ("h2o", {"kernels": "torch"}),
    ("h2o", {"score": "mean", "eviction": "chunk"}),
    ("h2o", {"evict_every": "page", "recent_ratio": 0.2}),
    ("h2o", {"evict_every": 5}),
    ("snapkv", {"observation_window": 6}),
    ("h2o2", {"observation_window": 4, "lifetime": 9}),
    ("h2o2", {"split": "heads", "lifetime": 20}),
    ("h2o2", {"split": "layers", "lifetime": 9}),
    ("h2o2", {"score": "reconstruction"}),
    ("streaming", {"num_sink_tokens": 2}),
    ("streaming", {"prefix_caching": True}),
    ("snapkv", {"observation_window": 4, "prefix_caching": True}),
)


@pytest.mark.parametrize(("policy", "options"), WHAT, ids=[f"{p} {o}" for p, o in WHAT])
def test_pieces_are_the_whole(
    policy: str, options: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, before and after a term's lifetime has ended, also of a prompt that fits."""
    own = talkative(monkeypatch, options)
    caching = own.pop("prefix_caching", False)
    with engine(model, policy, own, enable_prefix_caching=caching, **SMALL) as llm:
        for seed, length in enumerate((96, 90, 64, 40)):
            prompt = own_text(seed, length)
            whole = in_pieces(llm, prompt, ())
            assert llm.reset_prefix_cache()
            assert in_pieces(llm, prompt, (1, 12, 30)) == whole


@pytest.mark.parametrize("where", ["host memory", "files", "files of two ranks"])
def test_pieces_from_elsewhere_are_the_whole(
    where: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied out of the pages and back loses nothing; files are there with the answer."""
    shrink_terms(monkeypatch, lifetime=20)
    continuation = {"host memory": 1}.get(where, str(tmp_path))
    args: dict[str, Any] = {**SMALL, "num_gpu_blocks_override": 34}
    if where == "files of two ranks":
        ranks.install(monkeypatch)
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
        args["tensor_parallel_size"] = 2
    kept = {"kv_save": 1} if "files" in where else {}
    prompt = own_text(1, 90)
    with engine(model, "h2o2", {"budget": 48, "continuation": continuation}, **args) as llm:
        whole = in_pieces(llm, prompt, ())
        # The others take all pages.
        assert in_pieces(llm, prompt, (1, 12), fill=508, **kept) == whole
    if kept:
        assert len(list(tmp_path.iterdir())) == 3 * args.get("tensor_parallel_size", 1)
