"""Eviction on teacher-forced text, layer by layer: an oracle for the engine, and a place to try scores.

What is evicted in one layer depends on that layer's queries and keys alone, and the tokens are
given: so a layer is run over the whole window before the next one begins. All its logits come from
one matrix product; the loop over steps only picks the resident ones and normalises them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.quality.llama import Llama


@dataclass(frozen=True)
class Variant:
    """A way to choose what stays."""

    name: str
    recent: float = 0.5
    sinks: int = 0
    power: float = 1.0
    group_max: bool = False
    running_max: bool = False
    skip: int = 0
    decay: float = 1.0
    by_age: float = 0.0
    first: str = ""
    weight: float = 0.0
    window: int = 0
    split: float = 0.0
    vnorm: float = 0.0
    boost: float = 0.0


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)


def static_score(variant: Variant, k: torch.Tensor, v: torch.Tensor, n: int) -> torch.Tensor:
    """[W, H, T]: what tokens' scores start with. Means run over the tokens so far; over the prompt at once."""
    W, H, T, D = k.shape
    if variant.first == "random":
        return torch.rand(W, H, T) * variant.weight
    if variant.first in ("key", "value"):
        u = unit(k if variant.first == "key" else v)
        total = u.cumsum(2)
        total[:, :, :n] = total[:, :, n - 1 : n]
        return variant.weight * (1 - (u * unit(total)).sum(-1))
    if variant.first == "vn":
        return variant.weight * v.norm(dim=-1)
    if variant.first == "kn":
        return -variant.weight * k.norm(dim=-1)
    return torch.zeros(W, H, T)


