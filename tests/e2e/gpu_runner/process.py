# SPDX-License-Identifier: Apache-2.0
"""The other process, as a test sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from tests.e2e.gpu_runner.job import Job, Outcome

V2 = "vllm.v1.worker.gpu.model_runner"


class OtherProcess:
    """Runs jobs with Model Runner V2."""

    process: subprocess.Popen[str] | None = None

    def run(self, job: Job) -> Outcome:
        """As :func:`job.run` does it here; in a new process, where the last has failed."""
        if self.process is None:
            command = [sys.executable, "-m", "tests.e2e.gpu_runner"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen(command, text=True, **pipes)
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(asdict(job)), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.end()
        assert answer, "the process ended: its last words are on stderr"
        outcome = Outcome(**json.loads(answer))
        assert outcome.runner == V2
        assert outcome.pages[0] == outcome.pages[1]
        return outcome

    def end(self) -> None:
        """Whatever it is doing."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process = None
