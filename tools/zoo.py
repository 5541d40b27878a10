# SPDX-License-Identifier: Apache-2.0
"""Run a tiny model of each decoder family on the installed vLLM, and write tests/e2e/zoo.csv.

::

    python -m tools.zoo                    all of them (five minutes)
    python -m tools.zoo "GPT-J" "OLMo 2"   some, by name
    .venv-033/bin/python -m tools.zoo      on the other vLLM
    python -m tools.docs                   then, the table in docs/compatibility.md

A family that fails is printed and not written.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import tests.conftest  # noqa: F401  # the engine's settings, before vLLM is imported


def main(names: Collection[str]) -> int:
    """Run the families of these names, or all. Returns 1 if one fails."""
    from tests.e2e import zoo
    from vllm_h2o.patches._patch import installed_version, minor_of

    results = zoo.recorded() if zoo.RESULTS.exists() else {}
    minor, failed = minor_of(installed_version()), 0
    for family in zoo.FAMILIES:
        if names and family.name not in names:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                became = zoo.become(family, Path(folder))
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            results.pop((family.name, minor), None)
            failed += 1
            print(f"{family.name}: failed: {error!r}"[:500], flush=True)
            continue
        results[family.name, minor] = became
        print(f"{family.name}: {became}", flush=True)
    zoo.write(results)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
