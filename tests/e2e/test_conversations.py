# SPDX-License-Identifier: Apache-2.0
"""A conversation is one request that is evicted from at the end of each turn's prompt."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from tests.e2e.conversations import ConversationOracle, converse, own_text, talkative
from tests.e2e.harness import Probe, engine, generate, smollm2, token_ids, worker_of
from tests.e2e.server import MODEL, Completing, blocks, run
from tests.house_rules import ROOT
from vllm_h2o.cli import main

SMALL = {"block_size": 16, "num_gpu_blocks_override": 120, "max_num_batched_tokens": 128}
WHAT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("h2o", {"kernels": "torch"}),
    ("h2o", {"evict_every": "page", "recent_ratio": 0.2}),
    ("h2o", {"score": "mean", "eviction": "chunk"}),
    ("snapkv", {"observation_window": 6}),
    ("h2o", {"evict_every": 5}),
    ("h2o2", {"observation_window": 4, "lifetime": 9}),
    ("h2o2", {"observation_window": 4, "lifetime": 40}),
    ("h2o", {"split": "heads"}),
    ("h2o", {"split": "layers"}),
    ("h2o2", {"split": "layers", "lifetime": 9}),
    ("h2o2", {"split": "heads", "lifetime": 40}),
    ("h2o2", {"score": "reconstruction"}),
    ("streaming", {}),
    ("local", {}),
)


@pytest.mark.parametrize(("policy", "options"), WHAT, ids=[f"{p} {o}" for p, o in WHAT])
def test_conversations_are_one_request(
    policy: str, options: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set for set, and attention output by attention output; turns of one token, too."""
    own = talkative(monkeypatch, options)
    monkeypatch.setattr("vllm_h2o.scheduler.conversations.FOUND_PER_STEP", 0)
    with monkeypatch.context() as patch, engine(model, policy, own, **SMALL) as llm:
        probe = Probe(llm)
        oracle = ConversationOracle(probe.scheduler).install(patch)
        texts = [own_text(index, length) for index, length in enumerate((5, 63, 64, 90))]
        lengths = [len(text) for text in texts]
        for turn in converse(llm, texts, turns=(0, 1, 30, 7), max_tokens=21):
            found = [output.num_cached_tokens for output in turn]
            prompts = [len(output.prompt_token_ids or ()) for output in turn]
            assert found in ([0] * 4, lengths)
            lengths = [length + 21 - 1 for length in prompts]
        assert found[0] > 0
        assert probe.num_free == probe.num_total
    assert oracle.num_turns == 4 * 4 * 2 * 2
    assert oracle.num_victims > 0 or policy == "h2o" and options.get("evict_every")
    # Where the model's heads attend alike, as with h2o here, they get equal parts.
    assert oracle.num_unequal > 0 or policy != "h2o2" or "split" not in options
    assert oracle.num_ties <= max(oracle.num_victims / 1000, 1)
    assert oracle.max_error < 1e-4


