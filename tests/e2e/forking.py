# SPDX-License-Identifier: Apache-2.0
"""vLLM's command, but for processes that are forked: on a CPU vLLM spawns all of them.

One that is spawned imports what its parent has imported, and takes ten seconds or more for it.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

FORKING = (sys.executable, "-m", "tests.e2e.forking")
"""In the place of :data:`benchmarks.soak.server.VLLM`."""
_context = multiprocessing.get_context


def _forked(method: str | None = None) -> Any:
    return _context("fork" if method == "spawn" else method)


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    multiprocessing.get_context = _forked
    main()
