# SPDX-License-Identifier: Apache-2.0
"""Keeps sessions of streaming input within what vLLM allows, and lets them wait through a reset.

- vLLM checks the length of each part alone. The session's length is known here only: a part may be
  queued while the one before it is still being answered. In stock vLLM a part that makes the
  session longer than ``max_model_len`` ends the engine. Here its answer is an error without tokens.
- A session that waits for its next part holds pages. In stock vLLM a reset of the cache that
  preempts running requests fails then. Here the session gives its pages back and begins anew.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_h2o.errors import ConfigError

logger = init_logger("vllm.kv_policy")


class BoundsSessions(AsyncScheduler):
    """vLLM's scheduler, which answers a part without room with an error. The session goes on.

    ``_own_answers`` are those that vLLM does not give, by client; the next step's outputs end them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own_answers: list[tuple[int, EngineCoreOutput]] = []

    def add_request(self, request: Request) -> None:
        """Take a request, or a part of a session if it has room."""
        session = self.requests.get(request.request_id)
        if (
            session is None
            or session.status != RequestStatus.WAITING_FOR_STREAMING_REQ
            or not request.resumable
            or not self._refuses(session, session.num_computed_tokens, request.prompt_token_ids)
        ):
            super().add_request(request)

    def _handle_stopped_request(self, request: Request) -> bool:
        """End a request, or begin the session's next part that has room."""
        parts, length = request.streaming_queue, request.num_computed_tokens
        length -= request.num_output_placeholders
        while parts and parts[0] and self._refuses(request, length, parts[0].prompt_token_ids):
            parts.popleft()
        return super()._handle_stopped_request(request)

    def _refuses(self, session: Request, length: int, part: list[int] | None) -> bool:
        """Refuse a part after ``length`` tokens unless it leaves room for one of the answer's."""
        num_new = len(part or ())
        if length + num_new < self.max_model_len:
            return False
        error = ConfigError(
            f"a part of {num_new} tokens",
            f"its session has {length} tokens already",
            f"max_model_len={self.max_model_len} includes one token of the answer",
            "begin another session, or give the server a larger --max-model-len",
        )
        logger.warning("request %s: %s", session.request_id, error)
        # With FinishReason.ERROR the front end of vLLM 0.33 would end the session.
        output = EngineCoreOutput(
            session.request_id, [], finish_reason=FinishReason.LENGTH, stop_reason=str(error)
        )
        self._own_answers.append((session.client_index, output))
        return True

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset the cache; where that preempts running requests, waiting sessions are, too."""
        holding = [*self.kv_holding_waiting] if reset_running_requests else []
        for session in (request for request in holding if request.resumable):
            self._free_request_blocks(session)
            self.encoder_cache_manager.free(session)
            if session.status == RequestStatus.WAITING:
                session.num_computed_tokens = 0
        return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))

    def has_requests(self) -> bool:
        """Whether there is anything to do: a step gives answers of our own, too."""
        return bool(self._own_answers) or bool(super().has_requests())

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process the sampled tokens, and give answers of our own after those before them."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client_index, output in self._own_answers:
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
        self._own_answers.clear()
        return outputs
