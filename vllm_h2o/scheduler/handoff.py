# SPDX-License-Identifier: Apache-2.0
"""Hands requests to another server, and goes on with those of others (options/handoff.py).

The first server keeps the cache of a request in files, and gives its tokens to the second one. The
second takes them as the end of the prompt, finds the files by all tokens, and gives the first
server's tokens with the first one of its own: the answer is whole.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.handoff import SEND, TAKE, Handoff, digest
from vllm_h2o.options.request import extra_args_of
from vllm_h2o.scheduler.folder import Folder
from vllm_h2o.scheduler.sessions import BoundsSessions

logger = init_logger("vllm.kv_policy")

OTHER = (
    "another server hands over requests, but it has another model or version, or this one has no "
    "folder: their prompts are computed here"
)
"""Why a request is not gone on with."""


class HandsOver(BoundsSessions):
    """vLLM's scheduler, which gives a request to another server, or takes it from one.

    Attributes:
        folder: keeps what requests ask for; None: nothing does.

    """

    policy_config: KVPolicyConfig
    folder: Folder | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun: dict[str, list[int]] = {}  # tokens of answers that another server has begun

    def add_request(self, request: Request) -> None:
        """Take a request; where another server has sampled tokens of it, with these."""
        given = extra_args_of(request).get(TAKE)
        tokens = self._tokens_of(Handoff.of(given)) if given else []
        room = min(request.max_tokens, self.max_model_len - request.num_tokens)
        if tokens and len(tokens) >= room:
            ended = EngineCoreOutput(
                request.request_id, tokens[:room], finish_reason=FinishReason.LENGTH
            )
            self._own_answers.append((request.client_index, ended))
            return
        if tokens:
            self._begin(request, tokens)
        super().add_request(request)

    def _tokens_of(self, handoff: Handoff) -> list[int]:
        """The tokens of another server; none if that computes something else."""
        if self.folder is not None and self.folder.made_by == handoff.made_by:
            return list(handoff.token_ids)
        logger.warning_once(OTHER)
        return []

    def _begin(self, request: Request, tokens: list[int]) -> None:
        """Make tokens of an answer the end of its prompt."""
        self._begun[request.request_id] = tokens
        # A liberty: as vLLM does for a session, but for the list, which the front end may share.
        request.prompt_token_ids = [*request.prompt_token_ids, *tokens]
        request._all_token_ids.extend(tokens)
        request.update_block_hashes()
        request.num_prompt_tokens += len(tokens)
        request.max_tokens -= len(tokens)
        params = request.sampling_params
        params.min_tokens = max(params.min_tokens - len(tokens), 0)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process the sampled tokens; before an answer's first come those of another server."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._begun:
            for output in (o for each in outputs.values() for o in each.outputs):
                if output.new_token_ids or output.finished:
                    output.new_token_ids[:0] = self._begun.pop(output.request_id, ())
            for request_id in self._begun.keys() - self.requests.keys():
                del self._begun[request_id]
        return outputs

    def _free_request(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """End a request; what is kept of it is given to another server if it asks for that."""
        transfer, encoder = super()._free_request(request, *args, **kwargs)
        folder = self.folder
        is_cut = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        is_kept = folder is not None and folder.take_saved(request.request_id)
        if folder is None or not is_kept or not is_cut or SEND not in extra_args_of(request):
            return transfer, encoder
        tokens = list(request.output_token_ids)
        handoff = Handoff(tokens, folder.made_by, digest(request.prompt_token_ids))
        return handoff.params(self.policy_config), encoder
