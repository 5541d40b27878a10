# SPDX-License-Identifier: Apache-2.0
"""The front end's side: a report in Prometheus and in the log."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import prometheus_client.values
import pytest
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import get_prometheus_registry, unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.house_rules import ROOT
from tests.tiny_models import engine_config, folder
from vllm_h2o.metrics import COUNTERS, GAUGES, PolicyStatLogger
from vllm_h2o.wire import PolicyStats

REPORT = PolicyStats(
    evicted_tokens=29,
    packs=1,
    pages_freed_early=7,
    pressure_packs=3,
    pressure_evicted_tokens=11,
    requests_at_capacity=2,
    resident_tokens=24,
    logical_tokens=90,
    saved_bytes=3 * 2**20,
    continuation_queries=500,
    continuation_hits=400,
    continuation_misses=3,
    continuation_host_hits=200,
    continuation_host_saves=2,
    continuation_host_drops=1,
    continuation_host_bytes=2**20,
    continuation_folder_hits=50,
    continuation_folder_saves=6,
    continuation_folder_drops=5,
)
POLICY = {"kv_policy": {"name": "h2o", "budget": 12}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model's folder."""
    return folder(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def with_policy(model: str) -> VllmConfig:
    """A real config with the policy on; making it applies the front end's patch."""
    return engine_config(model, served_model_name="tiny", additional_config=POLICY)


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Prometheus as it was."""
    yield
    unregister_vllm_metrics()


def scheduler_stats(report: PolicyStats | None = REPORT) -> SchedulerStats:
    """Statistics as they arrive in the front end, through vLLM's own encoding."""
    stats = SchedulerStats(num_running_reqs=3)
    if report is not None:
        report.put_into(stats.running_lora_adapters)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    received: SchedulerStats = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    return received


def shown(field: str, engine: int = 0, suffix: str = "") -> float | None:
    """The value of a metric in Prometheus' registry."""
    labels = {"model_name": "tiny", "engine": str(engine)}
    return REGISTRY.get_sample_value(f"vllm:kv_policy_{field}{suffix}", labels)


def test_metrics_show_every_number(with_policy: VllmConfig) -> None:
    """Counters add up, gauges follow, each engine for itself; vLLM's own go on."""
    assert {field.name for field in fields(PolicyStats)} == COUNTERS.keys() | GAUGES.keys()
    manager = StatLoggerManager(with_policy, engine_idxs=[0, 1])
    assert shown("evicted_tokens", 1, "_total") == 0
    for engine in (0, 1, 1):
        stats = scheduler_stats()
        manager.record(stats, None, engine_idx=engine)
    for field in COUNTERS:
        value = getattr(REPORT, field)
        assert (shown(field, 0, "_total"), shown(field, 1, "_total")) == (value, 2 * value)
    for field in GAUGES:
        value = getattr(REPORT, field)
        assert (shown(field, 0), shown(field, 1)) == (value, value)
    labels = {"model_name": "tiny", "engine": "1"}
    assert REGISTRY.get_sample_value("vllm:num_requests_running", labels) == 3
    assert stats.running_lora_adapters == {}


def test_reports_without_numbers_are_passed_over(with_policy: VllmConfig) -> None:
    """Steps without a schedule report nothing, and change nothing."""
    manager = StatLoggerManager(with_policy)
    manager.record(scheduler_stats(), None)
    manager.record(scheduler_stats(None), None)
    manager.record(None, None)
    assert shown("resident_tokens") == REPORT.resident_tokens


def test_metrics_of_a_second_engine_start_at_zero(with_policy: VllmConfig) -> None:
    """Metrics of the first are unregistered by vLLM, ours among them."""
    StatLoggerManager(with_policy).record(scheduler_stats(), None)
    StatLoggerManager(with_policy)
    assert shown("evicted_tokens", suffix="_total") == 0


def test_metrics_without_a_policy_add_nothing(model: str, with_policy: VllmConfig) -> None:
    """Not even when an engine with one was there before: its metrics go, and none come."""
    StatLoggerManager(with_policy)
    loggers = StatLoggerManager(engine_config(model)).stat_loggers
    assert not any(isinstance(logger, PolicyStatLogger) for logger in loggers)
    assert shown("resident_tokens") is None


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of the log."""
    said: list[str] = []
    logger = logging.getLogger("vllm.kv_policy")
    monkeypatch.setattr(logger, "info", lambda message, *args: said.append(message % args))
    return said


def test_log_has_one_line_of_the_policy(with_policy: VllmConfig, lines: list[str]) -> None:
    """For each engine that has reported since the last one."""
    logger = PolicyStatLogger(with_policy, [0, 1])
    for _ in range(2):
        logger.record(scheduler_stats(), None, engine_idx=1)
    logger.log()
    logger.log()
    assert lines == [
        "Engine 001: KV policy h2o: 2 requests at capacity, 24 of 90 tokens resident, "
        "58 evicted, 14 pages freed early, 3.0 MiB saved"
    ]


def test_log_without_a_line_of_vllm_has_none(
    with_policy: VllmConfig, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several API servers sees a part of the reports."""
    monkeypatch.setattr(with_policy.parallel_config, "_api_process_count", 2)
    logger = PolicyStatLogger(with_policy, [0])
    logger.record(scheduler_stats(), None)
    logger.log()
    assert lines == []


def test_metrics_of_several_api_servers_add_up(
    with_policy: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a part of the reports: counters are summed, and the last gauge holds."""
    process = {"id": 0}
    shared = prometheus_client.values.MultiProcessValue(lambda: process["id"])
    monkeypatch.setattr(prometheus_client.values, "ValueClass", shared)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for process["id"], resident in ((1, 10), (2, 20)):
        unregister_vllm_metrics()
        logger = PolicyStatLogger(with_policy, [0])
        logger.record(scheduler_stats(replace(REPORT, resident_tokens=resident)), None)
    served = prometheus_client.generate_latest(get_prometheus_registry()).decode()
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:kv_policy_evicted_tokens_total{labels} 58.0" in served
    assert f"vllm:kv_policy_resident_tokens{labels} 20.0" in served


def dashboard() -> dict[str, Any]:
    """The dashboard of this repository."""
    board: dict[str, Any] = json.loads((ROOT / "dashboards/kv-policy.json").read_text())
    return board


def test_dashboard_panels_have_places_of_their_own() -> None:
    """Each has a number of its own, a query and a place that no other panel covers."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["targets"] and all(target["expr"] for target in panel["targets"])
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells
        taken |= cells


def test_dashboard_shows_every_number(with_policy: VllmConfig) -> None:
    """It queries nothing else: counters by ``_total``, under vLLM's own labels."""
    StatLoggerManager(with_policy)
    text = json.dumps(dashboard())
    exist = {sample.name for metric in REGISTRY.collect() for sample in metric.samples}
    queried = set(re.findall(r"vllm:\w+", text))
    assert queried <= exist, queried - exist
    ours = {f"vllm:kv_policy_{name}_total" for name in COUNTERS}
    assert ours | {f"vllm:kv_policy_{name}" for name in GAUGES} <= queried
    labels = set(re.findall(r'[{,]\s*(\w+)=~?\\"', text))
    assert labels == {"model_name", "engine"}