@pytest.mark.parametrize(
    ("where", "split"),
    [
        *(("host memory", split) for split in ("none", "heads", "layers")),
        ("files", "none"),
        ("both", "layers"),
    ],
)
def test_conversations_outlive_their_pages(
    where: str, split: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that cannot hold them, each keeps what one request from the first turn on does."""
    places = {"host memory": 1, "files": f"{tmp_path}:1", "both": f"1,{tmp_path}:1"}
    own = {"budget": 64, "continuation": places[where], "split": split}
    monkeypatch.setattr("vllm_h2o.scheduler.conversations.FOUND_PER_STEP", 0)
    tight = {**SMALL, "num_gpu_blocks_override": 30, "max_model_len": 400}
    with monkeypatch.context() as patch, engine(model, "h2o", own, **tight) as llm:
        probe = Probe(llm)
        entries = probe.scheduler.conversations
        if where == "both":
            entries.host.num_pages = 8
        oracle = ConversationOracle(probe.scheduler).install(patch)
        texts = [own_text(index, length) for index, length in enumerate((40, 63, 64, 90))]
        others = [own_text(9, 90), own_text(10, 200)]
        lengths = [0] * 4
        for new in (0, 1, 30, 7):
            for index, text in enumerate(texts):
                text += own_text(100 * new + index, new)
                (output,) = generate(llm, [text], 21)
                assert output.num_cached_tokens == lengths[index]
                lengths[index] = len(text) + 21 - 1
                text += output.outputs[0].token_ids
                generate(llm, others, 3)
                finish_writing(llm)
        assert bool(entries._on_host) == (where != "files")
        assert (len(list(tmp_path.iterdir())) > 6) == (where != "host memory")
        assert probe.num_free == probe.num_total
    assert oracle.num_turns >= 4 * 3 * 2 * 2
    assert oracle.num_ties <= max(oracle.num_victims / 1000, 1)
    assert oracle.max_error < 1e-4


def finish_writing(llm: Any) -> None:
    """Wait until files are written for which no answer waits."""
    if (turns := worker_of(llm)._turns) is not None:
        turns.writer.wait()


CHAT = ROOT / "examples/chat.md"
SMALL_SERVER = ("--dtype=float32", "--enforce-eager", "--max-model-len=512", "--block-size=16")


def test_chat_page_works_on_a_real_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The page's commands, on a real server and a real template, as a reader would run them."""
    check, start, client, metrics = blocks(CHAT)
    model = smollm2()
    assert main(shlex.split(check.code.replace(MODEL, model))[1:]) == 0
    assert "a plain answer: continues" in capfd.readouterr().out
    _, _, served, *flags = shlex.split(start.code)
    assert served == MODEL
    with Completing(Path(model), tmp_path / "log", [*SMALL_SERVER, *flags]) as server:
        said = re.findall(r"(\d+) tokens, (\d+) of them continued", run(client, server))
        prompts, cached = ([int(n) for n in each] for each in zip(*said, strict=True))
        assert counted(run(metrics, server), "hits") == sum(cached)
        assert counted(run(metrics, server), "misses") == 0
        num_tokens, broken = edited(server)
        assert counted(run(metrics, server), "misses") == 1
    assert cached == [0, prompts[0] + 23, prompts[1] + 23] and len(prompts) == 3
    (line,) = re.findall(r"continuation: a later turn .*", (tmp_path / "log").read_text())
    assert f"at token {broken} of {num_tokens}, counted from 0" in line


def counted(printed: str, what: str) -> float:
    """A number of the policy's metrics."""
    (number,) = re.findall(
        rf"^vllm:kv_policy_continuation_{what}_total\{{.*\}} ([\d.]+)$", printed, re.M
    )
    return float(number)


def edited(server: Completing) -> tuple[int, int]:
    """Chat, and change the answer's first word: its turn's tokens, and which of them differs."""
    messages = [{"role": "user", "content": "Name the seven seas."}]
    first = chat(server, messages)
    answer = first["choices"][0]["message"]["content"]
    messages += [
        {"role": "assistant", "content": f"Nine {answer}"},
        {"role": "user", "content": "Again?"},
    ]
    assert chat(server, messages)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    usage = first["usage"]
    # The answer's last token is sampled, but never computed.
    return usage["prompt_tokens"] + usage["completion_tokens"] - 1, usage["prompt_tokens"]


def chat(server: Completing, messages: list[dict[str, str]]) -> dict[str, Any]:
    """The server's answer to a chat."""
    body = {"model": server.model, "messages": messages, "max_tokens": 9, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
    return answer


def test_branches_regenerations_and_budgets(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several go on from one entry at once, and none from one of another budget or salt."""
    own = {"budget": 64, "continuation": True}
    with monkeypatch.context() as patch, engine(model, "h2o", own, **SMALL) as llm:
        oracle = ConversationOracle(Probe(llm).scheduler).install(patch)
        small = {"extra_args": {"kv_budget": 32}}
        text = own_text(0, 90)
        for budget in ({}, small):
            (first,) = generate(llm, [text], 20, **budget)
            assert first.num_cached_tokens == 0
        said = [*text, *first.outputs[0].token_ids]
        branches = [[*said, *own_text(seed, 9)] for seed in (1, 2)]
        again = generate(llm, [*branches, branches[0]], 5, n=2, temperature=1, seed=1, **small)
        assert [output.num_cached_tokens for output in again] == [109] * 3
        assert token_ids(again)[0] == token_ids(again)[2] != token_ids(again)[1]
        (other,) = generate(llm, branches[:1], 5)
        assert other.num_cached_tokens in (0, 109)  # 109 if both budgets said the same
        (salted,) = llm.generate(
            [{"prompt_token_ids": branches[0], "cache_salt": "mine"}],
            SamplingParams(max_tokens=2, temperature=0, detokenize=False, **small),
            use_tqdm=False,
        )
        assert salted.num_cached_tokens == 0
        llm.reset_prefix_cache()
        (anew,) = generate(llm, branches[:1], 5, **small)
        assert anew.num_cached_tokens == 0
    assert oracle.max_error < 1e-4 and oracle.num_turns >= 3 * 2 * 4


def reload_from(worker: Any, path: str) -> None:
    """As trainers do: a function that vLLM runs in each worker."""
    worker.reload_weights(weights_path=path)


def pause(core: Any, llm: LLM) -> None:
    """Keep requests and caches."""
    core.pause_scheduler(mode="keep", clear_cache=False)


def sleep(core: Any, llm: LLM) -> None:
    """At a level that a CPU has."""
    llm.sleep(level=0)


def wake(core: Any, llm: LLM) -> None:
    """Schedule again."""
    core.resume_scheduler()
    llm.wake_up(tags=["scheduling"])


SHARING = ("snapkv", {"observation_window": 6}, {"enable_prefix_caching": True})
WAYS: dict[str, tuple[tuple[str, dict[str, Any], dict[str, Any]], list[Callable[..., None]]]] = {
    "alone": (("h2o", {}, {}), []),
    "paused": (("h2o", {}, {}), [pause]),
    "asleep": (("h2o", {}, {}), [sleep]),
    "prefix caching": (SHARING, []),
}


@pytest.mark.parametrize("call", ["reload_weights", reload_from])
@pytest.mark.parametrize("way", WAYS)
def test_conversation_whose_weights_changed_starts_anew(
    way: str, call: str | Callable[..., None], model: str, tmp_path: Path
) -> None:
    """With a fresh engine's tokens, whatever else is done with the engine meanwhile."""
    (policy, options, settings), before = WAYS[way]
    own = {"budget": 64, "continuation": True, **options}
    settings = {**SMALL, **settings}
    newer = tmp_path / "newer"
    shutil.copytree(model, newer)
    weights = load_file(newer / "model.safetensors")
    scaled = {name: weight * 1.1 for name, weight in weights.items()}
    save_file(scaled, newer / "model.safetensors", {"format": "pt"})
    with engine(model, policy, own, **settings) as llm:
        (first,) = generate(llm, [own_text(0, 90)], 20)
        text = [*own_text(0, 90), *first.outputs[0].token_ids, *own_text(1, 9)]
        core = llm.llm_engine.engine_core.engine_core
        for act in before:
            act(core, llm)
        if callable(call):
            llm.collective_rpc(call, args=(str(newer),))
        else:
            llm.collective_rpc(call, kwargs={"weights_path": str(newer)})
        if before:
            wake(core, llm)
        (changed,) = generate(llm, [text], 20)
        assert changed.num_cached_tokens == 0
        said = [*text, *changed.outputs[0].token_ids, 1]
        (third,) = generate(llm, [said], 2)
        assert third.num_cached_tokens == len(said) - 2
    with engine(str(newer), policy, own, **settings) as llm:
        assert token_ids(generate(llm, [text], 20)) == token_ids([changed])
