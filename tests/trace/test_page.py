# SPDX-License-Identifier: Apache-2.0
"""The page carries what was recorded, as text and not as markup, and a browser draws it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, LlamaConfig
from vllm.distributed import cleanup_dist_env_and_memory

from benchmarks.smollm2 import model_dir
from benchmarks.throughput.models import write_random
from tests.e2e.harness import engine
from tests.trace.browser import Tab, chromium, tab
from vllm_h2o.cli import main
from vllm_h2o.trace.page import render
from vllm_h2o.trace.record import Frame, Trace, record, texts

pytestmark = pytest.mark.engine

PROMPT = (
    "The keeper of the lighthouse wrote </script><b>it</b> & 'all' down —\n"
    "日本 🙂 the storm, the ships, and the names of those who came ashore."
)
OPTIONS = {"recent_ratio": 0.5, "observation_window": 8, "merge": 0.2, "split": "none"}
ARGUMENTS = (
    *("--max-tokens", "40", "--every", "9", "--budget", "32", "--dtype", "float32"),
    *("--kv-policy", "h2o2", "--kv-policy-config", json.dumps(OPTIONS)),
)


class Elements(HTMLParser):
    """A page as a browser's parser reads it: its elements, and the text of the data's."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.data = ""
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the element, and where it points to."""
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self._inside = ("id", "trace") in attrs

    def handle_endtag(self, tag: str) -> None:
        """The data's element ends."""
        self._inside = False

    def handle_data(self, data: str) -> None:
        """Collect the data."""
        self.data += data if self._inside else ""


