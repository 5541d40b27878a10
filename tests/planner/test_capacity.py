# SPDX-License-Identifier: Apache-2.0
"""The planner counts like engines: what they report, and what they then hold."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file

from tests.e2e.beside import tiny_granite4
from tests.e2e.harness import POOL_BYTES, Probe, engine, generate, tiny_gemma3, tiny_llama
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.planner.capacity import Row, Workload, plan, policy_row, stock_row
from vllm_h2o.planner.model import Model, load, other_pages
from vllm_h2o.scheduler import scheduler
from vllm_h2o.scheduler.footprint import CacheShape, row_bytes

WORK = Workload(max_model_len=512, prompt_len=512, block_size=32, max_num_batched_tokens=64)
SETTINGS: dict[str, Any] = {
    "block_size": WORK.block_size,
    "max_num_batched_tokens": WORK.max_num_batched_tokens,
}
LINE = (
    r"past its prompt a sequence holds (?:at most )?(\d+) tokens \((\d+) heavy, (\d+) recent, .*"
    r" = (\d+) pages of 32(?:, and evicts [^;]*)?; the pool of (\d+) pages holds (\d+) sequences "
    r"of max_model_len=512 at once, stock vLLM in the same memory (\d+)\."
)
SHAPES = {"gqa1": (4, 4), "gqa3": (6, 2), "gqa8": (8, 1)}
BUDGETS: dict[str, list[dict[str, Any]]] = {
    "gqa1": [{"budget": 100}],
    "gqa3": [{"budget": 0.07}, {"budget": 40, "eviction": "chunk"}],
    "gqa8": [{"budget": 0.5, "num_sink_tokens": 4}, {"budget": 100, "evict_every": "page"}],
}


@pytest.fixture(scope="module", params=SHAPES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, Model]:
    """The name of a shape, its folder, and the planner's model."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, *SHAPES[request.param])
    return request.param, str(folder), load(str(folder), "float32")


def blocks(llm: Any) -> int:
    """Return the pages of an engine's pool, with the null page."""
    return int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)


@pytest.mark.engine
def test_stock_row_agrees_with_an_engine(model: tuple[str, str, Model]) -> None:
    """Its pages, its concurrency, and the bytes of the weights."""
    _, folder, read = model
    row = stock_row(read.cache("auto"), POOL_BYTES, WORK)
    with engine(folder, **SETTINGS) as llm:
        assert blocks(llm) == row.pool.num_blocks
        assert llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency == row.concurrency
    # Of the file: on a CPU the engine's own are packed anew, and are parameters no more.
    weights = load_file(Path(folder) / "model.safetensors").values()
    assert sum(weight.nbytes for weight in weights) == read.parameter_bytes()


