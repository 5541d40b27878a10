# SPDX-License-Identifier: Apache-2.0
"""Hybrid models: the policy on layers with attention, vLLM's own kernels on those with states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.single_type_kv_cache_manager import MambaManager

from benchmarks.throughput.models import write_tokenizer
from tests.e2e.beside import (
    KEPT,
    PROMPTS,
    SETTINGS,
    chances,
    follow,
    name,
    overwrite,
    tiny_granite4,
    tiny_lfm2,
    tiny_zamba2,
)
from tests.e2e.conversations import (
    ConversationOracle,
    converse,
    in_pieces,
    own_text,
    talkative,
)
from tests.e2e.harness import Probe, assert_same_tokens, engine, generate, token_ids
from vllm_h2o.errors import ConfigError, UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.trace.record import run
from vllm_h2o.worker import rotary

BUDGET = 64


@pytest.mark.parametrize("tiny", [tiny_granite4, tiny_lfm2], ids=name)
@pytest.mark.parametrize(
    ("policy", "options"),
    [*KEPT, ("h2o2", {"observation_window": 20, "merge": 0.8})],
    ids=name,
)
def test_what_is_kept(
    policy: str,
    options: dict[str, Any],
    tiny: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the layer with attention, what the reference keeps; the others keep states."""
    said: list[object] = []
    monkeypatch.setattr(rotary.logger, "warning", lambda *args: said.append(args))
    options = {"budget": BUDGET, **options}
    settings = {k: options.pop(k) for k in ("kv_cache_dtype",) if k in options}
    oracle, probe = follow(monkeypatch, tiny(tmp_path), policy, options, **settings)
    assert len({layer for layer, _, _ in oracle.retained}) == 1
    assert all(type(m) is MambaManager for m in probe.scheduler.other_groups.managers)
    assert probe.scheduler.other_groups.num_states == 3
    assert not said  # its second pass is not left out


