# SPDX-License-Identifier: Apache-2.0
"""What attention allocates vLLM's profile run meets, and a longer prompt does not make it more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from tests.kernels.harness import LAYER_NAME, Shape, vllm_config
from tests.tiny_models import engine_config, folder
from vllm_h2o.kernels.programs import left_bytes, most_programs
from vllm_h2o.kernels.triton import moving
from vllm_h2o.kernels.triton.kernels import PROCESSORS, TritonKernels
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy.h2o import H2O
from vllm_h2o.policy.h2o2 import COMBINED
from vllm_h2o.worker import peak
from vllm_h2o.worker.attention import HeavyHitterImpl
from vllm_h2o.worker.peak import Peak
from vllm_h2o.worker.step import PublishesSteps

SHAPE = Shape(num_kv_heads=2, group=3)
LAYER: Any = SimpleNamespace(layer_name=LAYER_NAME)


class Counts(TorchDispatchMode):
    """Bytes of each tensor that is made with a storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, and count what is new."""
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if torch.is_tensor(t)}
        for tensor in tree_leaves(made):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.sizes.append(tensor.untyped_storage().nbytes())
        return made


def attention() -> HeavyHitterImpl:
    """One layer's."""
    with set_current_vllm_config(vllm_config("h2o")):
        return HeavyHitterImpl(6, SHAPE.head_size, SHAPE.scale, SHAPE.num_kv_heads)


def test_a_profile_run_meets_the_peak() -> None:
    """Each layer's share of a step is held until vLLM has measured; the rest is dropped at once.

    Outside of it, as where vLLM warms up or captures, nothing is allocated.
    """
    impl = attention()
    impl.peak = Peak(max_len=1000, max_tokens=65536, rotates=True)
    query = torch.zeros(4, 6, SHAPE.head_size)
    output = torch.empty_like(query)
    args = (LAYER, query, query[:, :2], query[:, :2], torch.empty(0), None, output)
    found: dict[str, Any] = {}

    class Profiles:
        def determine_available_memory(self) -> int:
            for _ in range(2):  # a second pass over the layers needs no second share
                impl.forward(*args)
            found["kept"] = dict(peak._KEPT.get() or {})
            return 7

    class Worker(PublishesSteps, Profiles):
        pass

    with Counts() as counts:
        assert Worker().determine_available_memory() == 7
    queries = 6 * 65536 * SHAPE.head_size
    passing = queries * 4 + 2 * 4 * 6 * 65536
    assert [size for size in counts.sizes if size] == [4 * 2 * 1000, passing]
    assert {name: held.nbytes for name, held in found["kept"].items()} == {LAYER_NAME: 8000}
    assert peak._KEPT.get() is None
    with Counts() as counts:
        impl.forward(*args)
    assert counts.sizes == []


@pytest.mark.parametrize(
    ("rotates", "caches", "expected", "splits_layers"),
    [
        (False, True, (4096, False), False),
        (False, False, (0, False), False),
        (True, False, (0, True), False),
        (True, False, (0, True), True),
    ],
)
def test_of_an_engine(
    rotates: bool, caches: bool, expected: tuple[int, bool], splits_layers: bool
) -> None:
    """Scores lie outside pages with prefix caching alone; a second pass rotates queries."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096, get_num_layers=lambda parallel: parallel),
        parallel_config=30,
        cache_config=SimpleNamespace(
            enable_prefix_caching=caches, block_size=16, effective_attention_block_size=None
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
    )
    policy: Any = SimpleNamespace(
        kernels="auto",
        splits=rotates,
        splits_layers=splits_layers,
        max_budget=0.25,
        resolve=lambda longest, block_size, asked: SimpleNamespace(capacity=int(longest * asked)),
        ranking=COMBINED if rotates else H2O.ranking,
    )
    found = Peak.of(config, policy)
    assert (found.max_len, found.rotates, found.max_tokens) == (*expected, 512)
    assert found.passing(6, 2, 64, 2) >= peak.SURVIVORS == 4 * moving.MAX_SURVIVORS
    # K, V and three words of a layer's survivors, where heads share slots, or of all layers'.
    assert found.shared_len == (1024 if rotates else 0) * (30 if splits_layers else 1)
    more = replace(found, shared_len=4096 * 64).passing(6, 2, 64, 2)
    assert more == peak.SURVIVORS + 4096 * 64 * 2 * (2 * 64 * 2 + 12)


def test_of_a_second_reading() -> None:
    """Nothing rotates; torch's attention holds logits, as many as it may at once."""
    found = Peak(max_len=0, max_tokens=2048, rotates=False, reads_again=True)
    queries = 32 * 2048 * 128 * 2
    assert found.passing(32, 8, 128, 2) == 4 * 32 * 2048 + peak.READING + queries