@pytest.mark.engine
def test_policy_row_agrees_with_the_scheduler(
    model: tuple[str, str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots, pages and sequences of the line that it logs."""
    name, folder, read = model
    shape = read.cache("auto")
    said: list[str] = []

    def info(text: str, *args: Any, **_: Any) -> None:
        said.append(text % args)

    monkeypatch.setattr(scheduler.logger, "info", info)
    for options in BUDGETS[name]:
        row = policy_row(shape, POOL_BYTES, WORK, KVPolicyConfig.from_options("h2o", options))
        said.clear()
        with engine(folder, "h2o", options, **SETTINGS) as llm:
            assert blocks(llm) == row.pool.num_blocks
        (line,) = filter(None, map(re.compile(LINE).search, said))
        capacity, _, _, pages, pool, sequences, stock = map(int, line.groups())
        assert (capacity, pages) == (row.slots, row.pages)
        assert (pool, sequences) == (row.pool.num_pages, row.sequences)
        # The line knows of whole pages alone, and not of the rest of the memory.
        used = row.pool.num_blocks * WORK.block_size * shape.slot_bytes()
        assert stock == stock_row(shape, used, WORK).sequences
        assert row.num_bytes == pages * llm_page_bytes(shape)


@pytest.mark.engine
def test_rows_with_sliding_windows_agree_with_engines(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three groups have sliding windows, with two layers each."""
    folder = tiny_gemma3(tmp_path_factory.mktemp("model"))
    read, said = load(folder, "float32"), []
    shape, work = read.cache("auto"), replace(WORK, in_flight=1)  # never two on a CPU
    assert (shape.num_layers, shape.windows, read.num_layers) == (2, (32, 32), 6)
    stock = stock_row(shape, POOL_BYTES, work)
    with engine(folder, **SETTINGS) as llm:
        assert blocks(llm) == stock.pool.num_blocks
        capacity = llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency
        assert capacity == stock.concurrency
    row = policy_row(shape, POOL_BYTES, work, KVPolicyConfig(budget=100))
    monkeypatch.setattr(scheduler.logger, "info", lambda text, *args, **_: said.append(text % args))
    with engine(folder, "h2o", {"budget": 100}, **SETTINGS) as llm:
        assert blocks(llm) == row.pool.num_blocks
    (line,) = filter(None, map(re.compile(LINE).search, said))
    slots, _, _, pages, pool, sequences, stocks = map(int, line.groups())
    assert (slots, pages, row.pages) == (row.slots, 4, 4 + 2 * 2)
    assert (pool, sequences) == (row.pool.num_pages, row.sequences)
    used = row.pool.num_blocks * WORK.block_size * shape.slot_bytes()
    assert stocks == stock_row(shape, used, work).sequences
    assert (
        "h2o: that is of 2 layers with full attention; the other 4 keep the tokens of their sliding"
        " windows, in up to 4 pages more of each sequence." in said
    )


@pytest.mark.engine
def test_rows_agree_with_a_hybrid_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that cover a state: fewer slots where each has a score, and one page a group."""
    folder = tiny_granite4(tmp_path)
    read, said = load(folder, "float32"), []
    shape, work = read.cache("auto"), replace(WORK, in_flight=1)
    assert (shape.num_layers, shape.num_states, read.num_layers) == (1, 3, 1)
    stock = stock_row(shape, POOL_BYTES, work)
    with engine(folder, **SETTINGS) as llm:
        assert blocks(llm) == stock.pool.num_blocks
        cache = llm.llm_engine.vllm_config.cache_config
        assert cache.effective_attention_block_size == stock.pool.block_size
        assert cache.kv_cache_max_concurrency == stock.concurrency
    row = policy_row(shape, POOL_BYTES, work, KVPolicyConfig(budget=100))
    monkeypatch.setattr(scheduler.logger, "info", lambda text, *args, **_: said.append(text % args))
    with engine(folder, "h2o", {"budget": 100}, **SETTINGS) as llm:
        assert blocks(llm) == row.pool.num_blocks
        manager = llm.llm_engine.engine_core.engine_core.scheduler.block_manager
        assert manager.block_size == row.pool.block_size
        assert other_pages(llm.llm_engine.vllm_config, 300) == 3
    assert (
        "h2o: that is of 1 layers with full attention; the other 3 keep a state, in up to 3 pages "
        "more of each sequence." in said
    )
    (line,) = [text for text in said if "sequences of max_model_len" in text]
    assert f"holds {row.sequences} sequences of max_model_len=512 at once" in line


PUBLISHED = {
    "Qwen3NextForCausalLM": (
        transformers.Qwen3NextConfig(
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            dtype="bfloat16",
        ),
        (13, 61),
    ),
    "GraniteMoeHybridForCausalLM": (
        transformers.GraniteMoeHybridConfig(
            hidden_size=4096,
            num_hidden_layers=40,
            layer_types=["attention" if n % 10 == 5 else "mamba" for n in range(40)],
            num_attention_heads=32,
            num_key_value_heads=8,
            mamba_n_heads=128,
            mamba_d_head=64,
            mamba_d_state=128,
            dtype="bfloat16",
        ),
        (19, 82),
    ),
    "NemotronHForCausalLM": (
        transformers.NemotronHConfig(
            hidden_size=2688,
            num_hidden_layers=52,
            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            num_attention_heads=32,
            num_key_value_heads=2,
            head_dim=128,
            mamba_num_heads=64,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            dtype="bfloat16",
        ),
        (49, 196),
    ),
    "Lfm2MoeForCausalLM": (
        transformers.Lfm2MoeConfig(
            hidden_size=2048,
            num_hidden_layers=24,
            layer_types=[
                "full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)
            ],
            num_attention_heads=32,
            num_key_value_heads=8,
            conv_L_cache=3,
            dtype="bfloat16",
        ),
        (26, 129),
    ),
}
"""Shapes of published hybrid models, and what docs/compatibility.md says fits into 40 GiB."""


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_hybrid_models(architecture: str, tmp_path: Path) -> None:
    """Sequences of 131,072 tokens in stock vLLM, and at 20 %."""
    config, fit = PUBLISHED[architecture]
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    read = load(str(tmp_path))
    read.refuse()
    work = Workload(1 << 17, 1 << 17, 16, 8192)
    shape, memory = read.cache("auto"), 40 << 30
    rows = stock_row(shape, memory, work), policy_row(shape, memory, work, KVPolicyConfig())
    assert tuple(row.sequences for row in rows) == fit


def llm_page_bytes(shape: CacheShape) -> int:
    """Return the bytes of 32 slots with K, V, score and position."""
    heads = shape.num_layers * shape.num_kv_heads
    return 32 * heads * (2 * shape.head_size * shape.element_size + 4 + 4)


@pytest.mark.engine
@pytest.mark.parametrize(("prompt_len", "most"), [(16, 5), (80, 32)])
def test_policy_row_agrees_with_requests_that_run(
    prompt_len: int, most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ten pages: five sequences of two, and three while prompts of five pages come in.

    Short prompts are let in before they have grown, by stock vLLM as well: so no more than five.
    """
    model = tiny_llama(tmp_path_factory.mktemp("model"), 4, 4)
    shape = load(model, "float32").cache("auto")
    memory = 11 * 16 * shape.slot_bytes()
    work = Workload(80 + 40, prompt_len, 16, 1024)
    row = policy_row(shape, memory, work, KVPolicyConfig(budget=32))
    assert (row.sequences, row.sequences_with_a_prompt) == (5, {16: 5, 80: 3}[prompt_len])
    settings = {"block_size": 16, "num_gpu_blocks_override": 11, "max_num_batched_tokens": 1024}
    settings |= {"max_model_len": work.max_model_len, "max_num_seqs": most}
    with engine(model, "h2o", {"budget": 32}, **settings) as llm:
        probe = Probe(llm)
        generate(llm, [list(range(1, prompt_len + 1))] * 8, max_tokens=40)
    assert probe.num_preemptions == 0
    assert max(map(len, probe.held)) == row.sequences_with_a_prompt


def test_rows_agree_with_counts_by_hand() -> None:
    """100 pages of 32; a longest sequence of 512 tokens."""
    shape = CacheShape(num_layers=2, num_kv_heads=3, head_size=8, element_size=2)
    assert (shape.stock_slot_bytes, shape.slot_bytes()) == (2 * 3 * 32, 2 * 3 * 40)
    memory = 100 * 32 * 240
    row = policy_row(shape, memory, WORK, KVPolicyConfig(budget=0.25))
    assert (row.pool.num_blocks, row.pool.num_pages) == (100, 99)
    assert (row.slots, row.pages, row.num_bytes) == (128, 4, 4 * 32 * 240)
    assert (row.sequences, row.prompt_pages, row.sequences_with_a_prompt) == (24, 16, 21)
    assert row.starts
    merging = policy_row(shape, memory, WORK, KVPolicyConfig(budget=0.25, merge=0.9))
    assert (merging.slot_bytes, merging.pool.num_blocks, merging.sequences) == (264, 90, 22)
    stock = stock_row(shape, memory, WORK)
    assert (stock.pool.num_blocks, stock.sequences, stock.concurrency) == (125, 7, 125 / 16)
    chunked = KVPolicyConfig(budget=0.25, eviction="chunk")
    assert policy_row(shape, memory, WORK, chunked).prompt_pages == 6  # 127 + 64 tokens


def test_policy_row_with_evict_every_has_more_slots() -> None:
    """They come on top of the budget."""
    memory = 100 * 32 * 240
    config = KVPolicyConfig(budget=0.25, evict_every=34)
    row = policy_row(CacheShape(2, 3, 8, 2), memory, WORK, config)
    assert (row.slots, row.pages, row.sequences) == (128 + 33, 6, 16)
    chunked = KVPolicyConfig(budget=0.25, evict_every=130, eviction="chunk")
    assert policy_row(CacheShape(2, 3, 8, 2), memory, WORK, chunked).prompt_slots == 128 + 129


def test_policy_row_by_page_holds_the_budget() -> None:
    """The pages that the next tokens fill are part of it; a chunk may leave a page half full."""
    shape, memory = CacheShape(2, 3, 8, 2), 100 * 32 * 240
    row = policy_row(shape, memory, WORK, KVPolicyConfig(budget=0.25, evict_every="page"))
    assert (row.slots, row.pages, row.sequences) == (128, 4, 24)
    chunked = KVPolicyConfig(budget=0.25, evict_every="page", eviction="chunk")
    assert policy_row(shape, memory, WORK, chunked).prompt_slots == 96 + 31 + 64


def test_rows_with_too_small_a_pool_do_not_start() -> None:
    """No longest sequence fits."""
    shape = CacheShape(2, 3, 8, 2)
    rows: list[Row] = [
        stock_row(shape, 15 * 32 * 192, WORK),
        policy_row(shape, 15 * 32 * 240, WORK, KVPolicyConfig(budget=0.25)),
    ]
    assert [row.starts for row in rows] == [False, False]
    assert [row.sequences for row in rows] == [0, 3]
    assert [row.sequences_with_a_prompt for row in rows] == [0, 0]


def test_policy_row_by_prompt_takes_the_longest() -> None:
    """A fraction of the prompt."""
    config = KVPolicyConfig(budget=0.5, budget_basis="prompt")
    work = Workload(max_model_len=512, prompt_len=128, block_size=16, max_num_batched_tokens=64)
    row = policy_row(CacheShape(2, 3, 8, 2), POOL_BYTES, work, config)
    assert row.slots == 64
    assert row.label == "h2o 50 %"


def test_policy_row_of_full_keeps_every_token() -> None:
    """In pages with scores."""
    row = policy_row(CacheShape(2, 3, 8, 2), POOL_BYTES, WORK, KVPolicyConfig(name="full"))
    assert (row.label, row.slots, row.pages) == ("full", 512, 16)


def test_plan_with_pressure_has_both_ends() -> None:
    """Sequences with every token, and sequences at their budgets."""
    shape = CacheShape(num_layers=2, num_kv_heads=3, head_size=8, element_size=2)
    configs = [KVPolicyConfig(budget=budget, eviction="pressure") for budget in (0.25, 0.5)]
    rows = plan(shape, 100 * 32 * 240, WORK, configs)
    assert [row.label for row in rows] == ["stock vLLM", "h2o, all kept", "h2o 25 %", "h2o 50 %"]
    assert [row.sequences for row in rows] == [7, 6, 24, 12]


def test_row_bytes_agree_with_counts_by_hand() -> None:
    """Ids and flags of tokens, and ids of pages on host and device."""
    assert row_bytes(1, 4_194_304, 16) >> 20 == 22
    assert row_bytes(32, 2048, 16) == 32 * (2048 * 4 + 2048 + 2 * 128 * 4)