@pytest.mark.parametrize("tiny", [tiny_granite4, tiny_lfm2], ids=name)
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("h2o", {"eviction": "chunk"}),
        ("h2o2", {"observation_window": 20, "split": "heads"}),
        ("h2o2", {"observation_window": 20, "continuation": 1}),
    ],
    ids=name,
)
def test_conversations(
    policy: str,
    options: dict[str, Any],
    tiny: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns begin with the states and the survivors of earlier ones; host memory keeps both."""
    own, settings = talkative(monkeypatch, options), {**SETTINGS, "max_model_len": 400}
    monkeypatch.setattr("vllm_h2o.scheduler.conversations.FOUND_PER_STEP", 0)
    on_host = "continuation" in options
    if on_host:
        settings["num_gpu_blocks_override"] = 1 + 22
    model = tiny(tmp_path)
    with monkeypatch.context() as patch, engine(model, policy, own, **settings) as llm:
        probe = Probe(llm)
        oracle = ConversationOracle(probe.scheduler).install(patch)
        texts = [own_text(index, length) for index, length in enumerate((40, 63, 64, 90))]
        lengths = [0] * 4
        for turn in converse(llm, texts, turns=(0, 1, 30), max_tokens=21):
            assert [output.num_cached_tokens for output in turn] == lengths
            lengths = [len(output.prompt_token_ids or ()) + 21 - 1 for output in turn]
        assert probe.num_free == probe.num_total
        assert not on_host or probe.scheduler.conversations._on_host
    assert oracle.num_turns == 4 * 3 * 2
    assert oracle.num_ties <= max(oracle.num_victims / 1000, 1)
    assert oracle.max_error < 1e-4


@pytest.mark.parametrize("tiny", [tiny_granite4, tiny_lfm2, tiny_zamba2], ids=name)
@pytest.mark.parametrize("where", ["pages", "host memory", "files"])
def test_pieces_are_the_whole(
    where: str, tiny: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that goes on where another ended, bit for bit, after pages were filled with NaN."""
    continuation = {"pages": True, "host memory": 1}.get(where, str(tmp_path / "kept"))
    own = talkative(monkeypatch, {"continuation": continuation, "observation_window": 20})
    settings = {**SETTINGS, "num_gpu_blocks_override": 1 + 24}
    prompt = own_text(1, 90)
    others = {} if where == "pages" else {"fill": 240}
    kept = {"kv_save": 1} if where == "files" else {}
    with engine(tiny(tmp_path), "h2o2", own, **settings) as llm:
        overwrite(llm, torch.nan)
        whole = in_pieces(llm, prompt, ())
        assert llm.reset_prefix_cache()
        overwrite(llm, torch.nan)
        assert in_pieces(llm, prompt, (1, 12, 30), **others, **kept) == whole


def test_positions_that_roll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside states, which know no positions: past the length that the model was trained on."""
    options = {"budget": BUDGET, "eviction": "chunk", "positions": 160}
    settings = {"max_model_len": 700, "max_num_seqs": 3}
    follow(monkeypatch, tiny_lfm2(tmp_path), "h2o", options, 400, **settings)


@pytest.mark.parametrize("tiny", [tiny_granite4, tiny_lfm2], ids=name)
def test_a_full_budget_gives_stock_s_tokens(tiny: Callable[[Path], str], tmp_path: Path) -> None:
    """As likely as there; a small budget gives others: otherwise nothing would be said."""
    model = tiny(tmp_path)
    with engine(model, **SETTINGS) as llm:
        stock = generate(llm, PROMPTS, 40, logprobs=2)
    with engine(model, "h2o", {"budget": 32}, **SETTINGS) as llm:
        whole = generate(llm, PROMPTS, 40, logprobs=2, extra_args={"kv_budget": "full"})
        less = generate(llm, PROMPTS, 40, logprobs=2)
    assert assert_same_tokens(stock, whole) == 0
    assert chances(whole) == pytest.approx(chances(stock), abs=1e-4)
    assert chances(less) != pytest.approx(chances(stock), abs=1e-3)


@pytest.mark.parametrize(
    ("tiny", "pages"), [(tiny_granite4, 18), (tiny_lfm2, 22)], ids=["granite4", "lfm2"]
)
@pytest.mark.parametrize("eviction", ["prompt_end", "pressure", "chunk"])
def test_a_request_that_is_preempted(
    eviction: str,
    tiny: Callable[[Path], str],
    pages: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins again from no state; the reference follows it, and a full budget is stock's.

    Stock vLLM has the same pool: on a CPU it rotates LFM2's queries otherwise in other batches.
    """
    model, options = tiny(tmp_path), {"budget": 128, "eviction": eviction}
    pool = {"num_gpu_blocks_override": 1 + pages}
    _, probe = follow(monkeypatch, model, "h2o", options, 56, **pool)
    assert probe.num_preemptions > 0
    with engine(model, **SETTINGS, **pool) as llm:
        stock = generate(llm, PROMPTS, 56, logprobs=2)
    with engine(model, "h2o", options, **SETTINGS, **pool) as llm:
        probe = Probe(llm)
        whole = generate(llm, PROMPTS, 56, extra_args={"kv_budget": "full"})
        assert probe.num_preemptions > 0
    assert assert_same_tokens(stock, whole) == 0


@pytest.mark.parametrize("tiny", [tiny_granite4, tiny_lfm2], ids=name)
def test_a_pool_that_runs_short(
    tiny: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests fall back to their budgets in the middle of their text; their states stay."""
    options, pool = {"budget": 32, "eviction": "pressure"}, {"num_gpu_blocks_override": 31}
    oracle, _ = follow(monkeypatch, tiny(tmp_path), "h2o", options, 56, **pool)
    assert oracle.num_packs > 0


def test_abort_returns_states(tmp_path: Path) -> None:
    """Within a prompt, and past it: pages of every group come back."""
    with engine(tiny_granite4(tmp_path), "h2o", {"budget": 32}, **SETTINGS) as llm:
        probe = Probe(llm)
        sampling = SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False)
        for n, prompt in enumerate(PROMPTS):
            llm.llm_engine.add_request(str(n), {"prompt_token_ids": prompt}, sampling)
        for _ in range(4):
            llm.llm_engine.step()
        states = probe.scheduler.ledger.states.values()
        assert {state.in_prompt for state in states} == {False, True}
        assert probe.scheduler.other_groups.num_held() == 3 * len(states)
        llm.llm_engine.abort_request([str(n) for n in range(len(PROMPTS))])
        llm.llm_engine.step()
        assert probe.num_free == probe.num_total


@pytest.mark.parametrize("tiny", [tiny_granite4, tiny_lfm2], ids=name)
def test_pages_that_change_hands(tiny: Callable[[Path], str], tmp_path: Path) -> None:
    """What pages held before, no numbers among it, reaches neither states nor attention."""
    settings = {**SETTINGS, "dtype": "bfloat16", "num_gpu_blocks_override": 60}
    with engine(tiny(tmp_path), "h2o", {"budget": BUDGET}, **settings) as llm:
        clean = generate(llm, PROMPTS, 20, logprobs=1)
        overwrite(llm, torch.nan)
        after = generate(llm, PROMPTS, 20, logprobs=1)
    assert token_ids(after) == token_ids(clean)
    assert chances(after) == chances(clean)


@pytest.mark.parametrize("tiny", [tiny_granite4, tiny_zamba2], ids=name)
def test_trace_has_the_layers_with_attention(tiny: Callable[[Path], str], tmp_path: Path) -> None:
    """Of an engine with room for one sequence and its states."""
    write_tokenizer(tmp_path, 256)
    trace = run(
        tiny(tmp_path),
        " ".join(f"w{n}" for n in range(3, 103)),
        KVPolicyConfig(budget=BUDGET),
        max_tokens=8,
        every=1,
        temperature=0.0,
        max_model_len=None,
        block_size=32,
        dtype="float32",
    )
    assert len(trace.layers) == 1
    assert len(trace.frames) == 8


def test_a_budget_is_judged_by_the_policy_s_pages(tmp_path: Path) -> None:
    """Not by the shortest blocks of all groups, which may be a state's: so long is a sequence."""
    options, settings = {"budget": 32, "eviction": "chunk"}, {**SETTINGS, "max_model_len": 60}
    with engine(tiny_granite4(tmp_path), "h2o", options, **settings) as llm:
        core, cache = (
            llm.llm_engine.engine_core.engine_core,
            llm.llm_engine.vllm_config.cache_config,
        )
        assert core.scheduler.block_manager.block_size == 64
        assert cache.block_size == 60
        for budget in ("full", 60, 0.5):
            outputs = generate(llm, PROMPTS[:2], 20, extra_args={"kv_budget": budget})
            assert [len(tokens) for tokens in token_ids(outputs)] == [20, 20]


def test_pages_that_vllm_enlarges_are_checked(tmp_path: Path) -> None:
    """Two pages of 32 tokens are one of 64, of which none can be evicted whole."""
    options = {"budget": 64, "evict_every": "page"}
    with pytest.raises(ConfigError, match="64"):
        engine(tiny_granite4(tmp_path), "h2o", options, **SETTINGS).__enter__()


@pytest.mark.parametrize(
    ("policy", "options", "settings", "what"),
    [
        ("snapkv", {}, {"enable_prefix_caching": True}, "prefix caching"),
        ("h2o2", {"score": "reconstruction"}, {}, "score=reconstruction"),
        ("h2o2", {"split": "layers"}, {}, "split=layers"),
    ],
    ids=name,
)
def test_what_states_rule_out(
    policy: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    what: str,
    tmp_path: Path,
) -> None:
    """Refused at the start, with the reason."""
    with pytest.raises(UnsupportedError, match=f"{what}.*hybrid|hybrid.*{what}") as error:
        engine(tiny_granite4(tmp_path), policy, options, **settings).__enter__()
    assert "keeps one state for all tokens" in str(error.value)
