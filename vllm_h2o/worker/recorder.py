# SPDX-License-Identifier: Apache-2.0
"""Records which tokens the pages hold, their scores and masses, while steps run.

In the worker, and not between two steps of whoever asks: an engine in a process of its own runs
ahead of its callers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.pages import num_pages
from vllm_h2o.wire import RequestPlan, ResidencyPlan
from vllm_h2o.worker.attention import HeavyHitterImpl
from vllm_h2o.worker.terms import PromptTerms

Frame = dict[str, Any]
"""Contents of one request after one step, in plain values that any executor can send.

``request_id``, ``logical_len``; ``layers``: their indices; ``first_head``, ``num_kv_heads``: the KV
heads of this rank; ``positions``, ``scores`` and, where tokens are merged, ``masses``: bytes of
[layers, heads, kept], int32, float32 and float32; no bytes where none are. A head that holds less
than another ends with :data:`NOTHING`, scores of -inf and masses of 0. ``terms``: where a prompt
was packed, what its tokens' scores were made of, by name: bytes of [layers, heads, tokens],
float32.
"""

NOTHING = 2**31 - 1
"""In the place of a position, where there is no token."""


@dataclass
class Recorder:
    """The records so far.

    Args:
        every: past the prompt, record every ``every``-th token, beginning with the first.
        frames: the records of all requests, in the order of steps.
        latest: the last record of each request, where it was not due: kept until the next.
        num_steps: steps past the prompt, by request.

    """

    every: int
    frames: list[Frame] = field(default_factory=list)
    latest: dict[str, Frame] = field(default_factory=dict)
    num_steps: Counter[str] = field(default_factory=Counter)

    def is_due(self, request_id: str, plan: RequestPlan) -> bool:
        """Whether this step is to be recorded: survivors were packed, or enough tokens went by."""
        packs = plan.num_survivors > 0
        if plan.in_prompt:
            return packs
        self.num_steps[request_id] += 1
        return packs or (self.num_steps[request_id] - 1) % self.every == 0

    def add(self, frame: Frame, due: bool) -> None:
        """Enter a record; one that is not due stays only if none follows."""
        self.latest.pop(frame["request_id"], None)
        if due:
            self.frames.append(frame)
        else:
            self.latest[frame["request_id"]] = frame


def heads_of_rank(vllm_config: VllmConfig, num_kv_heads: int) -> range:
    """The KV heads of the whole model that this tensor-parallel rank has: ``num_kv_heads`` of them.

    Where there are more ranks than heads, neighbours have the same one.
    """
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    if num_ranks == 1:
        return range(num_kv_heads)
    total = vllm_config.model_config.get_total_num_kv_heads()
    start = get_tensor_model_parallel_rank() * total // num_ranks
    return range(start, start + num_kv_heads)


class RecordsPages:
    """Mixed into the worker, in front of what runs its steps; called through ``collective_rpc``."""

    model_runner: Any
    vllm_config: Any
    use_v2_model_runner: bool
    _recorder: Recorder | None = None
    _terms: PromptTerms

    def start_recording(self, every: int) -> None:
        """Record from the next step on: the end of each prompt, and each ``every``-th token.

        Raises:
            UnsupportedError: where positions roll.

        """
        if KVPolicyConfig.required(self.vllm_config).rolls:
            raise UnsupportedError(
                "a recording",
                "positions roll: they are counted anew among what is resident",
                "they do not say which tokens of the text these are",
                "record with --kv-policy-config.positions original",
            )
        self.finish_step()
        self._recorder, self._terms = Recorder(every), PromptTerms()
        for layer in self._recorded_layers().values():
            layer.impl.watch = self._terms.add

    def take_recording(self) -> list[Frame]:
        """Stop, and hand out what was recorded, the last step of each request included."""
        self.finish_step()
        recorder, self._recorder, self._terms = self._recorder, None, PromptTerms()
        for layer in self._recorded_layers().values():
            layer.impl.watch = None
        return [] if recorder is None else [*recorder.frames, *recorder.latest.values()]

    def finish_step(self) -> ResidencyPlan | None:
        """Finish a step, and read the pages after it while a recording is on."""
        finished: ResidencyPlan | None = super().finish_step()  # type: ignore[misc]
        if self._recorder is not None and finished is not None:
            for request_id, plan in finished.requests.items():
                due = self._recorder.is_due(request_id, plan)
                self._recorder.add(self._frame(request_id, plan), due)
        return finished

    def _frame(self, request_id: str, plan: RequestPlan) -> Frame:
        layers = self._recorded_layers()
        held = [pair for layer in layers.values() for pair in self._held(layer, request_id, plan)]
        num_kv_heads = len(held) // len(layers)
        fill = (NOTHING, float("-inf"), 0.0)
        positions, scores, *masses = (
            pad_sequence(list(view), True, nothing).cpu().numpy().tobytes()
            for view, nothing in zip(zip(*held, strict=True), fill, strict=False)
        )
        return {
            "request_id": request_id,
            "logical_len": plan.logical_end,
            "layers": [*layers],
            "first_head": heads_of_rank(self.vllm_config, num_kv_heads).start,
            "num_kv_heads": num_kv_heads,
            "terms": self._terms_of(request_id, plan, layers),
            "positions": positions,
            "scores": scores,
            "masses": b"".join(masses),
        }

    def _recorded_layers(self) -> dict[int, Any]:
        """The layers with a cache of the policy's, by index, in order."""
        context = self.vllm_config.compilation_config.static_forward_context
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        cached = {name for group in groups for name in group.layer_names}
        layers = {
            extract_layer_index(name): layer
            for name, layer in context.items()
            if name in cached
            and isinstance(layer, Attention)
            and isinstance(layer.impl, HeavyHitterImpl)
        }
        return dict(sorted(layers.items()))

    def _terms_of(
        self, request_id: str, plan: RequestPlan, layers: dict[int, Any]
    ) -> dict[str, bytes]:
        """The values of a prompt's tokens by term, where some tokens are evicted."""
        shared = plan.first_block_idx or plan.pack_block_idx  # others' first pages, too
        if not (plan.in_prompt and plan.num_survivors) or shared:
            return {}
        names = [layer.layer_name for layer in layers.values()]
        first = int(self._table_row(request_id, names[0])[plan.first_block_idx])
        terms = self._terms.of(first, names)
        # A last chunk of one token has no terms.
        terms = {
            name: pad(term, (0, plan.logical_end - term.shape[-1])) for name, term in terms.items()
        }
        return {name: term.cpu().numpy().tobytes() for name, term in terms.items()}

    def _held(
        self, layer: Any, request_id: str, plan: RequestPlan
    ) -> list[tuple[torch.Tensor, ...]]:
        """[kept] positions, scores, perhaps masses, of each KV head."""
        cache: LayerCache = layer.impl.cache_of(layer.kv_cache)
        views = (cache.position, cache.score, *(() if cache.mass is None else (cache.mass,)))
        blocks = self._blocks(request_id, layer.layer_name, plan, cache.block_size)
        if plan.is_split:
            strips, free = cache.rows_of_split(blocks), int(plan.splits)
            ends = [rows.numel() * cache.block_size - free for rows in strips]
            return [
                tuple(view[rows].flatten()[:end] for view in views)
                for rows, end in zip(strips, ends, strict=True)
            ]
        rows = cache.rows(blocks)
        held = [view[rows].flatten(1)[:, : plan.resident_end] for view in views]
        return [tuple(view[h] for view in held) for h in range(cache.num_kv_heads)]

    def _blocks(
        self, request_id: str, layer_name: str, plan: RequestPlan, block_size: int
    ) -> torch.Tensor:
        """The request's pages after the step, from the runner's block table."""
        start = plan.pack_block_idx or plan.first_block_idx
        own = slice(start, start + num_pages(plan.held_end, block_size))
        return self._table_row(request_id, layer_name)[own].long()

    def _table_row(self, request_id: str, layer_name: str) -> torch.Tensor:
        """[pages], int32: the request's row of the runner's block table."""
        runner = self.model_runner
        groups = runner.kv_cache_config.kv_cache_groups
        (group,) = (i for i, group in enumerate(groups) if layer_name in group.layer_names)
        if self.use_v2_model_runner:
            row = runner.req_states.req_id_to_index[request_id]
            table = runner.block_tables.block_tables[group].gpu
        else:
            row = runner.input_batch.req_id_to_index[request_id]
            table = runner.input_batch.block_table[group].get_device_tensor(row + 1)
        return table[row]
