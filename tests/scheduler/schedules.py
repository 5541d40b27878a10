"""Random schedules, and the options under which they run."""

from __future__ import annotations

from hypothesis import strategies as st

OPTIONS = (
    (),
    (("prefill", "chunked"),),
    (("prefill", "window"), ("observation_window", 5), ("protect_prompt_tokens", 9)),
    (("prefill", "chunked"), ("protect_prompt_tokens", 6)),
    (("granularity", "block"), ("recent_ratio", 0.2)),
    (("granularity", "block"), ("recent_ratio", 0.2), ("prefill", "chunked")),
    (("score", "second_pass"),),
    (("score", "second_pass"), ("prefill", "chunked")),
    (("score", "combined"), ("observation_window", 3)),
    (("evict_every", 6),),
    (("evict_every", 3), ("prefill", "chunked"), ("protect_prompt_tokens", 6)),
)


_PREFIXES = ("prefix_caching", True)


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 50),
            st.integers(1, 40),
            st.integers(1, 5),
            st.one_of(st.none(), st.integers(0, 50)),
        ),
        st.tuples(st.just("steps"), st.integers(1, 8)),
        st.tuples(st.just("abort"), st.integers(0, 1000)),
        st.tuples(st.just("reset")),
    ),
    min_size=3,
    max_size=30,
)

overlaps = st.sampled_from([(1, False), (2, True), (2, False), (3, False), (3, True)])
"""Steps in flight, and whether the asynchronous scheduler plans them."""
