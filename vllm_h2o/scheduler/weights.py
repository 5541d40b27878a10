# SPDX-License-Identifier: Apache-2.0
"""Knows the weights that requests are computed with: no torch.

Workers load weights: of the model when all of them are asked to, of an adapter when it is first
used, or in place. An adapter that a client has loaded in place is read from its files in each step
that uses it, so its files are looked at, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

READS = frozenset(
    {
        "check_health",
        "compute_weight_checksums",
        "list_loras",
        "start_recording",
        "take_recording",
    }
)
"""Methods of workers that leave weights as they are. Any other may change them."""

Files = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size and times of each file."""
Identity = tuple[int, ...]
"""Identifies weights: changes of the model's, the adapter, and its loads, each a number."""
FIRST: Identity = (0,)
"""The model's weights with which an engine starts."""


@dataclass(frozen=True)
class Loaded:
    """The weights of an adapter that workers hold.

    Args:
        number: of its loads before this one.
        files: what it was loaded from; None: they cannot be seen from here.

    """

    number: int
    files: Files | None


class Weights:
    """Counts changes of the model's weights, and loads of each adapter, under running requests.

    Args:
        replaced: called when weights have been, or are about to be, replaced by others.

    """

    def __init__(self, replaced: Callable[[], None]) -> None:
        self._replaced = replaced
        self._num_changes = 0
        self._adapters: dict[int, Loaded] = {}
        self._begun: dict[str, Identity | None] = {}

    def call(self, method: object) -> None:
        """Count a change of the model's weights if a method of the workers may change them.

        Args:
            method: its name, or a function.

        """
        if method not in READS:
            self._num_changes += 1
            self._replaced()

    def load(self, adapter: LoRARequest) -> None:
        """Count a load of an adapter, unless its workers have it and keep it."""
        known = self._adapters.get(adapter.lora_int_id)
        if known is None or adapter.load_inplace:
            number = known.number + 1 if known else 0
            self._adapters[adapter.lora_int_id] = Loaded(number, _files(adapter))
            if known:
                self._replaced()

    def of(self, request: Request) -> Identity | None:
        """The weights that a step would compute a request with now.

        Returns:
            None: unknown. The adapter's files have changed since it was loaded, or it is read in
            each step from files that cannot be seen from here.

        """
        adapter = request.lora_request
        if adapter is None:
            return (self._num_changes,)
        number, files = adapter.lora_int_id, _files(adapter)
        known = self._adapters.get(number)
        if known is None or (adapter.load_inplace and known.files != files):
            self.load(adapter)
        loaded = self._adapters[number]
        if loaded.files != files or (adapter.load_inplace and files is None):
            return None
        return self._num_changes, number, loaded.number

    def holds(self, weights: Identity) -> bool:
        """Whether no load has replaced these weights, without a look at files."""
        num_changes, *adapter = weights
        if num_changes != self._num_changes:
            return False
        return not adapter or self._adapters[adapter[0]].number == adapter[1]

    def begin(self, request: Request) -> None:
        """Note the weights of a request that holds nothing, before any cache is searched for it."""
        self._begun[request.request_id] = self.of(request)

    def begun_with(self, request: Request) -> Identity | None:
        """The weights that a request began with; None: unknown."""
        return self._begun.get(request.request_id)

    def kept_by(self, request: Request) -> Identity | None:
        """The weights that computed all that a request holds; None: unknown, or several have."""
        weights = self.of(request)
        return weights if weights == self.begun_with(request) else None

    def is_current(self, request_id: str) -> bool:
        """Whether no load has replaced the weights that a request began with."""
        weights = self._begun.get(request_id)
        return weights is not None and self.holds(weights)

    def end(self, request_id: str) -> None:
        """Forget a request that gives its blocks back."""
        self._begun.pop(request_id, None)


def _files(adapter: LoRARequest) -> Files | None:
    """The files of an adapter; None where its path is not a folder here."""
    try:
        found = [(f.name, f.stat()) for f in Path(adapter.lora_path).expanduser().iterdir()]
    except OSError:
        return None
    return tuple(
        sorted((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)
    )
