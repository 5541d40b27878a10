# SPDX-License-Identifier: Apache-2.0
"""As users run it: ``vllm serve`` and ``vllm bench`` with the engine in processes of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.server import ENVIRONMENT, ROOT, VLLM, Server
from tests.e2e.harness import TEXT, smollm2
from tests.e2e.server import ENGINE, Completing

TIMEOUT = 300


def test_it_says_what_the_budget_means(server: Completing) -> None:
    """One line at start: capacity, heavy, recent, pages, and sequences against stock vLLM."""
    meaning = re.search(
        r"h2o: past its prompt a sequence holds 64 tokens \(31 heavy, 32 recent, 0 sinks, "
        r"1 for the incoming token\) = 4 pages of 16; the pool of (\d+) pages holds (\d+) "
        r"sequences of max_model_len=512 at once, stock vLLM in the same memory (\d+)\.",
        server.log.read_text(),
    )
    assert meaning is not None
    pages, ours, stock = map(int, meaning.groups())
    assert ours == pages // 4
    assert stock <= ours / 7


def test_server_completes_a_long_prompt_and_answer(server: Completing) -> None:
    """A long prompt and a long answer, several times the budget."""
    prompt = "The old sailor told us about the storm. " * 20
    status, answer = server.complete(prompt=prompt, max_tokens=100, ignore_eos=True)
    assert status == 200, answer
    assert answer["usage"] == {
        "prompt_tokens": 181,
        "completion_tokens": 100,
        "total_tokens": 281,
    } | {key: value for key, value in answer["usage"].items() if key.endswith("details")}
    again = server.complete(prompt=prompt, max_tokens=100, ignore_eos=True)[1]
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x " * 600, "max_tokens": 5},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "max_tokens": 100000},
        {"prompt": [10**9], "max_tokens": 5},
        {"prompt": "x", "max_tokens": 5, "temperature": -2},
        {"prompt": "x", "max_tokens": 5, "vllm_xargs": {"kv_budget": 0}},
    ],
    ids=["long prompt", "negative", "too many tokens", "no such token", "temperature", "budget"],
)
def test_bad_requests_are_refused_and_harm_nobody(server: Completing, body: dict[str, Any]) -> None:
    """The client gets a 400; the server answers the next request."""
    status, answer = server.complete(**body)
    assert status == 400, answer
    assert server.complete(prompt="Hello", max_tokens=3)[0] == 200


def test_a_request_with_a_budget_of_its_own(server: Completing) -> None:
    """``full`` is taken; what cannot be used is refused in four parts while others run."""
    prompt = TEXT[2000:3300]  # what it says is said once: evicted from, it goes on differently
    bodies: list[dict[str, Any]] = [{"vllm_xargs": {"kv_budget": "full"}}, {}]
    asked = (
        {"kv_budget": 1.5}, {"kv_budget": "half"}, {"kv_budget": 1}, {"kv_budget": True},
        {"kv-budget": 64}, {"kv_bugdet": 64}, {"budget": 64}, {"kv_policy_config.budget": 64},
    )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        running = [
            pool.submit(server.complete, prompt=prompt, max_tokens=60, ignore_eos=True, **body)
            for body in bodies
        ]
        for xargs in asked:
            status, answer = server.complete(prompt=prompt, max_tokens=5, vllm_xargs=xargs)
            assert status == 400, answer
            said = answer["error"]["message"]
            assert re.fullmatch(r"kv-policy: .* is not supported: .*\. .*\. .*\.", said)
            ((key, value),) = xargs.items()
            assert f" {key}={int(value) if value is True else value!r} is not" in said or (
                f" {key!r} in a request is not" in said
            )
        whole, evicted = (future.result() for future in running)
    assert whole[0] == evicted[0] == 200
    assert whole[1]["choices"][0]["text"] != evicted[1]["choices"][0]["text"]


def test_every_sampling_feature_runs_past_the_budget(server: Completing) -> None:
    """Parallel samples, log-probabilities, penalties, a stream that is left half-way."""
    prompt = "One day a fox met a crow. " * 15
    status, answer = server.complete(
        prompt=prompt, max_tokens=40, n=3, temperature=0.8, seed=1, logprobs=2, echo=True,
        presence_penalty=0.5, ignore_eos=True,
    )  # fmt: skip
    assert status == 200, answer
    assert len(answer["choices"]) == 3
    pattern = {"structured_outputs": {"regex": "(ab){50}"}}
    status, answer = server.complete(prompt=prompt, max_tokens=110, **pattern)
    assert status == 200, answer
    assert answer["choices"][0]["text"] == "ab" * 50
    story = {"type": "array", "items": {"type": "string", "maxLength": 30}}
    story |= {"minItems": 5, "maxItems": 6}
    schema = {"type": "object", "properties": {"story": story}, "required": ["story"]}
    status, answer = server.complete(
        prompt=prompt, max_tokens=300, structured_outputs={"json": schema}
    )
    assert status == 200, answer
    assert len(json.loads(answer["choices"][0]["text"])["story"]) >= 5
    request = server.request(prompt=prompt, max_tokens=300, stream=True)
    with urllib.request.urlopen(request, timeout=60) as stream:
        assert stream.readline().startswith(b"data:")
    assert server.complete(prompt="Hello", max_tokens=3)[0] == 200


def policy_metrics(server: Completing) -> dict[str, float]:
    """The policy's samples on ``/metrics``, by name."""
    sample = r"^vllm:kv_policy_(\w+){engine=\"0\",model_name=\".+\"} (.*)$"
    return {name: float(n) for name, n in re.findall(sample, server.get("/metrics"), re.M)}


