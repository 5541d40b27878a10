# SPDX-License-Identifier: Apache-2.0
"""The engine's real Q, K, V of a run, followed by the reference after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.e2e.compared import Compared, Where
from tests.e2e.harness import Probe, engine, generate
from tests.e2e.ties import WatchedHead
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.float8 import as_read
from vllm_h2o.kernels.reference import Rolling
from vllm_h2o.kernels.split import pack_layer
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Ranking, Term
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker.after_step import Packing
from vllm_h2o.worker.attention import HeavyHitterImpl
from vllm_h2o.worker.reconstruction import Reconstruction
from vllm_h2o.worker.step import PublishesSteps, Step, current_step


@dataclass
class Oracle(Compared):
    """Follows every layer, KV head and request of an engine with the reference, in float64.

    Args:
        num_unequal: times that KV heads of a layer got unequal numbers of slots.
        num_accepted: drafts that were accepted, and followed.
        num_rejected: drafts that were rejected.
        num_scaled: steps of heads whose K and V have scales.
        max_error: largest difference of an attention output from the reference's.
        requests: those that were scheduled so far, by id.
        waiting: layers of the running step, to be followed when its survivors are packed.
        drafted: steps with drafts, to be followed when it is known how many were accepted.
        order: of the running step's rows, the requests.
        readings: queries of the running step's second reading, and what they see of it, by layer
            name and request id.
        sharing: heads that share slots from this step on, with the size of a page, and tenths.
        comparing: what is compared at the end of the running step.

    """

    num_unequal: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_scaled: int = 0
    max_error: float = 0.0
    requests: dict[str, Any] = field(default_factory=dict)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    drafted: dict[Where, tuple[RequestPlan, tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    readings: dict[tuple[str, str], list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    sharing: dict[tuple[str, str], tuple[list[WatchedHead], int, int]] = field(default_factory=dict)
    comparing: list[Callable[[], None]] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Oracle:
        """Follow every forward of the policy's attention from now on."""
        original = HeavyHitterImpl.forward

        def forward(impl: HeavyHitterImpl, layer: Any, *tensors: Any, **kwargs: Any) -> Any:
            query, key, value, kv_cache, metadata, output = (*tensors, *kwargs.values())[:6]
            result = original(impl, layer, query, key, value, kv_cache, metadata, output)
            if metadata is not None and metadata.reading is not None:
                self.take_reading(impl, layer.layer_name, metadata.reading, query, key)
                return result
            step = current_step() if metadata is not None else None
            if step is not None:
                cache = impl.cache_of(kv_cache)
                tensors = (query.clone(), key.clone(), value.clone(), output.clone())
                follow = partial(self.follow, step, impl, layer.layer_name, cache, metadata)
                self.waiting.append(partial(follow, *tensors))
            return result

        order_of = Step.order

        def order(step: Step, common: CommonAttentionMetadata) -> list[str]:
            self.order = order_of(step, common)
            self.requests |= self.scheduler.requests
            return self.order

        finish = PublishesSteps.finish_step

        def finish_step(worker: PublishesSteps) -> Any:
            result = finish(worker)
            waiting, self.waiting = self.waiting, []
            for follow in waiting:
                follow()
            for heads, page_size, tenths in self.sharing.values():
                pack_layer(heads, page_size, tenths)
                self.num_unequal += len({head.budget.capacity for head in heads}) > 1
            comparing, self.comparing = self.comparing, []
            for compare in comparing:
                compare()
            self.sharing, self.readings = {}, {}
            return result

        monkeypatch.setattr(HeavyHitterImpl, "forward", forward)
        monkeypatch.setattr(Step, "order", order)
        monkeypatch.setattr(PublishesSteps, "finish_step", finish_step)
        return self

    def follow(
        self,
        step: Step,
        impl: HeavyHitterImpl,
        layer_name: str,
        cache: LayerCache,
        metadata: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """One layer of one step: all requests, all KV heads."""
        tables = {chunk.tokens.start: chunk.block_table for chunk in metadata.prompts}
        for batch in metadata.decodes:
            tables |= dict(zip(batch.field("token").tolist(), batch.block_table, strict=True))
        if isinstance(step.after.pack, Packing):  # a decode's table has no more than it reads
            tables |= {chunk.tokens.start: chunk.block_table for chunk in step.after.pack.chunks}
        start = 0
        for request_id in self.order:
            plan = step.plan.requests[request_id]
            tokens = slice(start, start := start + plan.num_new)
            table = tables[tokens.start]
            rows = cache.rows(table)
            victims = None if cache.victims is None else cache.victims[table[0]]
            if plan.overwrites and metadata.scoring.merge:
                strips = cache.rows_of_split(table) if plan.attends_split else list(rows)
                for head, strip in enumerate(strips):
                    self.compare_merge((layer_name, head, request_id), plan, cache, strip)
            for head in range(impl.num_kv_heads):
                where = (layer_name, head, request_id)
                both = zip((key[tokens], value[tokens]), cache.scales, strict=True)
                new = (query[tokens], *(as_read(x, cache.key.dtype, scale) for x, scale in both))
                self.num_scaled += cache.scales != (1.0, 1.0)
                if request_id in step.plan.continued:
                    self.heads[where] = self._next_turn(where, plan)
                elif self._begins(where, plan):
                    self.heads[where] = self._head(impl, metadata, plan, cache, rows[head])
                    if impl.sink_logits is not None:
                        own = impl.sink_logits.chunk(impl.num_kv_heads)[head]
                        self.heads[where].sink_logits = own.double()
                self._settle(impl, where, plan)
                out = output[tokens].view(*query[tokens].shape)
                if plan.has_drafts:
                    self.drafted[where] = (plan, (*new, out))
                else:
                    self._follow_tokens(impl, where, plan, (*new, out))
            if plan.has_drafts:
                continue
            if plan.splits:
                own = [self.heads[layer_name, h, request_id] for h in range(impl.num_kv_heads)]
                which = (request_id, "" if cache.num_heads_of_all else layer_name)
                none: list[WatchedHead] = []
                how = (cache.block_size, cache.shared_tenths)
                self.sharing.setdefault(which, (none, *how))[0].extend(own)
            about = (layer_name, request_id, plan, cache, table, victims)
            self.comparing.append(partial(self.compare_heads, *about))

    def _begins(self, where: Where, plan: RequestPlan) -> bool:
        """Whether a request is new, or is computed again from its start, or from a prefix."""
        head = self.heads.get(where)
        return head is None or (plan.in_prompt and plan.logical_start < max(head.logical_len, 1))

    def take_reading(
        self,
        impl: HeavyHitterImpl,
        layer_name: str,
        read: Reconstruction,
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> None:
        """The queries that a layer has when prompts are read again, in order of their tokens.

        With them goes the log-sum-exp of their logits of the block, read again up to each.
        """
        for block in read.blocks:
            rows = query[block.chunk.tokens].double()
            keys = key[block.chunk.tokens].double()
            grouped = rows.unflatten(1, (keys.shape[1], -1)) * impl.scale
            logits = torch.einsum("thgd,lhd->hgtl", grouped, keys)
            later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu_(1)
            sums = logits.masked_fill_(later, -torch.inf).logsumexp(-1).flatten(0, 1).T
            self.readings.setdefault((layer_name, block.request_id), []).append((rows, sums))

    def _next_turn(self, where: Where, plan: RequestPlan) -> WatchedHead:
        """Where conversations are continued: what came of an earlier request."""
        raise NotImplementedError

    def _settle(self, impl: HeavyHitterImpl, where: Where, plan: RequestPlan) -> None:
        """Follow the tokens of the last step that were accepted, one by one, as without drafts."""
        if plan.in_prompt and not self.heads[where].in_prompt:
            # The next part of a session: more of the prompt, and no victim.
            self.heads[where].in_prompt, self.heads[where].victim = True, None
        last, tensors = self.drafted.pop(where, (plan, ()))
        if plan.in_prompt or not tensors:
            assert plan.num_unscored == 0
            return
        assert 1 <= plan.num_unscored <= last.num_new
        self.num_accepted += plan.num_unscored - 1
        self.num_rejected += last.num_new - plan.num_unscored
        for i in range(plan.num_unscored):
            one = replace(last, logical_start=last.logical_start + i, num_new=1)
            self._follow_tokens(impl, where, one, tuple(t[i : i + 1] for t in tensors))

    def _follow_tokens(
        self,
        impl: HeavyHitterImpl,
        where: Where,
        plan: RequestPlan,
        tensors: tuple[torch.Tensor, ...],
    ) -> None:
        """A step of one head, and how far the layer's output is from the reference's."""
        query, key, value, output = tensors
        out = self._step(impl, where, plan, query, key, value)
        group = slice(where[1] * out.shape[1], (where[1] + 1) * out.shape[1])
        error = (out - output[:, group].double()).abs()
        self.max_error = max(self.max_error, float(error.max()))

    def _head(
        self,
        impl: HeavyHitterImpl,
        metadata: Any,
        plan: RequestPlan,
        cache: LayerCache,
        rows: torch.Tensor,
    ) -> WatchedHead:
        """A new reference, with the keys and values that the request found in the prefix cache."""
        slots = torch.arange(plan.logical_start)
        at = (rows[slots // cache.block_size], slots % cache.block_size)
        assert cache.position[at].tolist() == slots.tolist()
        limit = self.scheduler.policy_config.position_limit
        rolling, schedule = None, self.scheduler.policy_config.schedule
        if plan.packs_chunks:  # it may be computed again
            schedule = replace(schedule, at="chunk")
        if limit is not None:
            # Rotated keys are stored in the cache's dtype.
            dtype = cache.key.dtype
            rolling = Rolling(limit, lambda k, n: self._rotated(k, -n).to(dtype).double())
        return WatchedHead(
            Strip(
                cache.key[at].double() * cache.scales[0],
                cache.value[at].double() * cache.scales[1],
                torch.zeros(len(slots), dtype=torch.float64),
                slots,
            ),
            plan.budget,
            self._ranking(metadata),
            schedule,
            impl.scale,
            merge=metadata.scoring.merge,
            splits=self.scheduler.policy_config.splits,
            rolling=rolling,
            logical_len=plan.logical_start,
        )

    def _ranking(self, metadata: Any) -> Ranking:
        """The policy's, without a term that the model has no queries for."""
        ranking = self.scheduler.policy_config.ranking
        rotates = any(term.queries == "rotated" for term in metadata.terms)
        return ranking if rotates else ranking.without("rotated")

    def _step(
        self,
        impl: HeavyHitterImpl,
        where: Where,
        plan: RequestPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        grouped = query.double().view(plan.num_new, impl.num_kv_heads, -1, impl.head_size)
        head = self.heads[where]
        ends_prompt = plan.in_prompt and plan.logical_end == plan.prompt_end
        head.grows, falls_back = plan.grows, plan.grows and plan.num_survivors > 0
        merge, head.merge = head.merge, 0.0  # merged already: see compare_merge
        own = grouped[:, where[1]]
        terms = self._terms(head.ranking, plan, own, where)
        new = (own, key[:, where[1]], value[:, where[1]])
        size = self.scheduler.block_manager.block_size
        again = any(term.queries == "reread" for term, _ in terms)
        sums = self._reread(where, own.shape[1])[1] if again else None
        out = head.step(*new, ends_prompt, terms, size, falls_back, plan.prompt_end, sums)
        head.merge = merge
        return out

    def _terms(
        self, ranking: Ranking, plan: RequestPlan, query: torch.Tensor, where: Where
    ) -> list[tuple[Term, torch.Tensor]]:
        """The terms of a prompt's chunk, and the queries [T', G, D] that count."""
        if not plan.in_prompt or plan.num_new == 1 or plan.fits:
            return []
        num_window = self.scheduler.policy_config.num_window_queries
        asking = []
        for term in ranking.passes:
            own = query
            if term.queries == "window":
                alone = plan.packs_chunks and not ranking.scores_every_query
                end = plan.logical_end if alone else plan.prompt_end
                own = query[max(end - num_window - plan.logical_start, 0) :]
            elif term.queries == "rotated":
                # Cosines, sines and what is rotated are of the model's dtype.
                dtype = self.scheduler.vllm_config.model_config.dtype
                own = self._rotated(query, plan.num_new, dtype).to(dtype).double()
            else:
                own, _ = self._reread(where, query.shape[1])
                assert len(own) == len(query)
            asking.append((term, own))
        return [(term, own) for term, own in asking if len(own)]

    def _reread(self, where: Where, group: int) -> list[torch.Tensor]:
        """[T, G, D], a KV head's queries of the second reading, and [T, G], what they see of it."""
        read = zip(*self.readings[where[0], where[2]], strict=True)
        return [torch.cat(each).unflatten(1, (-1, group))[:, where[1]] for each in read]

    def _rotated(
        self,
        query: torch.Tensor,
        distance: int | torch.Tensor,
        dtype: torch.dtype = torch.float64,
    ) -> torch.Tensor:
        """[..., D], at ``distance`` ([...]) positions later, by the model's own theta."""
        hf_config = self.scheduler.vllm_config.model_config.hf_text_config
        if getattr(hf_config, "position_embedding_type", "rope") == "nope":
            return query  # a token is the same at every position
        rope = hf_config.rope_parameters
        rope = rope.get("full_attention", rope)  # of each kind of layer, where there are two
        half = int(query.shape[-1] * rope.get("partial_rotary_factor", 1.0)) // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        angle = torch.as_tensor(distance)[..., None] * rope["rope_theta"] ** -powers
        a, b, rest = query.split([half, half, query.shape[-1] - 2 * half], dim=-1)
        cos, sin = (each.to(dtype).double() for each in (angle.cos(), angle.sin()))
        turned = [a * cos - b * sin, b * cos + a * sin]
        return torch.cat([*turned, rest], dim=-1)


def follow(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    policy: str,
    options: dict[str, Any],
    prompts: list[list[int]],
    max_error: float = 1e-4,
    max_ties: float = 1e-3,
    **settings: Any,
) -> Oracle:
    """Generate 40 tokens for each prompt, compared after every step."""
    with monkeypatch.context() as patch, engine(model, policy, options, **settings) as llm:
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        generate(llm, prompts, max_tokens=40)
        llm.collective_rpc("finish_step")  # no other step may have followed the last
        assert probe.num_free == probe.num_total
    assert oracle.num_compared > 0
    assert oracle.num_victims + oracle.num_together > 0
    assert oracle.num_ties <= max(max_ties * oracle.num_victims, 1)
    assert oracle.num_merge_ties <= oracle.num_merged / 20
    assert oracle.max_error < max_error
    return oracle
