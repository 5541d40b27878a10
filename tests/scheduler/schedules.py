# SPDX-License-Identifier: Apache-2.0
"""Random schedules, and the options under which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st
from vllm.config import VllmConfig

from tests.scheduler.harness import BLOCK_SIZE, Simulation

Kind = TypeVar("Kind", bound=Simulation)

Option = tuple[str, object]

CHUNK: Option = ("eviction", "chunk")
PAGE: tuple[Option, ...] = (("evict_every", "page"), ("recent_ratio", 0.2))
SNAPKV: tuple[Option, ...] = (("name", "snapkv"), ("observation_window", 5))
H2O2: tuple[Option, ...] = (("name", "h2o2"), ("observation_window", 3))
READ_AGAIN: Option = ("score", "reconstruction")
LAYERS: Option = ("split", "layers")
PREFIXES: Option = ("prefix_caching", True)

OPTIONS: tuple[tuple[Option, ...], ...] = (
    (),
    (CHUNK,),
    (*SNAPKV, ("num_sink_tokens", 9)),
    (CHUNK, ("num_sink_tokens", 6)),
    PAGE,
    (*PAGE, CHUNK, ("num_sink_tokens", 3)),
    H2O2,
    (*H2O2, CHUNK),
    (*H2O2, *PAGE),
    (*H2O2, READ_AGAIN),
    (("evict_every", 6),),
    (("evict_every", 3), CHUNK, ("num_sink_tokens", 6)),
)
PAGE_BUDGET = 40
"""A budget that whole pages of any size here fit into."""


def step_tokens(max_batched: int, options: tuple[Option, ...]) -> int:
    """Tokens of a step that ``options`` start with: SnapKV's window is computed in one step."""
    return max(max_batched, 12) if ("observation_window", 5) in options else max_batched


ROLLING: tuple[tuple[Option, ...], ...] = (
    (("positions", 24), CHUNK),
    (("positions", 27), CHUNK, ("evict_every", 3), ("num_sink_tokens", 2)),
    (("positions", 27), CHUNK, *PAGE),
)
"""These take a small budget, and small steps."""


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 50),
            st.integers(1, 40),
            st.integers(1, 5),
            st.one_of(st.none(), st.integers(0, 50)),
            st.sampled_from([None, None, None, 12, "full"]),
        ),
        st.tuples(st.just("steps"), st.integers(1, 8)),
        st.tuples(st.just("abort"), st.integers(0, 1000)),
        st.tuples(st.just("reset")),
    ),
    min_size=3,
    max_size=30,
)

_add = st.tuples(
    st.just("add"),
    st.integers(1, 24),
    st.integers(1, 16),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(0, 3)),
)
_go_on = st.tuples(
    st.just("go on"),
    st.integers(0, 11),
    st.sampled_from([0, 0, 0, 0, 1, 2, 5]),
    st.sampled_from([0, 1, 2, 5, 9, 15]),
    st.integers(1, 16),
    st.integers(1, 4),
    st.sampled_from([None, None, None, 0, 1, 2, 3]),
)
_steps = st.tuples(st.just("steps"), st.integers(5, 25))
# A reset ends all entries, so there are few. Hypothesis would flatten alternatives of alternatives.
_breaks = st.integers(0, 1000).map(lambda n: ("abort", n) if n % 6 else ("reset",))
conversations = st.lists(
    st.one_of(_add, _go_on, _steps, _go_on, _steps, _breaks), min_size=8, max_size=40
)
"""What :meth:`Talking.run` reads, in conversations.py."""

overlaps = st.sampled_from([(1, False), (2, True), (2, False), (3, False), (3, True)])
"""Steps in flight, and whether the asynchronous scheduler plans them."""


def states(num: int, options: Sequence[Option]) -> tuple[int, ...]:
    """Groups of states beside the policy's layers, as windows of 0, if the options allow them."""
    return () if {PREFIXES, READ_AGAIN, LAYERS} & {*options} else (0,) * num


@dataclass(frozen=True)
class Schedule:
    """Events of an engine, whatever its options are.

    Args:
        ops: as :meth:`Simulation.run` reads them.
        block_size: slots of a page.
        stop_rate: how often a request ends before its time.
        policy: vLLM's order of requests.
        seed: of what is sampled.

    """

    ops: Sequence[tuple]
    block_size: int
    stop_rate: float
    policy: str
    seed: int

    def num_blocks(self, num_pages: int) -> int:
        """Pages with the memory of ``num_pages`` of :data:`BLOCK_SIZE` slots, and the null page."""
        return 1 + num_pages * BLOCK_SIZE // self.block_size

    def play(
        self,
        kind: type[Kind],
        config: VllmConfig,
        num_blocks: int,
        depth: int = 1,
        windows: Sequence[int] = (),
    ) -> Kind:
        """Run it to its end, after which nothing is held."""
        simulation = kind(config, num_blocks, depth, self.seed, self.block_size, windows)
        simulation.stop_rate = self.stop_rate
        simulation.run(self.ops)
        assert simulation.num_free == simulation.num_total
        assert not simulation.scheduler.ledger.states
        return simulation


def schedules(
    block_sizes: Sequence[int] = (1, 4, 8),
    policies: Sequence[str] = ("fcfs", "priority"),
    ops: st.SearchStrategy = operations,
) -> st.SearchStrategy[Schedule]:
    """Any of them."""
    return st.builds(
        Schedule,
        ops=ops,
        block_size=st.sampled_from(block_sizes),
        stop_rate=st.sampled_from([0.0, 0.05]),
        policy=st.sampled_from(policies),
        seed=st.integers(0, 1000),
    )
