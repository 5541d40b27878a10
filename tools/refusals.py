"""The table of what is refused, in README.md, from the code that refuses it.

::

    python -m tools.refusals    write the table; a test compares
"""

from __future__ import annotations

from pathlib import Path

from vllm_h2o.options.refusals import ANOTHER_MODEL, IN_LAYERS, REFUSALS, WHY_IN_LAYERS, WHY_OPTION

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- refusals: written by `python -m tools.refusals` -->\n"
END = "<!-- end of refusals -->\n"


def table() -> str:
    """One row for each refusal: of the finished config, of a layer, and of an option."""
    rows = [(refusal.what, refusal.why, refusal.remedy) for refusal in REFUSALS]
    rows.append((f"in a layer: {', '.join(IN_LAYERS.values())}", WHY_IN_LAYERS, ANOTHER_MODEL))
    rows += [
        (f"`{name}` of your own", why, f"leave {name} out") for name, why in WHY_OPTION.items()
    ]
    lines = ["| refused | why | what to do |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def written(readme: str) -> str:
    """``readme`` with the table between its two markers.

    Raises:
        ValueError: when a marker is missing.

    """
    head, rest = readme[: readme.index(BEGIN)], readme[readme.index(BEGIN) :]
    return head + BEGIN + table() + rest[rest.index(END) :]


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