def received(variant: Variant, p: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """[..., G, L] probabilities of a query and [..., L] distances -> [..., L]."""
    if variant.power == 0:
        return torch.zeros_like(p[..., 0, :])
    p = p if variant.power == 1 else p**variant.power
    f = p.amax(-2) if variant.group_max else p.sum(-2)
    return f * (distance >= variant.skip) if variant.skip else f


def prompt_score(variant: Variant, p: torch.Tensor, shared: dict | None = None) -> torch.Tensor:
    """[W, H, G, n, n] -> [W, H, n]."""
    n = p.shape[-1]
    query = torch.arange(n)
    shared = {} if shared is None else shared
    key = (variant.power, variant.group_max)
    if key not in shared:
        f = p if variant.power == 1 else p.pow(variant.power)
        shared[key] = f.amax(2) if variant.group_max else f.sum(2)
    f = shared[key]
    if variant.window:
        f = f[:, :, -variant.window :]
    if variant.skip:
        f = f * (query[-f.shape[2] :, None] - query >= variant.skip)
    if variant.running_max:
        return f.amax(2)
    if variant.decay != 1:
        f = f * (variant.decay ** (n - 1 - query.float()))[-f.shape[2] :, None]
    return f.sum(2)


class LayerRun:
    """One layer over windows of T tokens, of which n are the prompt."""

    def __init__(self, variant: Variant, capacity: int, n: int, k: torch.Tensor, v: torch.Tensor):
        self.variant, self.capacity, self.n = variant, capacity, n
        kept = capacity - 1
        rest = kept - variant.sinks
        self.num_recent = min(rest, max(1 if variant.recent > 0 else 0, int(variant.recent * rest + 0.5)))
        self.static = static_score(variant, k, v, n)
        self.vn = v.norm(dim=-1) ** variant.vnorm if variant.vnorm else None

    def rank(self, idx: torch.Tensor, score: torch.Tensor, static: torch.Tensor, t: int) -> torch.Tensor:
        """What is compared: lower goes first. ``t`` tokens are computed."""
        var = self.variant
        s = score
        if var.by_age:
            s = s / (t - idx).clamp_min(1).float() ** var.by_age
        if self.vn is not None:
            s = s * self.vn.gather(2, idx)
        if var.split:
            heavy = int(var.split * (self.capacity - 1 - var.sinks - self.num_recent))
            cand = self.candidates(idx, t)
            if heavy:
                top = s.masked_fill(~cand, -1).topk(heavy, dim=-1).indices
                return static.scatter(-1, top, 1e9)
            return static
        return s + static

    def candidates(self, idx: torch.Tensor, t: int) -> torch.Tensor:
        return (idx < t - self.num_recent) & (idx >= self.variant.sinks)

    def pack(self, score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        W, H, n = score.shape
        idx = torch.arange(n).expand(W, H, n)
        keep = self.capacity - 1
        static = self.static[:, :, :n]
        if n <= keep:
            return idx.clone(), score, static
        r = self.rank(idx, score, static, n)
        r = r.masked_fill(~self.candidates(idx, n), float("inf"))
        best = r.topk(keep, dim=-1).indices.sort(-1).values
        return best, score.gather(2, best), static.gather(2, best)

    def run(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn logits [W, H, G, T, T] into the probabilities of what is resident, in place."""
        W, H, G, T, _ = logits.shape
        n, C, var = self.n, self.capacity, self.variant
        causal = torch.ones(n, n, dtype=torch.bool).triu(1)
        p = torch.softmax(logits[..., :n, :n].masked_fill(causal, float("-inf")), -1)
        score = prompt_score(var, p)
        logits[..., :n, :].zero_()
        logits[..., :n, :n] = p
        i0, s0, f0 = self.pack(score)
        have = i0.shape[2]
        idx = torch.zeros(W, H, C, dtype=torch.int64)
        score, static = torch.zeros(W, H, C), torch.zeros(W, H, C)
        idx[..., :have], score[..., :have], static[..., :have] = i0, s0, f0
        victim = None
        for t in range(n, T):
            if have < C:
                idx[..., have], score[..., have], static[..., have] = t, 0.0, self.static[..., t]
                have += 1
            else:
                idx.scatter_(2, victim, t)
                score.scatter_(2, victim, 0.0)
                static.scatter_(2, victim, self.static[..., t : t + 1])
            ids = idx[..., :have]
            row = logits[..., t, :]
            five = ids[:, :, None].expand(W, H, G, have)
            p = torch.softmax(row.gather(3, five), -1)
            row.zero_()
            row.scatter_(3, five, p)
            if var.power:
                f = received(var, p, t - ids)
                s = score[..., :have]
                if var.running_max:
                    torch.maximum(s, f, out=s)
                else:
                    if var.decay != 1:
                        s.mul_(var.decay)
                    s.add_(f)
            if have == C:
                r = self.rank(idx, score, static, t + 1)
                r = r.masked_fill(~self.candidates(idx, t + 1), float("inf"))
                victim = r.argmin(-1, keepdim=True)
        return logits


@torch.no_grad()
def teacher_forced_nll(
    model: Llama, ids: torch.Tensor, n: int, variant: Variant | None, capacity: int
) -> torch.Tensor:
    """[W, T] tokens -> [W, T - 1] nats; ``variant`` None is the full cache."""
    x = model.embed(ids)
    W, T, _ = x.shape
    buffer = torch.empty(W, model.num_kv_heads, model.num_heads // model.num_kv_heads, T, T)
    for layer in range(model.num_layers):
        q, k, v = model.qkv(layer, x, 0)
        if variant is None:
            g = q.shape[2]
            out = torch.nn.functional.scaled_dot_product_attention(
                q.flatten(1, 2), k.repeat_interleave(g, 1), v.repeat_interleave(g, 1), is_causal=True
            ).view(q.shape)
        else:
            q = q * model.scale
            torch.matmul(q.flatten(2, 3), k.transpose(2, 3), out=buffer.view(W, k.shape[1], -1, T))
            p = LayerRun(variant, capacity, n, k, v).run(buffer)
            out = torch.matmul(p.flatten(2, 3), v).view(q.shape)
        x = model.finish(layer, x, out)
    return model.nll(x[:, :-1], ids[:, 1:])
