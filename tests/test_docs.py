# SPDX-License-Identifier: Apache-2.0
"""The documentation agrees with code and CSVs: generated parts, words, links, lengths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.house_rules import ROOT
from tools import figures
from tools.docs import DOCS, PARTS, part_of, written
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.footprint import Pool
from vllm_h2o.scheduler.start import Start

PACKAGE = ROOT / "vllm_h2o"
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "examples/**/*.md",
        "benchmarks/*.md",
        "research/*.md",
        "patches/*.md",
        "vllm_h2o/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*"))
    if path.suffix in (".py", ".cpp", ".h")
}
README_WORDS, GLOSSARY_LINES = 1100, 25
NUMBERS = r"\d+\.?\d*"


def glossary() -> list[str]:
    """The lines of the table, without its head."""
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    section = text[text.index("\n## Glossary\n") :].split("\n## ")[1]
    return [line for line in section.splitlines() if line.startswith("| **")]


TERMS = [term for line in glossary() for term in re.findall(r"\*\*(.+?)\*\*", line)]


@pytest.mark.parametrize(
    ("page", "name"),
    [(page, name) for page, parts in PARTS.items() for name in parts if "example" not in name],
)
def test_generated_parts_are_up_to_date(page: str, name: str) -> None:
    """What is written from the code is what the code says now."""
    text = (ROOT / page).read_text(encoding="utf-8")
    start, end = part_of(text, name)
    assert text[start:end] == PARTS[page][name](), "run: python -m tools.docs"


def test_written_changes_what_is_between_the_markers() -> None:
    """And nothing else; a missing marker is an error."""
    text = "a\n<!-- x: written by `python -m tools.docs` -->\nold\n<!-- end of x -->\nb\n"
    new = written(text, {"x": lambda: "new\n"})
    assert new == text.replace("old", "new")
    with pytest.raises(ValueError, match="not found"):
        written("no marker", {"x": lambda: "new\n"})


@pytest.mark.parametrize("term", TERMS)
def test_glossary_and_code_use_the_same_words(term: str) -> None:
    """Each term is a word of the code."""
    pattern = re.compile(rf"\b{'[ _]'.join(term.split())}", re.IGNORECASE)
    assert any(pattern.search(text) for text in SOURCES.values())


def test_glossary_is_short() -> None:
    """It is read as a whole."""
    assert 0 < len(glossary()) <= GLOSSARY_LINES


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


def links(page: Path) -> Iterator[str]:
    """Targets of a page's links and pictures that are not on the web."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+://", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Each leads to a file, and to a heading in it."""
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name}: {target}"


FILES = r"`((?:\w+/)+[\w.]+\.(?:py|cpp|csv|json|md))`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    """A path in code type lies below the root, the package or the page; history is history."""
    if page.name == "CHANGELOG.md":
        return
    for name in re.findall(FILES, page.read_text(encoding="utf-8")):
        roots = (ROOT, PACKAGE, page.parent)
        assert any((root / name).exists() for root in roots), f"{page.name}: {name}"


def test_readme_is_short() -> None:
    """As ``wc -w`` counts; what is longer goes to docs/."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_log_line_is_the_engine_s() -> None:
    """README and docs/metrics.md show the line that the scheduler logs."""
    pool = Pool(1432 + 1, 16)
    start = Start(
        config=KVPolicyConfig(name="h2o", budget=64),
        budget=Budget(64, 31, 32, 0),
        pool=pool,
        stock_pool=pool,
        max_model_len=1024,
        max_num_seqs=1,
        num_layers=(1, 0),
        num_other_pages=(0, 0),
    )
    (line,) = start.lines()
    for page in ("README.md", "docs/metrics.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert f"h2o: {line}" in text, page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0.2}, "requests of up to 64 tokens keep them all: .* budget_basis=prompt"),
        ({"budget": 0.2, "budget_basis": "prompt"}, None),
        ({"budget": 64, "continuation": 2}, "2 GiB of host memory keep 15 or more earlier turns"),
    ],
)
def test_what_else_is_said_at_start(options: dict[str, Any], said: str | None) -> None:
    """A budget that binds late, and room for conversations."""
    start = Start(
        config=KVPolicyConfig(name="h2o", **options),
        budget=Budget(64, 31, 32, 0),
        pool=Pool(100, 16),
        stock_pool=Pool(100, 16),
        max_model_len=320,
        max_num_seqs=1,
        num_layers=(1, 0),
        num_other_pages=(0, 0),
        num_host_pages=62 if "continuation" in options else 0,
    )
    _, *others = start.lines()
    assert len(others) == bool(said)
    assert said is None or re.search(said, others[0])


def test_readme_figures_come_from_csvs() -> None:
    """Each row of README's results has the figures of a generated table."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## Results") :].split("\n## ")[0]
    rows = [line for line in section.splitlines() if "**" in line and line.startswith("|")]
    generated = [re.findall(NUMBERS, line) for line in figures.profiles().splitlines()]
    assert len(rows) >= 4
    for row in rows:
        wanted = re.findall(NUMBERS, "".join(row.split("|")[2:]))
        assert any(set(wanted) <= set(numbers) for numbers in generated), row
