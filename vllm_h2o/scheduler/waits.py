# SPDX-License-Identifier: Apache-2.0
"""Lets a request wait while the files from which it continues are checked.

A check reads the whole file in a thread (checked.py). Meanwhile vLLM passes the request over, as
one whose grammar is being compiled: it keeps its place in the queue, and others are admitted.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_h2o.scheduler.answers import AnswersLate
from vllm_h2o.scheduler.block_manager import HeavyHitterManager
from vllm_h2o.scheduler.conversations import Conversations
from vllm_h2o.scheduler.ledger import Ledger

IDLE = 0.005
"""Seconds for which a step without any request waits for a check: it may be aborted after that."""


class WaitsForChecks(AnswersLate):
    """vLLM's scheduler, which passes over requests whose files are being checked.

    Attributes:
        checking: ids of the requests that were passed over in the last step.

    """

    ledger: Ledger
    block_manager: HeavyHitterManager
    conversations: Conversations | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checking: set[str] = set()
        # Replicas may step together: one that waits holds up the others.
        self._steps_alone = self.vllm_config.parallel_config.data_parallel_size == 1

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step."""
        self.checking.clear()
        return super().schedule(*args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a request may be admitted now. Where no other is there, its check is waited for.

        The last request of the queue comes here when all before it are admitted or passed over.
        """
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self.folder is None or request.num_computed_tokens:
            return True
        is_last = self._steps_alone and not self.running and len(self.waiting) == 1
        until = time.monotonic() + (IDLE if is_last else 0)
        while self._is_checking(request):
            left = until - time.monotonic()
            if left <= 0:
                self.checking.add(request.request_id)
                return False
            self.folder.checked.wait(left)
        return True

    def _is_checking(self, request: Request) -> bool:
        budget = self.ledger.budget_of(self.block_manager.info_of(request))
        return self.conversations is not None and self.conversations.is_checking(request, budget)

    def shutdown(self) -> None:
        """Begin no more checks."""
        if self.folder is not None:
            self.folder.checked.shut_down()
        super().shutdown()