@pytest.mark.parametrize(("asked", "slots"), [(None, 256), (64, 64), (0.5, 128)])
def test_the_largest_budget(tmp_path: Path, asked: int | float | None, slots: int) -> None:
    """Survivors of one layer move by way of a copy: of a request that asks for the most."""
    options = {"budget": 0.1, "max_budget": asked, "split": "heads"}
    config = engine_config(
        folder(tmp_path, "LlamaForCausalLM"),
        kv_policy="h2o2",
        kv_policy_config=options,
        max_model_len=256,
        block_size=16,
    )
    found = Peak.of(config, KVPolicyConfig.required(config))
    assert (found.shared_len, found.rotates, found.reads_again) == (slots, True, False)


def test_pages_that_vllm_enlarges_are_those_that_count(tmp_path: Path) -> None:
    """Beside states a page grows once the layers are made, and a budget is whole pages."""
    config = engine_config(
        folder(tmp_path, "LlamaForCausalLM"),
        kv_policy="h2o2",
        kv_policy_config={"budget": 0.1, "split": "heads"},
        max_model_len=256,
        block_size=16,
    )
    with set_current_vllm_config(config):
        impl = HeavyHitterImpl(6, SHAPE.head_size, SHAPE.scale, SHAPE.num_kv_heads)
    config.cache_config.block_size = 512
    assert impl.peak.shared_len == 512


def test_programs_leave_what_is_counted() -> None:
    """As many bytes as the kernels allocate, but for one number of each request and KV head."""
    kernels = TritonKernels(torch.device("cpu"), 8, 6, 2, 64)
    buffers = (
        kernels._partial_out, kernels._partial_max_sum, kernels._nearest, *kernels._candidates[:2]
    )  # fmt: skip
    allocated = sum(buffer.nbytes for buffer in buffers)
    assert allocated == left_bytes(most_programs(PROCESSORS, 8, 2), 3, 64)


LEFT = 10**9 - 4 * (792 + 8 * 2) * (3 * 66 + 5) - 4 * 8 * 250 - (16 << 20)
"""Bytes that remain next to what programs and rows have."""


@pytest.mark.parametrize(
    ("cuda", "options", "expected"),
    [
        (True, {"score": "reconstruction"}, LEFT * 16 * 520 // (16 * (520 + 4 * 3) + 4)),
        (True, {}, LEFT * 16 * 520 * 5 // (16 * (520 * 5 + 4 * 3) + 4 * 5)),
        (False, {"score": "reconstruction"}, 10**9),
    ],
)
def test_what_lies_next_to_pages(
    cuda: bool, options: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of three query heads a KV head, in one of five layers; a victim a page; what programs
    of a step leave; own pages of 8 rows; on a GPU alone.
    """
    heads = {
        "get_num_attention_heads": lambda _: 6,
        "get_num_kv_heads": lambda _: 2,
        "get_head_size": lambda: 64,
        "max_model_len": 4000,
    }
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**heads),
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        cache_config=SimpleNamespace(
            block_size=16, effective_attention_block_size=None, enable_prefix_caching=True
        ),
        additional_config={"kv_policy": {"name": "h2o2", **options}},
    )
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    assert peak.for_pages(10**9, config, 520, num_layers=5) == expected


def test_what_xformers_takes() -> None:
    """K and V in order, and V as it lies; where queries are more than that, two outputs."""
    own = Peak(max_len=0, max_tokens=8192, rotates=False, gathered_len=8192)
    lse, output = 4 * 32 * 8192, 8192 * 32 * 128 * 2
    assert own.passing(32, 8, 128, 2) == lse + 2 * (8192 * 8 * 128 * 2) + 2 * output
    longer = replace(own, gathered_len=1 << 17)
    assert longer.passing(32, 8, 128, 2) == lse + 3 * ((1 << 17) * 8 * 128 * 2)
