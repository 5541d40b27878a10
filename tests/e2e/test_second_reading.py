# SPDX-License-Identifier: Apache-2.0
"""What an engine reads again, against transformers' own model reading it so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from vllm import SamplingParams

from tests.e2e.harness import CHARACTERS, Probe, engine, generate, shrink_terms, tiny_llama
from tests.e2e.oracle import follow
from vllm_h2o.policy.h2o2 import RECONSTRUCTION
from vllm_h2o.worker.after_step import Packing
from vllm_h2o.worker.reconstruction import Block, Reader, Reconstruction

PAGE, LONGEST = 16, 500
POSITIONS = 512  # of the model; the engine has fewer
TEXT = CHARACTERS * 2
PROMPTS = [TEXT[7:407], TEXT[100:105], TEXT[300:557], TEXT[11:211], TEXT[900:1156]]
Read = tuple[Block, torch.Tensor, torch.Tensor, torch.Tensor]
"""A block, and of its rows the token ids, the positions, and the model's last hidden states."""


class Watched:
    """A model whose calls are kept."""

    def __init__(self, model: Any, reconstruction: Reconstruction, kept: list[Read]) -> None:
        self.model, self.reconstruction, self.kept = model, reconstruction, kept

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """As the model's own."""
        hidden: torch.Tensor = self.model(**inputs)
        for block in self.reconstruction.blocks:
            own = (inputs["input_ids"], inputs["positions"], hidden)
            ids, positions, states = (x[block.chunk.tokens].clone() for x in own)
            self.kept.append((block, ids, positions, states))
        return hidden


def second_reading(model: Any, prompt: list[int], block: Block) -> torch.Tensor:
    """[T, hidden]: a block read after its own end, over the first page, the block and itself."""
    first = DynamicCache()
    model(torch.tensor([prompt[: block.end]]), past_key_values=first)
    term = RECONSTRUCTION.term("reread")
    assert term is not None
    start = block.start // term.block * term.block
    seen = [*(range(PAGE) if start else ()), *range(start, block.end)]
    cache = DynamicCache()
    for index, layer in enumerate(first.layers):
        cache.update(layer.keys[:, :, seen], layer.values[:, :, seen], index)
    num_new = block.end - block.start
    visible = torch.ones(num_new, len(seen) + num_new).tril(len(seen)) > 0
    begin = min(block.end, POSITIONS - num_new)
    found = model.model(
        torch.tensor([prompt[block.start : block.end]]),
        past_key_values=cache,
        position_ids=torch.arange(begin, begin + num_new)[None],
        attention_mask=torch.where(visible, 0.0, -torch.inf)[None, None],
    )
    states: torch.Tensor = found.last_hidden_state[0]
    return states


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 300])
@torch.no_grad()
def test_what_is_read(
    max_num_batched_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, positions and hidden states, of whole prompts in one step, and in chunks."""
    folder, kept, steps = tiny_llama(tmp_path, 4, 2), list[Read](), list[Sequence[Block]]()
    read = Reader.__call__

    def watched(reader: Reader, reconstruction: Reconstruction, metadata: Any) -> None:
        runner = reader.worker.model_runner
        steps.append(reconstruction.blocks)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "model", Watched(runner.model, reconstruction, kept))
            read(reader, reconstruction, metadata)

    monkeypatch.setattr(Reader, "__call__", watched)
    options = {"budget": 32, "score": "reconstruction"}
    settings: dict[str, Any] = {"block_size": PAGE, "max_model_len": LONGEST}
    settings |= {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 8}
    with engine(folder, "h2o2", options, **settings) as llm:
        probe = Probe(llm)
        generate(llm, PROMPTS, max_tokens=8)
    # Both readings of a step's tokens count.
    again = [sum(b.end - b.start for b in step) for step in steps]
    busy = [num for num in probe.num_scheduled if num > len(PROMPTS)]
    assert max(a + b for a, b in zip(again, busy, strict=True)) <= max_num_batched_tokens
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = dict.fromkeys(range(len(PROMPTS)), 0)
    for block, ids, positions, states in kept:
        index = int(block.request_id.split("-")[0])
        prompt, num_new = PROMPTS[index], block.end - block.start
        assert ids.tolist() == prompt[block.start : block.end]
        begin = min(block.end, POSITIONS - num_new)
        assert positions.tolist() == [*range(begin, begin + num_new)]
        torch.testing.assert_close(states, second_reading(model, prompt, block), atol=1e-4, rtol=0)
        tokens[index] += num_new
    assert list(tokens.values()) == [len(p) if len(p) > 32 else 0 for p in PROMPTS]


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 200])
def test_first_token_is_out_before_its_chunk_is_read_again(
    max_num_batched_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt in one step, and in chunks: nothing waits for the last one's second reading."""
    events: list[str] = []
    for kind, name in ((Reader, "__call__"), (Packing, "run")):
        run = vars(kind)[name]

        def noted(self: Any, *args: Any, run: Any = run, name: str = kind.__name__) -> None:
            events.append(name)
            run(self, *args)

        monkeypatch.setattr(kind, name, noted)
    options = {"budget": 32, "score": "reconstruction"}
    settings: dict[str, Any] = {"block_size": PAGE, "max_model_len": LONGEST, "max_num_seqs": 8}
    settings["max_num_batched_tokens"] = max_num_batched_tokens
    with engine(tiny_llama(tmp_path, 4, 2), "h2o2", options, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request("0", {"prompt_token_ids": PROMPTS[0]}, params)
        while llm.llm_engine.has_unfinished_requests():
            events += ["token"] * len(llm.llm_engine.step())
    assert events[-5:] == ["token", "Reader", "Packing", "token", "token"]
    chunks = len(PROMPTS[0]) // 96 + 1 if max_num_batched_tokens < 400 else 1
    assert events[:-5] == ["Reader"] * (chunks - 1)


def test_kept_tokens_do_not_depend_on_the_size_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end with a block that is read again, and ages are those at the prompt's end."""
    shrink_terms(monkeypatch, block=32)
    model, kept = tiny_llama(tmp_path, 4, 2), []
    options = {"budget": 64, "score": "reconstruction", "observation_window": 12, "split": "none"}
    for max_num_batched_tokens in (2048, 160):
        settings = {"block_size": PAGE, "max_model_len": LONGEST, "max_num_seqs": 8}
        settings["max_num_batched_tokens"] = max_num_batched_tokens
        oracle = follow(monkeypatch, model, "h2o2", options, PROMPTS, **settings)
        found = oracle.retained.items()
        kept.append({(layer, head, i.split("-")[0]): each for (layer, head, i), each in found})
    assert len(kept[0]) == 2 * 2 * len(PROMPTS) and kept[0] == kept[1]
