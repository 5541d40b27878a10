# SPDX-License-Identifier: Apache-2.0
"""Writes a copy of an ended request's cache to a file, and reads it again: safetensors.

One worker writes one file, with the tensors of all its layers in order. The scheduler chooses the
name, and gives the header, which says whose cache it is: see scheduler/folder.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from vllm_h2o.wire import Saved

logger = init_logger("vllm.kv_policy")


class Writer:
    """Writes the files of one worker: at once, or in a thread where no answer waits for them.

    Args:
        rank: of the worker.
        num_workers: of the engine.
        most_bytes: of all files in the folder: those used least recently are removed; 0: any.

    """

    def __init__(self, rank: int, num_workers: int, most_bytes: int = 0) -> None:
        self.rank, self._num_workers, self._most_bytes = rank, num_workers, most_bytes
        self._thread = ThreadPoolExecutor(1, "kv-policy-write")
        self._waiting: deque[tuple[Future[None], int]] = deque()

    def write(self, saved: Saved, held: Sequence[Held]) -> None:
        """Write a cache, or have it written; one too many is lost, and no step waits for it.

        Args:
            saved: says where, and whether an answer waits.
            held: copies of all layers, in order.

        """
        if saved.is_awaited:
            self._write(saved, held)
            return
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        size = num_bytes(held)
        if self._waiting and sum(each for _, each in self._waiting) + size > files.MOST_WAITING:
            folder = Path(str(saved.place)).parent
            logger.warning_once("%s takes too long to write: some caches are lost", folder)
            return
        self._waiting.append((self._thread.submit(self._write, saved, held), size))

    def wait(self) -> None:
        """Wait until all is written."""
        for writing, _ in self._waiting:
            writing.result()

    def _write(self, saved: Saved, held: Sequence[Held]) -> None:
        place, size = str(saved.place), self._num_workers * num_bytes(held)
        if self._most_bytes and size > self._most_bytes:
            logger.error("a prompt's cache is larger than all of %s may be", Path(place).parent)
            return
        try:
            if self._most_bytes and self.rank == 0:
                num_gone = files.trim(Path(place).parent, self._most_bytes, size)
                if num_gone:
                    logger.info("files of %d prompts are removed for others", num_gone)
            write(place, self.rank, self._num_workers, held, saved.header, saved.is_awaited)
        except (OSError, RuntimeError, MemoryError) as error:  # no folder, or too little memory
            logger.error("a prompt's cache is not saved to %s: %s", place, error)


def num_bytes(held: Sequence[Held]) -> int:
    """Bytes of a copy."""
    return sum(tensor.nbytes for copy in held for tensor in copy.parts.values())


def write(
    place: str,
    rank: int,
    num_workers: int,
    held: Sequence[Held],
    header: str,
    is_awaited: bool = True,
) -> Path | None:
    """Write a cache; a failure is logged, for no request needs the file.

    Args:
        place: the name's beginning.
        rank: of this worker.
        num_workers: of the engine.
        held: copies of all layers, in order.
        header: of the file.
        is_awaited: see :func:`~vllm_h2o.files.publish`.

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
        path = files.publish(written, place, rank, num_workers, is_awaited)
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
