# SPDX-License-Identifier: Apache-2.0
"""The process with Model Runner V2: a job a line on stdin, what came of it a line on stdout.

An error ends it, and is on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from tests.e2e.gpu_runner import device


def main() -> None:
    """Until stdin ends; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device.prepare()
    from tests.e2e.gpu_runner.job import Job, run

    for line in sys.stdin:
        print(json.dumps(asdict(run(Job(**json.loads(line))))), file=answers, flush=True)


if __name__ == "__main__":
    main()
