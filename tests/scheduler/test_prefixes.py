# SPDX-License-Identifier: Apache-2.0
"""Values by the beginnings of requests, in vLLM's own hashes."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.request import Request

from vllm_h2o.scheduler.prefixes import Names, Prefixes


def request(tokens: list[int], salt: str | None = None) -> Request:
    """A request with this prompt."""
    params = SamplingParams(max_tokens=1)
    return Request(str(tokens), tokens, params, None, cache_salt=salt)


def test_prefixes_are_found_longest_first_until_they_are_dropped() -> None:
    """Within a block, at its end and over several; only with the same salt and key."""
    names = Names(4, sha256)
    prefixes: Prefixes[str] = Prefixes(names)
    text = request(list(range(20)))
    assert not prefixes
    for length in (3, 4, 6, 8, 19):
        prefixes.put(names.name(text, length, "a"), str(length))
    assert sorted(prefixes.values()) == ["19", "3", "4", "6", "8"]
    longer = request([*range(19), 99, 98])
    assert [*prefixes.longest_first(longer, "a", 21)] == ["19", "8", "6", "4", "3"]
    assert [*prefixes.longest_first(longer, "a", 6)] == ["6", "4", "3"]
    assert [*prefixes.longest_first(request([*range(7), 50, 51]), "a", 9)] == ["6", "4", "3"]
    assert not [*prefixes.longest_first(longer, "b", 21)]
    assert not [*prefixes.longest_first(request(list(range(20)), "salt"), "a", 20)]
    for length in (3, 4, 6, 8):
        name = names.name(text, length, "a")
        prefixes.drop(name, "another")
        assert prefixes.get(name) == str(length)
        prefixes.drop(name, prefixes.get(name) or "")
        assert prefixes.get(name) is None
    assert [*prefixes.longest_first(longer, "a", 21)] == ["19"]
