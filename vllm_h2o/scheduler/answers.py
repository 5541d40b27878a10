# SPDX-License-Identifier: Apache-2.0
"""Answers a request that asks to be kept when its files are there, for other engines to read.

Files are written in the step after the one that samples a request's last token. So the end of its
answer waits for one step more.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from vllm_h2o.scheduler.folder import Folder
from vllm_h2o.scheduler.handoff import HandsOver


class AnswersLate(HandsOver):
    """vLLM's scheduler, which holds back the end of an answer until the request's files are there.

    Attributes:
        folder: keeps what requests ask for; None: nothing does.

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.folder: Folder | None = None
        self._late: dict[str, tuple[int, EngineCoreOutput]] = {}

    def has_requests(self) -> bool:
        """Whether there is anything to do: a late answer is given after a step."""
        return bool(self._late) or super().has_requests()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process the sampled tokens; give answers whose files this step has written."""
        if self.folder is not None:
            self.folder.end(scheduler_output.residency_plan)
            for request_id in self._late.keys() - self.folder.unwritten.keys():
                self._own_answers.append(self._late.pop(request_id))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        unwritten = self.folder.unwritten if self.folder is not None else {}
        for client_index, each in outputs.items():
            for output in [o for o in each.outputs if o.finished and o.request_id in unwritten]:
                each.outputs.remove(output)
                self._late[output.request_id] = client_index, output
        return outputs
