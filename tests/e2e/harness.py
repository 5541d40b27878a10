# SPDX-License-Identifier: Apache-2.0
"""Real engines in this process, and what can be read from inside them."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import load_file, save_file
from transformers import Cohere2Config, Gemma3TextConfig, GptOssConfig, LlamaConfig, OPTConfig
from vllm import LLM, RequestOutput, SamplingParams

from benchmarks.quality.forced import in_process
from benchmarks.smollm2 import model_dir
from benchmarks.throughput.models import write_random
from tests.tiny_models import two_layer_opt
from vllm_h2o.policy import Ranking, Rule, policies, shelf

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
CHARACTERS = [ord(c) % 256 for c in TEXT]
"""Token ids for a vocabulary of 256."""
POOL_BYTES = 1 << 27
"""Of an engine's pages, where a test says nothing of them."""


def smollm2() -> str:
    """The real small model in float32."""
    return str(model_dir("float32", progress=False))


def needs_float8_of_vllm() -> None:
    """Skip a test where vLLM's own attention has no float8 cache; the policy's has one anywhere."""
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM's own float8 cache needs AVX-512 or AMX")


def tiny_llama(folder: Path, num_heads: int, num_kv_heads: int, max_len: int = 512) -> str:
    """A Llama of random weights with a head size that the CPU kernels take."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32 * num_heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_len,
    )
    return write_random(config, folder)


def unlike_heads(folder: Path, num_kv_heads: int) -> str:
    """A Llama's folder: its KV heads' queries become sharper from head to head."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if "q_proj" in name:
            each = weight.unflatten(0, (num_kv_heads, -1))
            each *= torch.linspace(0.1, 1.5, num_kv_heads)[:, None, None]
    save_file(weights, path, {"format": "pt"})
    return str(folder)


def tiny_opt(folder: Path) -> str:
    """An OPT of random weights: learned positions, ReLU, every head its own K and V."""
    return write_random(two_layer_opt(512, 256), folder)


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 32,
}