def test_the_metrics_of_one_request(server: Completing) -> None:
    """181 + 40 tokens in 64 slots: 118 go when the prompt is packed, then one with each token."""
    before = policy_metrics(server)
    prompt = "The old sailor told us about the storm. " * 20
    assert server.complete(prompt=prompt, max_tokens=41, ignore_eos=True)[0] == 200
    expected = {"evicted_tokens_total": 118 + 39, "packs_total": 1, "pages_freed_early_total": 8}
    end = time.monotonic() + 30
    while True:
        after = policy_metrics(server)
        added = {name: after[name] - before[name] for name in expected}
        if (added == expected and after["resident_tokens"] == 0) or time.monotonic() > end:
            break
        time.sleep(0.2)
    assert added == expected
    assert not any(after[name] for name in after if not name.endswith(("total", "created")))


def test_the_line_in_the_periodic_log(server: Completing) -> None:
    """After vLLM's own, with what was evicted meanwhile."""
    line = (
        r"Engine 000: KV policy h2o: \d+ requests at capacity, \d+ of \d+ tokens resident, "
        r"[1-9]\d* evicted, \d+ pages freed early, -?\d+\.\d MiB saved"
    )
    end = time.monotonic() + 30
    while not re.search(line, server.log.read_text()) and time.monotonic() < end:
        time.sleep(0.5)
    assert re.search(line, server.log.read_text())


def test_the_dashboard_asks_for_what_is_there(server: Completing) -> None:
    """Every metric in its queries is on ``/metrics``."""
    board = (ROOT / "dashboards/kv-policy.json").read_text()
    served = server.get("/metrics")
    queried = set(re.findall(r"vllm:\w+", board))
    assert queried
    assert not [name for name in queried if not re.search(rf"^{name}{{", served, re.M)]


def test_pages_are_free_again_when_all_is_done(server: Completing) -> None:
    """Read from vLLM's own metrics."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        usage = re.search(r"^vllm:kv_cache_usage_perc{.*} (.*)$", server.get("/metrics"), re.M)
        assert usage is not None
        if float(usage.group(1)) == 0.0:
            return
        time.sleep(0.5)
    raise AssertionError(usage.group(0))


def test_vllm_bench_takes_the_flags() -> None:
    """It runs to its end, with the policy on."""
    done = subprocess.run(
        [*VLLM, "bench", "throughput", "--num-prompts=8", "--dataset-name=random",
         "--random-input-len=96", "--random-output-len=48", f"--model={smollm2()}", *ENGINE,
         "--kv-policy=h2o", "--kv-policy-config", '{"budget": 0.125}'],
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=TIMEOUT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "h2o: past its prompt a sequence holds 64 tokens" in done.stdout + done.stderr
    assert re.search(r"Throughput: .* tokens/s", done.stdout)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-policy-config.budget=1.5"], "budget=1.5 is not supported:"),
        (
            ["--kv-policy-config.max_budget=99", "--max-model-len=auto"],
            "budget=0.2 is not supported: it is 1639 slots of max_model_len=8192. max_budget=99 ",
        ),
    ],
)
def test_a_server_with_a_bad_budget_stops(tmp_path: Path, flags: list[str], message: str) -> None:
    """The message is the last thing on the screen, also where vLLM fits the length first."""
    server = Server(Path(smollm2()), tmp_path / "log", [*ENGINE, "--kv-policy=h2o", *flags])
    assert server.process.wait(TIMEOUT) != 0
    lines = server.log.read_text().strip().splitlines()
    # Python's own warning, in a process that may outlive both, of what a killed engine leaves.
    said = [line for line in lines if "resource_tracker" not in line]
    assert f"kv-policy: {message}" in said[-1]
