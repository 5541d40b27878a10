# SPDX-License-Identifier: Apache-2.0
"""The device of the checks: its name, compute capability and memory.

Asked in a process of its own (``python -m benchmarks.gpu.card``): a context in a part's process
would take memory from its engines.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.record import machine_name

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Card:
    """A GPU, or what stands for one.

    Args:
        name: as the driver says it.
        capability: 90 for 9.0.
        gigabytes: of its memory, in 10^9 bytes.

    """

    name: str
    capability: int
    gigabytes: float

    @classmethod
    def here(cls) -> Card:
        """The first GPU; this process gets a context on it."""
        found = torch.cuda.get_device_properties(0)
        return cls(found.name, 10 * found.major + found.minor, found.total_memory / 1e9)

    @classmethod
    def ask(cls) -> Card:
        """The first GPU, from another process."""
        command = [sys.executable, "-m", "benchmarks.gpu.card"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return cls(**json.loads(done.stdout))

    @property
    def half(self) -> torch.dtype:
        """The 16-bit type: devices before 8.0 have no bfloat16, and vLLM refuses it there."""
        return torch.bfloat16 if self.capability >= 80 else torch.float16

    @property
    def pace(self) -> float:
        """Coarse: how often longer than on a Hopper a part takes."""
        return 1.0 if self.capability >= 90 else 1.5 if self.capability >= 80 else 3.0

    def has(self, gigabytes: float) -> bool:
        """Whether it is sold as a card of that size; drivers show a few percent less or more."""
        return self.gigabytes >= 0.95 * gigabytes


def processor() -> Card:
    """The processor, as a card: it interprets kernels."""
    return Card(machine_name(), 90, math.inf)


if __name__ == "__main__":
    print(json.dumps(asdict(Card.here())))