def tiny_gemma3(folder: Path, **options: Any) -> str:
    """A Gemma 3 of random weights: of three groups of two layers two slide over 32 tokens."""
    kinds = options.get("layer_types") or [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING]
    own = {"head_dim": 32, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    own["tie_word_embeddings"] = False  # else it says one word again and again
    return write_random(Gemma3TextConfig(**{**WINDOWED, **own, **options}), folder)


def tiny_cohere2(folder: Path) -> str:
    """A Cohere 2 of random weights: three layers slide, the fourth knows no positions."""
    return write_random(Cohere2Config(**WINDOWED, num_hidden_layers=4), folder)


def tiny_gpt_oss(folder: Path) -> str:
    """A gpt-oss of random weights: every other layer slides; sinks that take much, and little."""
    own = {"head_dim": 32, "num_hidden_layers": 2, "num_local_experts": 4}
    write_random(GptOssConfig(**WINDOWED, **own, num_experts_per_tok=2), folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith("sinks"):
            weight.copy_(torch.linspace(3.0, -1.0, len(weight)))
    save_file(weights, path, {"format": "pt"})
    return str(folder)


def opt_125m(folder: Path) -> str:
    """An OPT of random weights in the shape of the published OPT-125M."""
    return write_random(OPTConfig(max_position_embeddings=2048), folder, std=0.02)


def arguments(
    model: str, policy: str | None = None, options: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Of a small engine; stock vLLM without a policy."""
    settings: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "block_size": 32,
        "seed": 0,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        **kwargs,
    }
    if policy is not None:
        settings |= {"kv_policy": policy, "kv_policy_config": options}
    return settings


@contextmanager
def engine(*args: Any, **kwargs: Any) -> Iterator[LLM]:
    """An engine in this process, of these :func:`arguments`, with a pool that is zeroed soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # whole GiB, and it goes before
        for name in ("freeze", "unfreeze"):  # what conftest.py does after tests
            patch.setattr(gc, name, lambda: None)
        settings = {"kv_cache_memory_bytes": POOL_BYTES, **arguments(*args, **kwargs)}
        is_later = not vllm.__version__.startswith("0.32")
        if is_later and str(settings.get("kv_cache_dtype")).startswith("fp8"):
            needs_float8_of_vllm()  # it asks its own attention, whatever backend is selected
        with in_process(**settings) as llm:
            yield llm


def worker_of(llm: LLM) -> Any:
    """The worker of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, **params: Any
) -> list[RequestOutput]:
    """Greedy unless told otherwise, and to the last token."""
    sampling = SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
        | params
    )
    return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The generated tokens of each request."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def shrink_terms(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    """Give `h2o2` terms of other sizes: where a term has a block or a lifetime, another one."""

    def shrunk(rule: Rule) -> Rule:
        each = [
            replace(term, **{name: n for name, n in changes.items() if getattr(term, name)})
            for term in rule.ranking.terms
        ]
        return replace(rule, ranking=Ranking(*each))

    own = policies()["h2o2"]
    scores = {name: shrunk(rule) for name, rule in own.scores.items()}
    changed = replace(shrunk(own), scores=scores)
    monkeypatch.setitem(shelf._SHELF, "h2o2", changed)


@dataclass
class Probe:
    """Reads pages after every step of an engine, and has its invariants checked."""

    llm: LLM
    held: list[dict[str, int]] = field(default_factory=list)
    resident: list[dict[str, int]] = field(default_factory=list)
    num_preemptions: int = 0
    num_scheduled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def checked_schedule(*args: Any, **kwargs: Any) -> Any:
            running = {r.request_id for r in self.scheduler.running}
            output = schedule(*args, **kwargs)
            self.num_preemptions += len(running - {r.request_id for r in self.scheduler.running})
            self.scheduler.check_integrity()
            self.num_scheduled.append(output.total_num_scheduled_tokens)
            manager = self.scheduler.block_manager
            self.held.append({i: len(b) for i, b in manager.req_to_blocks.items()})
            states = manager.ledger.states.items()
            self.resident.append({i: r.resident_len for i, r in states})
            return output

        def checked_update(*args: Any, **kwargs: Any) -> Any:
            output = update(*args, **kwargs)
            self.scheduler.check_integrity()
            return output

        self.scheduler.schedule = checked_schedule
        self.scheduler.update_from_output = checked_update

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def num_free(self) -> int:
        """Free pages now."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def num_total(self) -> int:
        """Pages of the pool, less the null page."""
        return self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1


def preempt_all_once(probe: Probe, patch: pytest.MonkeyPatch, at: int) -> None:
    """Preempt every running request before step ``at``, as vLLM does for new weights."""
    scheduler, steps = probe.scheduler, itertools.count()
    schedule = scheduler.schedule

    def preempting(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == at:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args, **kwargs)

    patch.setattr(scheduler, "schedule", preempting)


def mixed_prompts(tokens: list[int], count: int, longest: int) -> list[list[int]]:
    """Pieces of a text, from one token to ``longest``."""
    rng = random.Random(0)
    lengths = [1, 2, 31, 32, 33, 64, longest]
    lengths += [rng.randint(1, longest) for _ in range(count - len(lengths))]
    starts = [rng.randrange(len(tokens) - longest) for _ in lengths]
    return [tokens[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def run(model: str, prompts: list[list[int]], policy: str | None, **kwargs: Any) -> Any:
    """The outputs of one engine, with the top two log-probabilities at each token."""
    options, max_tokens = kwargs.pop("options", None), kwargs.pop("max_tokens", 24)
    with engine(model, policy, options, **kwargs) as llm:
        probe = Probe(llm) if policy else None
        outputs = generate(llm, prompts, max_tokens, logprobs=2)
        if probe:
            assert probe.num_free == probe.num_total
        return outputs


NEAR_TIE = 1e-4


def assert_same_tokens(
    stock: list[RequestOutput],
    ours: list[RequestOutput],
    first: int | None = None,
    near_tie: float = NEAR_TIE,
) -> int:
    """Equal, token by token; a difference is excused only at a near tie of stock's own top two.

    Args:
        stock: what is right.
        ours: what is compared.
        first: of ours, only so many tokens of each request; None: all.
        near_tie: of log-probabilities, in nats.

    Returns:
        How many requests are excused.

    """
    excused = 0
    theirs, mine = token_ids(stock), [tokens[:first] for tokens in token_ids(ours)]
    assert list(map(len, theirs)) == list(map(len, mine))
    for request, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        different = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        if not different:
            continue
        top = sorted(p.logprob for p in stock[request].outputs[0].logprobs[different[0]].values())
        assert top[-1] - top[-2] < near_tie, (request, different[0], top[-2:])
        excused += 1
    return excused
