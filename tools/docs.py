# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of the documentation, each between two markers.

::

    python -m tools.docs    write them; a test compares

Options, policies and refusals come from the code, tables of figures from CSVs.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path

from research import streams_figures
from tools import figures, loads, worked_example
from tools.figures import markdown
from vllm_h2o.metrics import COUNTERS, GAUGES
from vllm_h2o.options.capabilities import ENGINE_PARTS, OPTION_PARTS, Part, Property, Setup
from vllm_h2o.options.option import table_row
from vllm_h2o.options.options import Options
from vllm_h2o.options.parsing import ANY, RETIRED, Retired
from vllm_h2o.options.refusals import IN_LAYERS, REFUSALS, WHY_IN_LAYERS, WHY_OPTION
from vllm_h2o.options.remedies import ANOTHER_MODEL, OF_THE_CONFIG, advice, flag
from vllm_h2o.policy import Policy, Ranking, policies
from vllm_h2o.policy.ranking import Term

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ZOO = ROOT / "tests/e2e/zoo.csv"
"""Written by ``python -m tools.zoo``; a test runs each family and compares."""
READERS = {
    "every": "every policy",
    "evicts": "policies that evict",
    "ranks": "policies that rank tokens",
    "window": "policies with a window term",
}
"""Which policies read an option, in words."""


def options() -> str:
    """Return every option, from its one description."""
    return markdown(("option", "meaning", "default"), ()) + "".join(
        f"{table_row(field)}\n" for field in fields(Options)
    )


def shelf() -> str:
    """Return every policy of this package, and what ranks tokens."""
    rows = [(f"`{p.name}`", p.summary, _ranks(p)) for p in policies().values()]
    text = markdown(("policy", "keeps", "ranks tokens by"), rows) + "\n"
    for reader, which in list(READERS.items())[1:]:
        names = [f"`{f.name}`" for f in fields(Options) if f.metadata["read_by"] == reader]
        text += f"- Options of {which}: {', '.join(names)}.\n"
    return text


def _ranks(policy: Policy) -> str:
    if not policy.ranking.terms:
        return "position"
    return ", ".join(f"{t.queries} ({t.reduce})" for t in policy.ranking.terms)


def rankings() -> str:
    """Return the terms of every ranking."""
    rows = [
        (f"`{policy.name}`", f"`{name}`" if name else "-", _terms(rule.ranking))
        for policy in policies().values()
        for name, rule in (policy.rules or {"": policy}).items()
        if rule.ranking.terms
    ]
    return markdown(("policy", "score", "terms"), rows)


def _terms(ranking: Ranking) -> str:
    return " + ".join(_term(term) for term in ranking.terms)


def _term(term: Term) -> str:
    weight = f"{term.weight} × " if term.weight != 1 else ""
    power = " of squared attention" if term.power == 2 else " of attention"
    details = [
        f"also {term.reach} tokens after" if term.reach else "",
        f"not the {term.skip} tokens up to the query" if term.skip else "",
        f"in blocks of {term.block}" if term.block else "",
        f"for {term.lifetime} tokens of output" if term.lifetime else "",
    ]
    said = ", ".join(filter(None, details))
    return f"{weight}{term.queries}: {term.reduce}{power}" + (f" ({said})" if said else "")


def retired() -> str:
    """Return every retired spelling, and what to write instead."""
    rows = []
    for (name, value), row in RETIRED.items():
        old = f"`{name}`" if value is ANY else f"`{name}={_json(value)}`"
        if value is not None:
            rows.append((old, _replaced(row), "refused" if row.gone else "accepted until 0.2"))
    return markdown(("old", "now", ""), rows)


def _replaced(row: Retired) -> str:
    now = [f"`{k}`" if v is ANY else f"`{k}={_json(v)}`" for k, v in row.now.items()]
    return row.gone or ", ".join(now) or "leave it out"


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def properties() -> str:
    """Return every property, the parts that need it, and those that break it."""
    parts = [(part, _named(part)) for part in OPTION_PARTS + ENGINE_PARTS]
    rows = []
    for wanted in Property:
        needed = [name for part, name in parts if wanted in part.needs]
        broken = [f"{name} {part.breaks[wanted]}" for part, name in parts if wanted in part.breaks]
        rows.append((wanted.value, "; ".join(needed), "; ".join(broken)))
    return markdown(("property", "needed by", "broken by"), rows)


