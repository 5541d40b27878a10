# SPDX-License-Identifier: Apache-2.0
"""Which weights a request is computed with, by loads and by files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from vllm_h2o.scheduler.weights import Identity, Weights


class Loads:
    """Weights, and how often others have replaced them."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.weights = Weights(lambda: self.count.update(["replaced"]))

    def now(self, path: Path, in_place: bool) -> Identity | None:
        """Of a request with an adapter."""
        return self.weights.of(request(LoRARequest("a", 1, str(path), load_inplace=in_place)))


def request(adapter: LoRARequest | None = None) -> Request:
    """A request with an adapter, or none."""
    return Request("r", [1], SamplingParams(max_tokens=1), None, lora_request=adapter)


def test_weights_of_the_model_change_with_calls_that_may_change_them() -> None:
    """What is known only to read does not."""
    loads = Loads()
    first = loads.weights.of(request())
    assert first is not None
    loads.weights.call("compute_weight_checksums")
    assert loads.weights.of(request()) == first and loads.weights.holds(first)
    loads.weights.call("reload_weights")
    assert loads.weights.of(request()) != first and not loads.weights.holds(first)
    assert loads.count["replaced"] == 1


def test_weights_of_an_adapter_follow_its_loads(tmp_path: Path) -> None:
    """By loads in place; by files, where each step reads them; unknown where they have changed."""
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"one")
    loads = Loads()
    first = loads.now(tmp_path, in_place=False)
    assert first is not None
    assert first == loads.now(tmp_path, in_place=False) == loads.now(tmp_path, in_place=True)
    file.write_bytes(b"another")
    assert loads.now(tmp_path, in_place=False) is None  # the workers may hold either
    assert loads.count["replaced"] == 0
    second = loads.now(tmp_path, in_place=True)
    assert loads.count["replaced"] == 1 and not loads.weights.holds(first)
    assert second not in (first, None) and second == loads.now(tmp_path, in_place=False)
    loads.weights.load(LoRARequest("a", 1, str(tmp_path)))  # not in place: they have it
    assert loads.now(tmp_path, in_place=False) == second
    loads.weights.load(LoRARequest("a", 1, str(tmp_path), load_inplace=True))
    third = loads.now(tmp_path, in_place=False)
    assert third not in (first, second, None) and loads.count["replaced"] == 2
    loads.weights.call(print)
    assert loads.now(tmp_path, in_place=False) not in (first, second, third, None)


def test_weights_of_an_adapter_elsewhere_are_known_until_it_is_read_anew() -> None:
    """Its files cannot be seen, so if each step reads them, they may have changed."""
    loads, elsewhere = Loads(), Path("/nowhere")
    assert loads.now(elsewhere, in_place=False) is not None
    assert loads.now(elsewhere, in_place=True) is None
