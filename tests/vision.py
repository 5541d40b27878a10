# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest's that lets models for images load: torchvision, without its own kernels.

``tools/setup_venv.sh`` puts torchvision into ``.venv/vision``, out of the way of everybody else:
where an index has it for CUDA alone, its kernels do not load next to torch's CPU build. What
processors of images call is written in Python, and needs but the names of the operators.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1] / ".venv/vision"
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

sys.path.append(str(FOLDER))
try:
    torch.ops.load_library(str(FOLDER / "torchvision/_C.so"))
except OSError:
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", _BOXES)