def decode(page: str) -> tuple[dict[str, Any], list[Frame]]:
    """Read a page's data without the code that wrote it."""
    data = json.loads(Elements(page).data)
    blob = zlib.decompress(base64.b64decode(data["data"]))
    num_layers, heads = len(data["layers"]), data["heads"]
    pairs, at, frames = num_layers * heads, 0, []
    for length, kept in data["frames"]:
        width = -(-length // 8)
        mask = blob[at : at + pairs * width]
        high = blob[at + pairs * width : at + pairs * (width + kept)]
        low = blob[at + pairs * (width + kept) : at + pairs * (width + 2 * kept)]
        at += pairs * (width + 2 * kept)
        mass = None
        if data["masses"]:
            high_mass, low_mass = (blob[at + n * pairs * kept :][: pairs * kept] for n in (0, 1))
            at += 2 * pairs * kept
            mass = [256 * h + w for h, w in zip(high_mass, low_mass, strict=True)]
        position = [
            [p for p in range(length) if mask[pair * width + p // 8] >> p % 8 & 1]
            for pair in range(pairs)
        ]
        bits = np.array([h << 24 | w << 16 for h, w in zip(high, low, strict=True)], np.uint32)
        shape = (num_layers, heads, kept)
        frame = Frame(length, np.reshape(position, shape), bits.view(np.float32).reshape(shape))
        frames.append(frame if mass is None else replace(frame, mass=np.reshape(mass, shape)))
    rest = np.frombuffer(blob[at:], np.uint8)
    assert len(rest) == (pairs * data["promptLen"] if data["terms"] else 0)
    data["largest"] = rest.reshape(num_layers, heads, -1)
    return data, frames


def same(frames: list[Frame], others: list[Frame]) -> bool:
    """Equal positions and masses, and scores to the digits of a bfloat16."""
    return len(frames) == len(others) and all(
        one.logical_len == other.logical_len
        and np.array_equal(one.position, other.position)
        and np.allclose(one.score, other.score, rtol=2**-8, atol=0)
        and np.array_equal(one.mass, other.mass)
        for one, other in zip(frames, others, strict=True)
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that speaks the tokens of the real one."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir("float32", progress=False))
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    return write_random(config, folder)


@pytest.fixture(scope="module")
def trace(model: str) -> Trace:
    """A run in this process."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer(PROMPT)["input_ids"]
    settings = {"block_size": 16, "max_model_len": len(prompt) + 40}
    with engine(model, "h2o2", {"budget": 32, **OPTIONS}, **settings) as llm:
        layers, token_ids, frames = record(llm, prompt, every=9, max_tokens=40)
    frames = [frame.ranked_by_age() for frame in frames]
    pieces = texts(tokenizer, token_ids)
    return Trace("a <model>, h2o2", pieces, len(prompt), layers, 16, 0, True, frames)


def test_page_data_survives_packing(trace: Trace) -> None:
    """Positions exactly, scores to two digits, all tokens."""
    data, frames = decode(render(trace))
    assert data["tokens"] == trace.tokens
    assert "".join(data["tokens"]).startswith(PROMPT)
    assert same(frames, trace.frames)
    assert min(frame.position.shape[2] for frame in frames) == 31
    assert frames[-1].mass is not None and frames[-1].mass.max() > 2
    terms = trace.frames[0].terms
    assert data["terms"] == [*terms]
    assert np.array_equal(data["largest"], np.stack([*terms.values()]).argmax(axis=0))
    assert len(np.unique(data["largest"])) == len(terms)


def test_page_escapes_texts(trace: Trace) -> None:
    """The page has the elements of its template, whatever the prompt says, and asks for nothing."""
    elements = Elements(render(trace))
    plain = Elements(render(replace(trace, tokens=["a"] * len(trace.tokens), title="b")))
    assert elements.tags == plain.tags
    assert elements.tags.count("script") == 2
    assert elements.addresses == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", render(replace(trace, tokens=[])))


def test_page_of_a_long_text_stays_small() -> None:
    """500 tokens, 30 layers of 3 heads, 60 steps, a hundred kept: two megabytes and a half."""
    rng = np.random.default_rng(0)
    frames = []
    for length in range(202, 502, 5):
        order = rng.random((30, 3, length)).argsort(axis=-1)[:, :, :100]
        score = rng.lognormal(0, 2, (30, 3, 100)).astype(np.float32)
        frames.append(Frame(length, np.sort(order).astype(np.int32), score))
    trace = Trace("m", ["word "] * 502, 200, list(range(30)), 50, 0, True, frames)
    page = render(trace)
    assert same(decode(page)[1], frames)
    assert len(page) < 2.5e6


def traced(model: str, folder: Path, *options: str) -> tuple[dict[str, Any], list[Frame]]:
    """Read the data of the page that ``vllm-h2o trace`` writes."""
    (folder / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    page = folder / "trace.html"
    files = ("--prompt-file", str(folder / "prompt.txt"), "--out", str(page))
    try:
        assert main(["trace", model, *ARGUMENTS, *options, *files]) == 0
    finally:
        cleanup_dist_env_and_memory()
    return decode(page.read_text(encoding="utf-8"))


def test_trace_command_writes_a_page(
    model: str, trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``vllm-h2o trace`` starts an engine of its own, and writes what the other one recorded."""
    data, frames = traced(model, tmp_path)
    assert "7 steps of 3 layers x 2 KV heads" in capsys.readouterr().out
    assert data["tokens"] == trace.tokens
    assert data["title"].endswith(
        ", h2o2: 32 tokens a head (15 heavy, 16 recent, 0 sinks, 1 for the incoming token)"
    )
    assert same(frames, trace.frames)


def test_page_of_a_text_within_the_budget_shows_no_scores(model: str, tmp_path: Path) -> None:
    """There are none: a page that showed them would rank zeros."""
    data, frames = traced(model, tmp_path, "--budget", "256")
    assert data["scored"] is False
    assert all(frame.position.shape[2] == frame.logical_len for frame in frames)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A headless Chromium."""
    program = chromium()
    if program is None:
        pytest.skip("no Chromium on the path")
    with tab(program, tmp_path_factory.mktemp("profile")) as page:
        yield page


SHADES = (
    "[...document.querySelectorAll('#text span')].map(s => s.hidden ? null : s.style.background)"
)


FIRST_CELL = "document.querySelector('#grid button').title"
DETAIL = "document.getElementById('detail').innerText"
TO_THE_END = (
    "document.getElementById('text').dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}))"
)
CHOOSE = "{{const s = document.getElementById('{}'); s.value = {}; {}}}"
CHANGED = "s.dispatchEvent(new Event('change'))"


def kept_share(background: str) -> float:
    """The share that a colour says: its blue runs from 255 to 32."""
    return 0.0 if not background else (255 - int(re.findall(r"\d+", background)[2])) / 223


@pytest.mark.parametrize("size", [(390, 844), (1280, 900)], ids=["phone", "desktop"])
def test_page_in_a_browser_draws_tokens(
    browser: Tab, trace: Trace, tmp_path: Path, size: tuple[int, int]
) -> None:
    """Each token as dark as it is kept, at each step of the slider; no complaint, no network."""
    path = tmp_path / "trace.html"
    path.write_text(render(trace), encoding="utf-8")
    browser.open(path, *size)
    picture = browser.screenshot()
    seen = [browser.run(SHADES)]
    browser.run("document.getElementById('step').focus()")
    for _ in trace.frames[1:]:
        browser.press("ArrowLeft")
        seen.append(browser.run(SHADES))
    for frame, shades in zip(reversed(trace.frames), seen, strict=True):
        pairs = frame.position.reshape(-1, frame.position.shape[2])
        counts = np.bincount(pairs.ravel(), minlength=frame.logical_len) / len(pairs)
        assert [s is None for s in shades] == [
            position >= frame.logical_len for position in range(len(trace.tokens))
        ]
        found = [kept_share(shade) for shade in shades[: frame.logical_len]]
        assert found == pytest.approx(counts.tolist(), abs=0.01)
    assert browser.screenshot() != picture
    assert picture.startswith(b"\x89PNG")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("document.getElementById('title').textContent") == trace.title
    assert browser.complaints == []
    assert {url.partition(":")[0] for url in browser.requested} == {"file"}


def test_page_shows_score_and_rank_of_a_token_and_a_pair(
    browser: Tab, trace: Trace, tmp_path: Path
) -> None:
    """With the keyboard to a token, with a select to one pair: its score, and its rank."""
    path = tmp_path / "trace.html"
    path.write_text(render(trace), encoding="utf-8")
    browser.open(path, 1280, 900)
    frame = trace.frames[-1]
    last = frame.logical_len - 1
    assert re.fullmatch(r"layer 0, head 0: 3[12] tokens", browser.run(FIRST_CELL))
    browser.run("document.getElementById('text').focus()")
    browser.press("Home")
    text = browser.run(DETAIL)
    assert text.startswith("Token 0")
    (counts,) = re.findall(r"scored at the prompt\u2019s end mostly by (.*)", text)
    names, first = [*trace.frames[0].terms], (frame.position == 0).any(axis=-1)
    largest = np.stack([*trace.frames[0].terms.values()]).argmax(axis=0)[..., 0][first]
    expected = {name: int((largest == i).sum()) for i, name in enumerate(names)}
    found = {name: int(n) for name, n in re.findall(r"the ([a-z ]+) in (\d+)", counts)}
    assert found == {name: n for name, n in expected.items() if n}
    browser.run(TO_THE_END)
    text = browser.run(DETAIL)
    assert text.startswith(f"Token {last}")
    assert "generated, in the recent window" in text
    assert "kept by 6 of 6 layer-head pairs" in text
    browser.run(CHOOSE.format("layer", 2, CHANGED))
    browser.run(CHOOSE.format("head", 1, CHANGED))
    scores = frame.score[2, 1]
    place = 1 + int((scores > scores[-1]).sum())
    text = browser.run(DETAIL)
    shown = re.search(r"layer 2, head 1: score (\S+), (\d+) of 3[12]", text)
    assert shown is not None, text
    assert float(shown[1]) == pytest.approx(float(scores[-1]), rel=0.06)
    assert abs(int(shown[2]) - place) <= 1  # scores that a bfloat16 does not tell apart
    (mass,) = frame.mass[2, 1][-1:]
    assert ("stands for" in text) == (mass > 1)
    position = int(frame.position[2, 1][frame.mass[2, 1].argmax()])
    browser.run(f"document.getElementById('t{position}').click()")
    most = int(frame.mass[2, 1].max())
    assert f"stands for {most} tokens" in browser.run(DETAIL)
    marks = browser.run("[...document.querySelectorAll('#text span')].map(s => s.dataset.mass)")
    masses = dict(zip(frame.position[2, 1].tolist(), frame.mass[2, 1].tolist(), strict=True))
    assert marks == [
        f"\u00d7{masses[n]:.0f}" if masses.get(n, 1) > 1 else None for n in range(len(marks))
    ]
    shades = browser.run(SHADES)
    kept = {position for position, shade in enumerate(shades) if shade}
    assert kept == set(frame.position[2, 1].tolist())
    assert browser.complaints == []
