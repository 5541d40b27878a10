"""What the documentation says, held to the code: generated parts, words, links, lengths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house_rules import ROOT
from tools.docs import DOCS, PARTS, part_of, written
from vllm_h2o.policy import Budget

PACKAGE, PATCHES = ROOT / "vllm_h2o", ROOT / "patches"
PAGES = sorted(
    path
    for folder in (".", "docs", "examples", "benchmarks", "patches", "vllm_h2o/**")
    for path in ROOT.glob(f"{folder}/*.md")
)
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for path in sorted([*PACKAGE.rglob("*"), *PATCHES.iterdir()])
    if path.suffix in (".py", ".cpp", ".h")
}
README_WORDS, GLOSSARY_LINES = 1100, 25

RETIRED = (
    # the layout of a page, and what the kernels are asked for
    r"H2oPage|page_rows|PAGE_ROWS",
    r"(DECODE|CHUNK|PACK)_ORDERS|NUM_ORDERS|DECODE_REQUEST",
    r"recent_from|keep_after|scores_from|watch_from|watched",
    r"hole|refill\w*|gathers|blank",
    r"MOST_SHARES|num_shares|join_shares",
    r"soften\w*|unite\w*|fade\w*|silent(?! no-op)",
    r"drawn_by_position|reduce_and_score|shares_prefixes|class Page|attended(?= = )",
    r"asked again|replay\w*|REPLAY|Turn|turned",
    # lengths, pages and plans
    r"NEVER|Claim|claim|Residency|residencies|Tally|tally",
    r"(class |: )Counts|surplus|uncut|most_cached|first_page|pack_page|row_pages",
    r"choose_kernels|kernels\.cpu|kernels/cpu|kernels\.page|kernels\.packing|kernels\.scoring",
    # words that say something else in English
    r"of chance|beside|behind(?! a load balancer)",
)
"""What things are no longer called, whole words; a word next to ``_`` is another one."""
ALLOWED = {("vllm_h2o/options/parsing.py", "replay")}
"""The table of retired spellings of options, which users may still write."""


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
def test_generated(page: str, name: str) -> None:
    """What is written from the code is what the code says now."""
    text = (DOCS / page).read_text(encoding="utf-8")
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
def test_glossary(term: str) -> None:
    """Each term is a word of the code."""
    pattern = re.compile(rf"\b{'[ _]'.join(term.split())}", re.IGNORECASE)
    assert any(pattern.search(text) for text in SOURCES.values())


def test_glossary_is_short() -> None:
    """It is read as a whole."""
    assert 0 < len(glossary()) <= GLOSSARY_LINES


@pytest.mark.parametrize("word", RETIRED)
def test_retired(word: str) -> None:
    """One word, one meaning: what was renamed is gone, in every language."""
    pattern = re.compile(rf"\b(?:{word})\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path, text in SOURCES.items()
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.finditer(line)
        if (str(path.relative_to(ROOT)), match.group()) not in ALLOWED
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "is_retired"),
    [
        ("the hole after it", True),
        ("refilled = 0", True),
        ("class Residency:", True),
        ("class ResidencyPlan:", False),
        ('name="h2o2"', False),
        ("queries are asked again", True),
        ("the whole row", False),
        ("it would be a silent no-op", False),
    ],
)
def test_retired_words_are_noticed(line: str, is_retired: bool) -> None:
    """The patterns find what they are for."""
    assert any(re.search(rf"\b(?:{word})\b", line) for word in RETIRED) is is_retired


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
def test_links(page: Path) -> None:
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
    """README and docs/metrics.md show what the scheduler says, in its words."""
    source = (PACKAGE / "scheduler/scheduler.py").read_text(encoding="utf-8")
    call = source[source.index('"%s: past its prompt') : source.index("config.name,")]
    said = "".join(re.findall(r'"(.*)"', call))
    said = said.replace("(%s)", f"({re.sub(r'[0-9]+', '%d', Budget(64, 31, 32, 0).parts)})")
    said = said.replace("%d for the incoming", "1 for the incoming")
    pattern = re.escape(said).replace("%s%d", r"\d+").replace("%s", "h2o").replace("%d", r"\d+")
    for page in ("README.md", "docs/metrics.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert re.search(pattern, text), page
