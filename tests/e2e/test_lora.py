# SPDX-License-Identifier: Apache-2.0
"""Adapters: what they change in K and V is scored and evicted like the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from vllm import LLM, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

from tests.e2e.conversations import ConversationOracle
from tests.e2e.harness import CHARACTERS, Probe, assert_same_tokens, engine, tiny_llama, token_ids

PROMPTS = [CHARACTERS[n : n + n] for n in (5, 63, 65, 120)]
RANK = 4
SETTINGS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
}


def adapter(model: str, folder: Path, seed: int) -> LoRARequest:
    """Random low-rank changes of every projection, as PEFT writes them."""
    config = AutoConfig.from_pretrained(model)
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * hidden // config.num_attention_heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, (size_in, size_out) in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            down = torch.randn(RANK, size_in, generator=generator) * 0.15
            up = torch.randn(size_out, RANK, generator=generator) * 0.15
            weights |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    modules = [name.rpartition(".")[2] for name in shapes]
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return LoRARequest(folder.name, seed, str(folder))


def generate(
    llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]
) -> list[RequestOutput]:
    """Greedy, each prompt with its adapter."""
    sampling = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=2
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(given, sampling, use_tqdm=False, lora_request=adapters)


def test_two_adapters_in_one_batch_equal_stock(tmp_path: Path) -> None:
    """Two adapters in one batch: stock's tokens at 100 %, each request's own below.

    A request without an adapter is alone here: beside others, on a CPU, vLLM 0.32 gives it theirs.
    """
    model = tiny_llama(tmp_path / "model", 4, 2)
    loras = [adapter(model, tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    mixed: list[LoRARequest | None] = [*loras, *loras]
    with engine(model, None, None, **SETTINGS) as llm:
        stock = generate(llm, PROMPTS, mixed)
    with engine(model, "h2o", {"budget": 1.0}, **SETTINGS) as llm:
        ours = generate(llm, PROMPTS, mixed)
    assert assert_same_tokens(stock, ours) <= 1
    with engine(model, "h2o", {"budget": 64}, **SETTINGS) as llm:
        probe = Probe(llm)
        variants: list[LoRARequest | None] = [None, *loras]
        by_adapter = [token_ids(generate(llm, PROMPTS[-1:], [each]))[0] for each in variants]
        together = generate(llm, PROMPTS, mixed)
        assert max(max(step.values(), default=0) for step in probe.held[-10:]) == 2
        alone = [
            generate(llm, [prompt], [lora])[0] for prompt, lora in zip(PROMPTS, mixed, strict=True)
        ]
        assert probe.num_free == probe.num_total
    assert assert_same_tokens(alone, together) <= 1
    assert token_ids(together) != token_ids(stock)
    assert len({tuple(tokens) for tokens in by_adapter}) == 3


def test_adapters_share_no_prefix(tmp_path: Path) -> None:
    """A hit gives what its own adapter gave cold; the other one's pages are not found."""
    model = tiny_llama(tmp_path / "model", 4, 2)
    loras = [adapter(model, tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    options = {"budget": 64, "observation_window": 12}
    settings = {**SETTINGS, "enable_prefix_caching": True}
    with engine(model, "snapkv", options, **settings) as llm:
        probe = Probe(llm)
        cold = [generate(llm, PROMPTS[-1:], [lora])[0] for lora in loras]
        assert [output.num_cached_tokens for output in cold] == [0, 0]
        for order in (slice(None), slice(None, None, -1)):
            hits = generate(llm, PROMPTS[-1:] * 2, loras[order])
            assert [output.num_cached_tokens for output in hits] == [96, 96]
            assert token_ids(hits) == token_ids(cold[order])
        assert probe.num_free == probe.num_total
    assert token_ids(cold[:1]) != token_ids(cold[1:])


def test_adapters_go_on_from_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, as the reference does; from another's turn neither goes on, nor one without any."""
    model = tiny_llama(tmp_path / "model", 4, 2)
    loras = [adapter(model, tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    options = {"budget": 64, "continuation": True}
    with engine(model, "h2o", options, **SETTINGS) as llm:
        probe = Probe(llm)
        oracle = ConversationOracle(probe.scheduler).install(monkeypatch)
        first = generate(llm, PROMPTS[-1:] * 2, [*loras])
        said = [[*PROMPTS[-1], *tokens, *CHARACTERS[:9]] for tokens in token_ids(first)]
        assert said[0] != said[1]
        others: list[LoRARequest | None] = [None, loras[1]]
        cold = [generate(llm, said[:1], [other])[0] for other in others]
        second = generate(llm, said, [*loras])
        found = [output.num_cached_tokens for output in (*first, *cold, *second)]
        assert found == [0, 0, 0, 0, 143, 143]
        assert probe.num_free == probe.num_total
    assert oracle.num_turns == 2 * 2 * 2 and oracle.max_error < 1e-4


@pytest.mark.parametrize("way", ["add_lora", "request"])
def test_adapter_loaded_in_place_starts_anew(way: str, tmp_path: Path) -> None:
    """With a fresh engine's tokens; later turns, and those of another adapter, go on."""
    model = tiny_llama(tmp_path / "model", 4, 2)
    lora, other, newer = (adapter(model, tmp_path / f"adapter{seed}", seed) for seed in (1, 2, 3))
    options = {"budget": 64, "continuation": True}
    anew = LoRARequest(lora.lora_name, 1, lora.lora_path, load_inplace=True)

    def turn(llm: LLM, text: list[int], given: LoRARequest) -> tuple[list[int], int | None]:
        """Say a text, and add the answer and something more to it."""
        (output,) = generate(llm, [text], [given])
        (said,) = token_ids([output])
        text += [*said, *CHARACTERS[:9]]
        return said, output.num_cached_tokens

    with engine(model, "h2o", options, **SETTINGS) as llm:
        text, another = [*PROMPTS[-1]], [*PROMPTS[-1]]
        turn(llm, text, lora)
        turn(llm, another, other)
        shutil.copytree(newer.lora_path, lora.lora_path, dirs_exist_ok=True)
        if way == "add_lora":
            llm.llm_engine.add_lora(anew)
        given = anew if way == "request" else lora
        asked = [*text]
        said, num_cached = turn(llm, text, given)
        assert num_cached == 0
        assert turn(llm, text, given)[1] == len(asked) + 23
        assert turn(llm, another, other)[1] == 143
    with engine(model, "h2o", options, **SETTINGS) as llm:
        assert turn(llm, asked, newer) == (said, 0)
