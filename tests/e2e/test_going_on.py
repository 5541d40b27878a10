# SPDX-License-Identifier: Apache-2.0
"""A request that adds the token sampled last goes on as if both were one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput

from tests.e2e import ranks
from tests.e2e.conversations import own_text
from tests.e2e.harness import engine, generate, shrink_terms, tiny_llama

SMALL = {"block_size": 16, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 128}
NUM_TOKENS = 40
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of two KV heads."""
    return tiny_llama(tmp_path_factory.mktemp("llama"), 4, 2)


def likely(output: RequestOutput) -> list[tuple[int, float]]:
    """Each token of an answer, and its log-probability."""
    (answer,) = output.outputs
    assert answer.logprobs is not None
    each = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token, chances[token].logprob) for token, chances in each]


def in_pieces(llm: LLM, prompt: list[int], ends: tuple[int, ...], **extra_args: Any) -> Any:
    """An answer by requests, of which the first ones end after so many tokens."""
    said, text = [], list(prompt)
    for start, end in zip((0, *ends), (*ends, NUM_TOKENS), strict=True):
        (output,) = generate(llm, [text], end - start, logprobs=1, extra_args=extra_args)
        assert output.num_cached_tokens == (len(text) - 1 if start else 0)
        said += likely(output)
        text += [token for token, _ in likely(output)]
    return said


@pytest.mark.parametrize(("policy", "options"), WHAT, ids=[f"{p} {o}" for p, o in WHAT])
def test_pieces_are_the_whole(
    policy: str, options: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, before and after a term's lifetime has ended, also of a prompt that fits."""
    own = {"budget": 64, "continuation": True, **options}
    shrink_terms(monkeypatch, lifetime=own.pop("lifetime", 9))
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
    prompt, said = own_text(1, 90), []
    with engine(model, "h2o2", {"budget": 48, "continuation": continuation}, **args) as llm:
        whole = in_pieces(llm, prompt, ())
        text = list(prompt)
        for start, end in ((0, 1), (1, 12), (12, NUM_TOKENS)):
            (output,) = generate(llm, [text], end - start, logprobs=1, extra_args=kept)
            assert output.num_cached_tokens == (len(text) - 1 if start else 0)
            said += likely(output)
            text = [*prompt, *(token for token, _ in said)]
            generate(llm, [own_text(2 + start, 508)], 2)  # it takes all pages
        assert said == whole
    if kept:
        assert len(list(tmp_path.iterdir())) == 3 * args.get("tensor_parallel_size", 1)
