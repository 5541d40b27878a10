# SPDX-License-Identifier: Apache-2.0
"""Figures of devices, by their data sheets, and of launches on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

COPY = 0.92
"""Share of the memory's rate that a copy reaches."""
LAUNCH = 2.0e-6
"""Seconds from one kernel of a graph to the next that waits for it."""
LOAD = 0.6e-6
"""Seconds of a load that others wait for: what a field, a block id or a page takes to come."""
MATRIX = 0.55
"""Share of the matrix units' rate that attention over a prompt reaches."""
REGISTERS, WARPS, PROGRAMS = 65536, 64, 32
"""Limits of a multiprocessor: 32-bit registers, and the most warps and programs at once."""


@dataclass(frozen=True)
class Device:
    """A GPU, from its data sheet.

    Args:
        name: short.
        capability: 90 for 9.0.
        processors: streaming multiprocessors.
        bytes_per_s: of its memory.
        flops: of its matrix units, 16-bit, dense.
        shared: bytes of shared memory of a multiprocessor.
        cache: bytes of the cache that all multiprocessors share.

    """

    name: str
    capability: int
    processors: int
    bytes_per_s: float
    flops: float
    shared: int
    cache: int

    def programs(self, kernel: Kernel) -> int:
        """Programs of a kernel that run at once."""
        per_program = math.ceil(kernel.registers / 8) * 8 * 32 * kernel.warps
        limits = (
            REGISTERS // per_program,
            self.shared // (kernel.shared + 1024),
            WARPS // kernel.warps,
            PROGRAMS,
        )
        return self.processors * max(min(limits), 1)

    def seconds(
        self, kernel: Kernel, programs: float, num_bytes: float, longest: float, idle: float = 0.0
    ) -> float:
        """Seconds of one launch.

        Args:
            kernel: its needs.
            programs: how many it is launched with, if each were as long as the longest.
            num_bytes: that all of them read and write.
            longest: seconds of the longest program alone.
            idle: seconds in which programs that have no work take the places of others.

        """
        at_once = self.programs(kernel)
        waves = programs / at_once
        tail = math.ceil(waves) / waves if waves > 1 else 1.0
        moved = num_bytes / (COPY * self.bytes_per_s) * tail
        return LAUNCH + max(moved + LOAD + idle, math.ceil(waves) * longest)


@dataclass(frozen=True)
class Kernel:
    """One kernel as compiled.

    Args:
        registers: of a thread.
        shared: bytes of a program.
        warps: of a program.

    """

    registers: int
    shared: int
    warps: int = 4


DEVICES = {
    device.name: device
    for device in (
        Device("H200", 90, 132, 4.8e12, 989e12, 228 << 10, 50 << 20),
        Device("H100", 90, 132, 3.35e12, 989e12, 228 << 10, 50 << 20),
        Device("A100-80GB", 80, 108, 2.04e12, 312e12, 164 << 10, 40 << 20),
        Device("L4", 89, 58, 0.30e12, 121e12, 100 << 10, 48 << 20),
    )
}
"""By name. None before Ampere: what the compiler makes of the kernels there is another thing."""


def device_of(name: str) -> Device | None:
    """The one with a name such as a driver gives; None where no data sheet is known."""
    words = name.replace("-", " ").split()
    if {"PCIe", "NVL", "40GB"} & set(words):  # slower memory under the same name
        return None
    return next((d for key, d in DEVICES.items() if key.split("-")[0] in words), None)