TEMPLATES = {
    "eviction={o.eviction}": "`eviction=prompt_end` or `pressure`",
    "evict_every={o.evict_every}": "`evict_every` above 1",
    "split={s.split}": "`split=heads` or `layers`",
    "merge={s.merge}": "`merge`",
    "positions={o.positions}": "`positions=rolling`",
    "continuation={o.continuation}": "`continuation=/PATH`",
    "budget_basis={o.budget_basis}": "`budget_basis`",
    "budget={o.budget}": "`budget` in tokens",
}
"""Name of a part with the value of its option -> the same for any value."""


def _named(part: Part) -> str:
    if part.name == "{o.ranking_name}":
        return ", ".join(_ranked(part))
    return TEMPLATES.get(part.name, f"`{part.name}`" if "=" in part.name else part.name)


def _ranked(part: Part) -> list[str]:
    """Return the policies or scores whose rankings have a part."""
    names = []
    for policy in policies().values():
        scores = [
            score
            for score in policy.rules or [None]
            if part.on(Setup(Options(name=policy.name, score=score)))
        ]
        every = len(scores) == max(len(policy.rules), 1)
        names += [f"`{policy.name}`"] if every else [f"`score={score}`" for score in scores]
    return names


def refusals() -> str:
    """Return what is refused on its own: of an engine, of a layer, and of an option."""
    from vllm.engine.arg_utils import EngineArgs

    given = frozenset(field.name for field in fields(EngineArgs)) - {*OF_THE_CONFIG}
    rows = [(row.what, row.why, advice(row.remedy, given)) for row in REFUSALS]
    rows.append((f"in a layer: {', '.join(IN_LAYERS.values())}", WHY_IN_LAYERS, ANOTHER_MODEL))
    rows += [
        (f"`{flag(name)}` of your own", why, f"leave {flag(name)} out")
        for name, why in WHY_OPTION.items()
    ]
    return markdown(("refused", "why", "what to do"), rows)


def metrics() -> str:
    """Return what ``/metrics`` shows."""
    counters = [(f"`{name}_total`", "counter", meaning) for name, meaning in COUNTERS.items()]
    gauges = [(f"`{name}`", "gauge", meaning) for name, meaning in GAUGES.items()]
    return markdown(("`vllm:kv_policy_...`", "kind", "meaning"), counters + gauges)


def families() -> str:
    """Return the result of a tiny model of each family, by version of vLLM."""
    with ZOO.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    by_family: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        became = by_family.setdefault(row["family"], {})
        became.setdefault(row["became"], []).append(row["vllm"])
    table = [
        (family, became, ", ".join(versions))
        for family, results in by_family.items()
        for became, versions in results.items()
    ]
    return markdown(("family", "result", "vLLM"), table)


PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "docs/options.md": {
        "options": options,
        "policies": shelf,
        "rankings": rankings,
        "retired": retired,
    },
    "docs/compatibility.md": {
        "families": families,
        "properties": properties,
        "refusals": refusals,
    },
    "docs/metrics.md": {"metrics": metrics},
    "docs/quality.md": {
        "prose": figures.prose,
        "second model": figures.second_model,
        "facts asked now": partial(figures.facts, "asked_now"),
        "facts asked later": partial(figures.facts, "asked_later"),
        "in turn": figures.in_turn,
        "presses": figures.presses,
        "look-ups": figures.lookups,
        "written": figures.written,
        "fp8": figures.float8,
        "dialogues": figures.dialogues,
    },
    "docs/performance.md": {
        "profiles": figures.profiles,
        "predicted": figures.predicted,
        "prompts": figures.prompts,
        "pressure": loads.pressure,
        "chats": loads.chats,
        "tiers": loads.tiers,
        "travel": loads.travel,
        "document": loads.document,
    },
    "docs/sparsity.md": {
        "sparse steps": loads.sparse_steps,
        "sparse devices": loads.sparse_devices,
    },
    "research/NOTES.md": {"streams": streams_figures.table},
    "docs/design.md": {
        "weights": worked_example.weights_table,
        **{
            f"example of {name}": partial(worked_example.example, name)
            for name in worked_example.CASES
        },
    },
}
"""File -> name of a part -> the function that writes it."""


def part_of(text: str, name: str) -> tuple[int, int]:
    """Return where a part lies between its markers.

    Raises:
        ValueError: when a marker is missing.

    """
    begin = f"<!-- {name}: written by `python -m tools.docs` -->\n"
    start = text.index(begin) + len(begin)
    return start, text.index(f"<!-- end of {name} -->\n", start)


def written(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return ``text`` with its parts as the code has them now."""
    for name, part in parts.items():
        start, end = part_of(text, name)
        text = text[:start] + part() + text[end:]
    return text


if __name__ == "__main__":
    for file_name, parts in PARTS.items():
        path = ROOT / file_name
        path.write_text(written(path.read_text(encoding="utf-8"), parts), encoding="utf-8")
