# SPDX-License-Identifier: Apache-2.0
"""Finds what is known of the beginning of a request's tokens.

The name of a beginning is vLLM's hash of its last whole block and all before it, which includes
adapter and salt, and the tokens after that block. As in vLLM's own cache, two texts of one hash
pass for the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.request import Request

T = TypeVar("T")
Start = tuple[BlockHash | None, Hashable]
"""First part of a name: the whole blocks, and what else must be the same."""
End = tuple[tuple[int, ...], Hashable]
"""Last part: the tokens after those blocks, and the keys that vLLM would hash with them."""
Name = tuple[int, Start, End]
"""Name of a beginning; its number of tokens comes first."""


class Names:
    """Names the beginnings of requests' tokens.

    Args:
        block_size: tokens of a block that vLLM hashes.
        hash_fn: vLLM's function of the prefix cache.

    """

    def __init__(self, block_size: int, hash_fn: Callable[[object], bytes]) -> None:
        init_none_hash(hash_fn)
        self.block_size = block_size
        self._hasher = get_request_block_hasher(block_size, hash_fn)

    def update(self, request: Request) -> None:
        """Hash a request's whole blocks. vLLM does this itself only with prefix caching."""
        request.block_hashes.extend(self._hasher(request))

    def name(self, request: Request, length: int, same: Hashable) -> Name:
        """The name of a request's first tokens.

        Args:
            request: its tokens are known up to there.
            length: number of tokens.
            same: what else must be the same.

        """
        self.update(request)
        start = self.start(request, length // self.block_size, same)
        return length, start, self.end(request, length)

    def start(self, request: Request, num_blocks: int, same: Hashable) -> Start:
        """The first part of a name, after :meth:`update`."""
        return request.block_hashes[num_blocks - 1] if num_blocks else None, same

    def end(self, request: Request, length: int) -> End:
        """The last part of a name."""
        start = length // self.block_size * self.block_size
        extra_keys, _ = generate_block_hash_extra_keys(request, start, length, 0)
        return tuple(request.all_token_ids[start:length]), extra_keys


class Prefixes(Generic[T]):
    """Holds one value for each of some beginnings.

    A search looks up each known number of whole blocks once, and then each number of tokens after
    them, of which there are fewer than a block has.

    Args:
        names: names the beginnings.

    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._found: dict[Start, dict[int, dict[End, T]]] = {}
        self._num_blocks: Counter[int] = Counter()  # values, by the number of their whole blocks

    def __bool__(self) -> bool:
        return bool(self._found)

    def get(self, name: Name) -> T | None:
        """The value of a beginning."""
        length, start, end = name
        return self._found.get(start, {}).get(length, {}).get(end)

    def put(self, name: Name, value: T) -> None:
        """Set the value of a beginning."""
        length, start, end = name
        known = self._found.setdefault(start, {}).setdefault(length, {})
        self._num_blocks[length // self._names.block_size] += end not in known
        known[end] = value

    def drop(self, name: Name, value: T) -> None:
        """Forget the value of a beginning, unless it has another by now."""
        if self.get(name) is not value:
            return
        length, start, end = name
        by_length = self._found[start]
        del by_length[length][end]
        if not by_length[length]:
            del by_length[length]
        if not by_length:
            del self._found[start]
        num_blocks = length // self._names.block_size
        self._num_blocks[num_blocks] -= 1
        if not self._num_blocks[num_blocks]:
            del self._num_blocks[num_blocks]

    def longest_first(self, request: Request, same: Hashable, longest: int) -> Iterator[T]:
        """Find the values of a request's beginnings, that of the longest one first.

        Args:
            request: its tokens begin so.
            same: what else must be the same.
            longest: most tokens of a beginning.

        """
        size = self._names.block_size
        self._names.update(request)
        for num_blocks in sorted(self._num_blocks, reverse=True):
            if num_blocks > longest // size:
                continue
            known = self._found.get(self._names.start(request, num_blocks, same), {})
            for length in sorted((n for n in known if n <= longest), reverse=True):
                value = known[length].get(self._names.end(request, length))
                if value is not None:
                    yield value

    def values(self) -> Iterator[T]:
        """Every value."""
        for by_length in self._found.values():
            for known in by_length.values():
                yield from known.values()
