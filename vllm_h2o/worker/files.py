# SPDX-License-Identifier: Apache-2.0
"""Writes a copy of an ended request's cache to a file, and reads it again: safetensors.

One worker writes one file, with the tensors of all its layers in order. The scheduler chooses the
name, and gives the header, which says whose cache it is: see scheduler/folder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from vllm.logger import init_logger

from vllm_h2o import files
from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.held import Held

logger = init_logger("vllm.kv_policy")


def write(
    place: str, rank: int, num_workers: int, held: Sequence[Held], header: str
) -> Path | None:
    """Write a cache; a failure is logged, for no request needs the file.

    Args:
        place: the name's beginning.
        rank: of this worker.
        num_workers: of the engine.
        held: copies of all layers, in order.
        header: of the file.

    Returns:
        The file; None: it could not be written.

    """
    tensors = {
        f"{layer}.{part}": tensor.contiguous()
        for layer, copy in enumerate(held)
        for part, tensor in copy.parts.items()
    }
    written = Path(f"{place}.{rank}-of-{num_workers}.{uuid4().hex}.part")
    try:
        save_file(tensors, written, metadata={files.HEADER: header})
        size = written.stat().st_size
        path = files.publish(written, place, rank, num_workers)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            written.unlink()
        logger.error("a prompt's cache is not saved to %s: %s", written, error)
        return None
    if rank == 0:
        logger.info("a prompt's cache is kept in %s: %.1f MiB", path, size / 2**20)
    return path


def read(path: str) -> list[Held]:
    """Read a cache into host memory.

    Args:
        path: of a file that the scheduler has checked, and holds open.

    Returns:
        Copies of all layers, in order.

    Raises:
        IntegrityError: when its file system cannot read it any more.

    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(
            f"{path} was checked when a request was given its cache, and cannot be read: {error}"
        ) from error
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".")
        layers.setdefault(int(layer), {})[part] = tensor
    return [Held(layers[layer]) for layer in sorted(layers)]
