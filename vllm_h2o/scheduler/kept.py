# SPDX-License-Identifier: Apache-2.0
"""Says in the header of a cache's files whose it is, and reads it."""

from __future__ import annotations

import json
import os
from array import array
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from vllm import SamplingParams
from vllm.v1.request import Request

from vllm_h2o import files
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.state import Left


@dataclass(frozen=True)
class Kept:
    """One prompt whose cache is in the folder.

    Args:
        place: beginning of its files' names; empty: it has none yet.
        tokens: of the prompt.
        salt: vLLM's cache_salt of its request.
        budget: of its request.
        turn: lengths of its cache.

    """

    place: str
    tokens: array[int]
    salt: str | None
    budget: Budget
    turn: Left

    @classmethod
    def of(cls, request: Request, budget: Budget, turn: Left) -> Kept:
        """Describe a request that ends, a text without an adapter, for its files.

        Args:
            request: that ends.
            budget: its own, or the engine's.
            turn: lengths of its cache.

        """
        tokens = array("i", request.all_token_ids[: turn.logical_len])
        return cls("", tokens, request.cache_salt, budget, turn)

    def request(self) -> Request:
        """A request that begins so, to name it."""
        return Request(
            request_id=self.place,
            prompt_token_ids=list(self.tokens),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=self.salt,
        )

    def header(self, made_by: str) -> str:
        """Return what the files say, JSON.

        Args:
            made_by: what computed the cache.

        """
        said = {
            "made_by": made_by,
            "tokens": list(self.tokens),
            "salt": self.salt,
            "budget": asdict(self.budget),
            "turn": asdict(self.turn),
        }
        return json.dumps(said)


def read_kept(path: Path, place: str, made_by: str) -> Kept | None:
    """Read what a file says. Nobody has asked for it: its time of access stays.

    Args:
        path: of the file.
        place: beginning of its name.
        made_by: what computes caches of this engine.

    Returns:
        The prompt; None where another engine, or something else, has written the file.

    """
    try:
        stat = path.stat()
        with safe_open(path, framework="numpy") as file:
            said = json.loads(file.metadata()[files.HEADER])
        with suppress(OSError):  # a file of another user
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if said["made_by"] != made_by:
            return None
        tokens, turn = array("i", said["tokens"]), said["turn"]
        turn = Left(**turn | {"prompt": tuple(turn["prompt"])})
        if len(tokens) != turn.logical_len:
            return None
        return Kept(place, tokens, said["salt"], Budget(**said["budget"]), turn)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
