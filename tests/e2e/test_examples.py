# SPDX-License-Identifier: Apache-2.0
"""The files in examples/, run as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams

from benchmarks.smollm2 import model_dir
from benchmarks.soak.server import ENVIRONMENT, ROOT, write_model
from tests.e2e.harness import engine
from tests.e2e.server import EXAMPLE, TIMEOUT, Block, Completing, blocks, run

SERVED = blocks(EXAMPLE)[1:]


def test_offline_example_prints_both_budgets(tmp_path: Path) -> None:
    """It prints the text of both budgets; another model stands for the user's."""
    write_model(tmp_path, 512)
    prompt = "The old sailor told us about the storm. " * 9
    done = subprocess.run(
        [sys.executable, "examples/offline.py", str(tmp_path), "--prompt", prompt,
         "--max-model-len=512", "--enforce-eager"],
        env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, cwd=ROOT,
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "h2o: past its prompt a sequence holds 128 tokens" in done.stdout + done.stderr
    said = re.findall(r"^kv_budget=(.+?): (.+)$", done.stdout, re.MULTILINE)
    assert [budget for budget, _ in said] == ["0.2", "full"]
    assert said[0][1] != said[1][1]


def test_stream_example_passes_the_trained_length(tmp_path: Path) -> None:
    """A text of three times as many tokens as there are positions, a line for each part."""
    write_model(tmp_path, 512)
    text = tmp_path / "text"
    text.write_text("The old sailor told us about the storm.\n" * 20, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "examples.stream", str(text), "--model", str(tmp_path),
         "--cache", "64", "--chunk", "64", "--limit", "256", "--part", "200"],
        env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, cwd=ROOT,
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.findall(r"^token (\d+): ([\d.]+) nats per token$", done.stdout, re.MULTILINE)
    tokens, nats = zip(*said, strict=True)
    assert [*map(int, tokens)] == [200, 400, 600, 799]
    assert all(0 < float(cost) < 20 for cost in nats)


@pytest.mark.parametrize(("policy", "answer"), [("h2o", "7."), ("h2o2", "7264.")])
def test_metrics_page_answer_is_the_models(policy: str, answer: str) -> None:
    """What docs/metrics.md says of the answer, on the real model."""
    model = str(model_dir("float32", progress=False))
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = (ROOT / "examples" / "lamp_room.txt").read_text(encoding="utf-8")
    prompt = {"prompt_token_ids": tokenizer(text)["input_ids"]}
    with engine(model, policy, {"budget": 160}, block_size=16, max_model_len=800) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        (output,) = llm.generate([prompt], greedy, use_tqdm=False)
    assert tokenizer.decode(output.outputs[0].token_ids).split()[0] == answer


@pytest.mark.parametrize("block", SERVED, ids=[f"{n}-{b.language}" for n, b in enumerate(SERVED)])
def test_serve_example_commands_work(server: Completing, block: Block) -> None:
    """Each command works on the server that the first one starts."""
    said = run(block, server)
    if "/v1/completions" in block.code:
        assert json.loads(said)["choices"][0]["text"]
    elif "/metrics" in block.code:
        assert "vllm:kv_policy_evicted_tokens_total" in said
    elif "BadRequestError" in block.code:
        sentences = r"kv-policy: .*kv_budget=1\.5.* is not supported: .*\. .*\."
        assert re.fullmatch(sentences, said.strip())
    else:
        assert said.strip()


def test_serve_has_all_kinds_of_commands() -> None:
    """No command is passed over."""
    assert [block.language for block in SERVED] == ["bash", "bash", "bash", "python", "python"]
