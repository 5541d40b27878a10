"""The parts of docs/ that are written from the code, each between two markers.

::

    python -m tools.docs    write them; a test compares
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from benchmarks import streams_figures
from tools import worked_example
from vllm_h2o.metrics import COUNTERS, GAUGES
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.option import table_row
from vllm_h2o.options.refusals import ANOTHER_MODEL, IN_LAYERS, REFUSALS, WHY_IN_LAYERS, WHY_OPTION
from vllm_h2o.policy import POLICIES, SCORES
from vllm_h2o.policy.base import BUDGET_OPTIONS

DOCS = Path(__file__).parents[1] / "docs"
ZOO = Path(__file__).parents[1] / "tests/e2e/zoo.csv"
"""Written by ``python -m tools.zoo``; a test runs each family and compares."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def options() -> str:
    """Every option, from its one description."""
    return markdown(("option", "meaning", "default"), ()) + "".join(
        f"{table_row(field)}\n" for field in fields(KVPolicyConfig)
    )


def policies() -> str:
    """Every policy, and the options that it reads."""
    rows = [
        (f"`{p.name}`", p.summary, _names(p.options - BUDGET_OPTIONS) or "-")
        for p in POLICIES.values()
    ]
    return markdown(("policy", "keeps", "options of its own"), rows) + (
        f"\nAll but `full` also read {_names(BUDGET_OPTIONS)}. `kernels` is for every policy.\n"
    )


def _names(options: Collection[str]) -> str:
    """Some options by name, in the order of the table."""
    return ", ".join(f"`{f.name}`" for f in fields(KVPolicyConfig) if f.name in options)


def scores() -> str:
    """Every way to turn attention into a rank."""
    return markdown(
        ("score", "meaning"), [(f"`{name}`", score.meaning) for name, score in SCORES.items()]
    )


def refusals() -> str:
    """What is refused: of the finished config, of a layer, and of an option."""
    rows = [(refusal.what, refusal.why, refusal.remedy) for refusal in REFUSALS]
    rows.append((f"in a layer: {', '.join(IN_LAYERS.values())}", WHY_IN_LAYERS, ANOTHER_MODEL))
    rows += [
        (f"`{name}` of your own", why, f"leave {name} out") for name, why in WHY_OPTION.items()
    ]
    return markdown(("refused", "why", "what to do"), rows)


def metrics() -> str:
    """What ``/metrics`` shows."""
    counters = [(f"`{name}_total`", "counter", meaning) for name, meaning in COUNTERS.items()]
    gauges = [(f"`{name}`", "gauge", meaning) for name, meaning in GAUGES.items()]
    return markdown(("`vllm:kv_policy_...`", "kind", "meaning"), counters + gauges)


def families() -> str:
    """What became of a tiny model of each family, by version of vLLM."""
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
    return markdown(("family", "what became of it", "vLLM"), table)


PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "options.md": {"options": options, "policies": policies, "scores": scores},
    "compatibility.md": {"families": families, "refusals": refusals},
    "metrics.md": {"metrics": metrics},
    "performance.md": {"streams": streams_figures.table},
    "design.md": {
        "weights": worked_example.weights_table,
        **{
            f"example of {name}": partial(worked_example.example, name)
            for name in worked_example.CASES
        },
    },
}
"""File -> name of a part -> what writes it."""


def part_of(text: str, name: str) -> tuple[int, int]:
    """Where a part lies between its markers.

    Raises:
        ValueError: when a marker is missing.

    """
    begin = f"<!-- {name}: written by `python -m tools.docs` -->\n"
    start = text.index(begin) + len(begin)
    return start, text.index(f"<!-- end of {name} -->\n", start)


def written(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """``text`` with its parts as the code has them now."""
    for name, part in parts.items():
        start, end = part_of(text, name)
        text = text[:start] + part() + text[end:]
    return text


if __name__ == "__main__":
    for file_name, parts in PARTS.items():
        path = DOCS / file_name
        path.write_text(written(path.read_text(encoding="utf-8"), parts), encoding="utf-8")
