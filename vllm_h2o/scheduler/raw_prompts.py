# SPDX-License-Identifier: Apache-2.0
"""Stores and loads the first pages of prompts, as they are before eviction, by ExampleConnector.

vLLM's connector copies whole pages as bytes: K, V, scores and positions. A prompt's first pages are
those that the prefix cache may supply to it (``Ledger.max_cached_tokens``). They are written once,
and survivors are copied out of them, so a loaded page is one found in the prefix cache::

    a new prompt, its first pages in files         -> loads them, computes the rest
    ... not in files, this step computes the last  -> the step stores them, before it evicts
    a preempted request, or a session              -> neither

Only the scheduler's part is this module's; the workers' part is vLLM's own, and gets its orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from vllm_h2o.errors import IntegrityError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.scheduler.block_manager import HeavyHitterManager
from vllm_h2o.scheduler.origin import made_by
from vllm_h2o.scheduler.weights import Weights

logger = init_logger("vllm.kv_policy")


class RawPrompts(ExampleConnector):
    """vLLM's ExampleConnector, in the scheduler.

    A name of files covers all that pages depend on: tokens, salt, model, policy and versions.

    Args:
        vllm_config: of the engine, with one worker.
        kv_cache_config: of one group.
        manager: of the group.
        requests: vLLM's live requests, by id.

    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        manager: HeavyHitterManager,
        requests: Mapping[str, Request],
    ) -> None:
        super().__init__(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        self._layer_names = group.layer_names
        self._manager, self._requests = manager, requests
        self._made_by = made_by(vllm_config, KVPolicyConfig.required(vllm_config))
        self._is_closed = False
        self._folders: dict[str, Path] = {}

    def close(self) -> None:
        """Store and load nothing more: weights may be others than the files'."""
        if not self._is_closed:
            logger.warning(
                "prompts are neither stored nor loaded any more: the cache was reset, or weights "
                "may have changed"
            )
        self._is_closed = True

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens files have after the computed ones, and False: loads are awaited.

        Args:
            request: a request that holds nothing.
            num_computed_tokens: tokens found in the prefix cache: whole pages.

        """
        end = self._end(request)
        if end <= num_computed_tokens or not self._has_files(request, end):
            return 0, False
        return end - num_computed_tokens, False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleConnectorMetadata:
        """Order the loads and stores of a step.

        Raises:
            IntegrityError: when a request that is to load pages is not in the step.

        """
        orders = ExampleConnectorMetadata()
        for request_id, num_new in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            start = request.num_computed_tokens
            loads = self._requests_need_load.pop(request_id, None) is not None
            end = self._end(request) if start < request.num_prompt_tokens else 0
            computes = start < end <= start + num_new
            if loads or (computes and not self._has_files(request, end)):
                row = self._manager.req_to_blocks[request_id][: end // self._block_size]
                orders.add_request(
                    token_ids=request.prompt_token_ids[: end + 1],  # vLLM leaves the last out
                    block_ids=[block.block_id for block in row],
                    block_size=self._block_size,
                    is_store=not loads,
                    mm_hashes=self._names(request),
                )
        if self._requests_need_load:
            raise IntegrityError(f"requests {[*self._requests_need_load]} do not load their pages")
        return orders

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; nothing is sent after its end."""
        self._folders.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def _end(self, request: Request) -> int:
        """Tokens of the pages that may be stored and loaded, but not the prompt's last token."""
        if self._is_closed or request.num_preemptions or request.resumable:
            return 0
        end = self._manager.ledger.max_cached_tokens(self._manager.info_of(request))
        end = min(end, request.num_prompt_tokens - 1)
        return end // self._block_size * self._block_size

    def _names(self, request: Request) -> list[str]:
        """Names that tell files apart besides tokens; vLLM has those of images in their place."""
        return [self._made_by, request.cache_salt or ""]

    def _has_files(self, request: Request, end: int) -> bool:
        """Whether every layer's file of the tokens [0, end) can be read, and is whole."""
        folder = self._folders.get(request.request_id)
        if folder is None:
            tokens = torch.tensor(request.prompt_token_ids[:end])
            folder = Path(self._generate_foldername_debug(tokens, self._names(request)))
            self._folders[request.request_id] = folder
        num_bytes = end // self._block_size * self._manager.kv_cache_spec.page_size_bytes
        files = (folder / f"{name}.safetensors" for name in self._layer_names)
        try:
            return all(_is_whole(file, num_bytes) for file in files)
        except OSError:
            return False


def _is_whole(path: Path, num_bytes: int) -> bool:
    """Whether a file of safetensors holds a number of bytes after its header.

    Raises:
        OSError: when it cannot be read.

    """
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size == 8 + header + num_bytes


class LoadsPrompts(Scheduler):
    """vLLM's scheduler, whose connector is asked for whole pages of prompts alone."""

    connector: Any

    def load_prompts(self, manager: HeavyHitterManager) -> Weights:
        """Put :class:`RawPrompts` in place of vLLM's connector.

        Args:
            manager: the policy's, once it is bound.

        Returns:
            The weights that files are of. Others end loads and stores.

        """
        # A liberty: vLLM makes connectors by their names, without the policy's block manager.
        self.connector = RawPrompts(self.vllm_config, self.kv_cache_config, manager, self.requests)
        # A liberty: loads are part of a step, and steps run in order.
        self.defer_block_free = False
        # A liberty: nobody waits for what is stored.
        self.requires_kv_delivery = False
        return Weights(self.connector.close)

    def reset_prefix_cache(self, *args: bool, **kwargs: bool) -> bool:
        """Reset the cache, and read and write no more files."""
        if self.connector is not None:
            self.connector.close()
        return bool(super().reset_prefix_cache(*args, **kwargs))
