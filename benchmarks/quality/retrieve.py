"""Retrieval after eviction, simulated: the context is computed once, each variant then evicts from it."""

from __future__ import annotations

import torch

from benchmarks.quality.llama import Llama
from benchmarks.quality.simulate import LayerRun, Variant, prompt_score, received, unit


class Context:
    """Keys, values and every variant's scores after a prompt, layer by layer."""

    @torch.no_grad()
    def __init__(self, model: Llama, ids: torch.Tensor, variants: list[Variant]) -> None:
        self.model, self.n = model, ids.shape[1]
        self.keys, self.values = [], []
        self.scores = {v.name: [] for v in variants}
        x = model.embed(ids)
        n = self.n
        causal = torch.ones(n, n, dtype=torch.bool).triu(1)
        for layer in range(model.num_layers):
            q, k, v = model.qkv(layer, x, 0)
            outs, scores = [], {name: [] for name in self.scores}
            for w in range(0, len(ids), 5):
                part = slice(w, w + 5)
                p = torch.matmul((q[part] * model.scale).flatten(2, 3), k[part].transpose(2, 3))
                p = p.view(*q[part].shape[:4], n).masked_fill_(causal, float("-inf")).softmax(-1)
                outs.append(torch.matmul(p.flatten(2, 3), v[part]).view(q[part].shape))
                shared: dict = {}
                for variant in variants:
                    if variant.power:
                        scores[variant.name].append(prompt_score(variant, p, shared))
            for variant in variants:
                got = scores[variant.name]
                self.scores[variant.name].append(torch.cat(got) if got else torch.zeros(k.shape[:3]))
            x = model.finish(layer, x, torch.cat(outs))
            self.keys.append(k)
            self.values.append(v)
        self.last = x[:, -1]


class Cache(LayerRun):
    """One layer's resident tokens, one step at a time."""

    def __init__(self, variant: Variant, capacity: int, k: torch.Tensor, v: torch.Tensor, score: torch.Tensor):
        n = k.shape[2]
        super().__init__(variant, capacity, n, k, v)
        i0, s0, f0 = self.pack(score)
        W, H, have = i0.shape
        D = k.shape[3]
        C = capacity
        at = i0[..., None].expand(W, H, have, D)
        self.k, self.v = torch.zeros(W, H, C, D), torch.zeros(W, H, C, D)
        self.k[:, :, :have], self.v[:, :, :have] = k.gather(2, at), v.gather(2, at)
        self.idx = torch.zeros(W, H, C, dtype=torch.int64)
        self.score, self.st = torch.zeros(W, H, C), torch.zeros(W, H, C)
        self.idx[..., :have], self.score[..., :have], self.st[..., :have] = i0, s0, f0
        self.have, self.victim = have, None
        self.total = unit(v if variant.first == "value" else k).sum(2)
        if self.vn is not None:
            self.vn = torch.cat([self.vn, torch.ones(W, H, 4096)], -1)

    def first(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[W, H, 1, D] -> [W, H]."""
        var = self.variant
        if var.first in ("key", "value"):
            u = unit(k if var.first == "key" else v)[:, :, 0]
            self.total = self.total + u
            return var.weight * (1 - (u * unit(self.total)).sum(-1))
        return static_of(var, k, v)

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: int) -> torch.Tensor:
        var, C = self.variant, self.capacity
        W, H, D = k.shape[0], k.shape[1], k.shape[3]
        if self.have < C:
            slot = torch.full((W, H, 1), self.have)
            self.have += 1
        else:
            slot = self.victim
        self.k.scatter_(2, slot[..., None].expand(W, H, 1, D), k)
        self.v.scatter_(2, slot[..., None].expand(W, H, 1, D), v)
        self.idx.scatter_(2, slot, t)
        self.score.scatter_(2, slot, 0.0)
        self.st.scatter_(2, slot, self.first(k, v)[..., None])
        if self.vn is not None:
            self.vn[..., t] = v.norm(dim=-1)[..., 0] ** var.vnorm
        h = self.have
        p = torch.matmul(q[:, :, :, 0], self.k[:, :, :h].transpose(2, 3)).softmax(-1)
        out = torch.matmul(p, self.v[:, :, :h])
        f = received(var, p, t - self.idx[..., :h])
        if var.running_max:
            self.score[..., :h] = torch.maximum(self.score[..., :h], f)
        else:
            self.score[..., :h] = self.score[..., :h] * var.decay + f
        if h == C:
            r = self.rank(self.idx, self.score, self.st, t + 1)
            r = r.masked_fill(~self.candidates(self.idx, t + 1), float("inf"))
            self.victim = r.argmin(-1, keepdim=True)
        return out[:, :, :, None]


def static_of(variant: Variant, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from benchmarks.quality.simulate import static_score

    return static_score(variant, k, v, 1)[..., 0]


@torch.no_grad()
def hits(context: Context, tail: torch.Tensor, variant: Variant, capacity: int) -> torch.Tensor:
    """[W, S], bool: whether each token of the tail is the most probable one, given those before."""
    m = context.model
    caches = [
        Cache(variant, capacity, k, v, s)
        for k, v, s in zip(context.keys, context.values, context.scores[variant.name], strict=True)
    ]
    guess = [m.logits(context.last).argmax(-1)]
    for i in range(tail.shape[1] - 1):
        x = m.embed(tail[:, i : i + 1])
        for layer, cache in enumerate(caches):
            q, k, v = m.qkv(layer, x, context.n + i)
            x = m.finish(layer, x, cache.step(q * m.scale, k, v, context.n + i))
        guess.append(m.logits(x[:, 0]).argmax(-1))
    return torch.stack(guess, 1) == tail
