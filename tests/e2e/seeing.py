# SPDX-License-Identifier: Apache-2.0
"""Tiny models of random weights that see images, some of them with M-RoPE or states."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vllm.model_executor.models import ModelRegistry

from tests.e2e.zoo import SMALL, gemma3, qwen3_next

LLAVA_WORDS = {200: "<image>"}
QWEN_WORDS = {
    200: "<|image_pad|>",
    201: "<|video_pad|>",
    202: "<|vision_start|>",
    203: "<|vision_end|>",
}
INTERN_WORDS = {200: "<IMG_CONTEXT>", 201: "<video>", 202: "<img>", 203: "</img>"}
_VISION = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2}


@dataclass(frozen=True)
class Seeing:
    """One kind of model.

    Args:
        make: a model and its processor.
        picture: what stands for an image in a prompt; one token of it vLLM makes as many as it
            needs.
        dtype: in which it runs.

    """

    make: Callable[[], tuple[Any, Any]]
    picture: tuple[int, ...]
    dtype: str = "float32"


def write(kind: str, folder: Path) -> Path:
    """A model with its tokenizer and processor.

    Args:
        kind: one of :data:`READING`.
        folder: where it goes.

    Returns:
        The folder.

    """
    model, processor = READING[kind].make()
    architecture = type(model).__name__
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    if kind == "llava":
        path = folder / "model.safetensors"
        # As in its published files, and as vLLM looks for them.
        named = {
            re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): weight
            for name, weight in load_file(path).items()
        }
        save_file(named, path, {"format": "pt"})
    if processor is not None:
        processor.save_pretrained(folder)
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    return folder


def _llava() -> tuple[Any, Any]:
    """16 tokens an image, whatever its size."""
    vision = hf.CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=64, patch_size=16, projection_dim=64,
    )  # fmt: skip
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**SMALL),
        vision_config=vision,
        image_token_id=200,
        image_token_index=200,
        image_seq_length=16,
    )
    processor = hf.LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}),
        _tokenizer(LLAVA_WORDS),
        patch_size=16,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    return hf.LlavaForConditionalGeneration(config).float(), processor


_QWEN: dict[str, int] = {
    "image_token_id": 200,
    "video_token_id": 201,
    "vision_start_token_id": 202,
    "vision_end_token_id": 203,
}


def _qwen2_5() -> tuple[Any, Any]:
    """A token for 28 by 28 pixels; heads of 32, whose 16 frequencies belong to three axes."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {**_VISION, "depth": 2, "patch_size": 14, "out_hidden_size": 128}
    vision |= {"fullatt_block_indexes": [1], "window_size": 56}
    config = hf.Qwen2_5_VLConfig(
        text_config={**SMALL, "rope_parameters": rope}, vision_config=vision, **_QWEN
    )
    size = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 30}}
    processor = hf.Qwen2_5_VLProcessor(
        Qwen2VLImageProcessorPil(**size),
        _tokenizer(QWEN_WORDS),
        hf.Qwen2VLVideoProcessor(**size),
        chat_template="",
    )
    return hf.Qwen2_5_VLForConditionalGeneration(config).float(), processor


_DEEP = {**_VISION, "depth": 2, "patch_size": 16, "out_hidden_size": 128}
_DEEP |= {"num_position_embeddings": 64, "spatial_merge_size": 2}


def _qwen3() -> tuple[Any, Any]:
    """A token for 32 by 32 pixels; what two layers of vision see is added to hidden states."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    config = hf.Qwen3VLConfig(
        text_config={**SMALL, "head_dim": 32, "rope_parameters": rope},
        vision_config={**_DEEP, "deepstack_visual_indexes": [0, 1]},
        **_QWEN,
    )
    return hf.Qwen3VLForConditionalGeneration(config).float(), _qwen3_processor()


def _qwen3_5() -> tuple[Any, Any]:
    """Three layers with states, one with attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [11, 11, 10]}
    rope["partial_rotary_factor"] = 0.25
    text = {**qwen3_next().to_dict(), "rope_parameters": rope}
    names = set(inspect.signature(hf.Qwen3_5TextConfig).parameters)
    text = {name: text[name] for name in text.keys() & names}
    config = hf.Qwen3_5Config(text_config=text, vision_config=_DEEP, **_QWEN)
    return hf.Qwen3_5ForConditionalGeneration(config).float(), _qwen3_processor()


def _qwen3_processor() -> Any:
    size = {"size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 30}, "patch_size": 16}
    return hf.Qwen3VLProcessor(
        Qwen2VLImageProcessorPil(**size),
        _tokenizer(QWEN_WORDS),
        hf.Qwen3VLVideoProcessor(**size),
        chat_template="",
    )


def _internvl() -> tuple[Any, Any]:
    """16 tokens for each of at most two tiles, and for both in small; one before, one after."""
    vision = hf.InternVLVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=[112, 112], patch_size=[14, 14],
    )  # fmt: skip
    text = hf.Qwen2Config(**SMALL)
    config = hf.InternVLConfig(text_config=text, vision_config=vision, image_token_id=200)
    tokenizer = _tokenizer(INTERN_WORDS)
    names = ("context_image_token", "video_token", "start_image_token", "end_image_token")
    for name, (token, word) in zip(names, INTERN_WORDS.items(), strict=True):
        tokenizer._set_model_specific_special_tokens({name: word})
        assert tokenizer.convert_tokens_to_ids(word) == token
    size = {"height": 112, "width": 112}
    processor = hf.InternVLProcessor(
        GotOcr2ImageProcessorPil(size=size, max_patches=2),
        tokenizer,
        hf.InternVLVideoProcessor(size=size),
        image_seq_length=16,
        chat_template="",
    )
    return hf.InternVLForConditionalGeneration(config).float(), processor


def _gemma3() -> tuple[Any, Any]:
    """Tokens of an image attend to later ones, which the policy does not compute."""
    text = gemma3()
    vision = hf.SiglipVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        image_size=56, patch_size=14,
    )  # fmt: skip
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=200
    )
    return hf.Gemma3ForConditionalGeneration(config).float(), None


def _tokenizer(special: dict[int, str]) -> hf.PreTrainedTokenizerFast:
    """A word for each of 256 tokens."""
    words = {special.get(token, f"w{token}"): token for token in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special.values()))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w3", pad_token="w0", bos_token="w1", eos_token="w2"
    )


SEEING = {
    "llava": Seeing(_llava, (200,)),
    "qwen2_5_vl": Seeing(_qwen2_5, (202, 200, 203)),
    "qwen3_vl": Seeing(_qwen3, (202, 200, 203)),
    "qwen3_5": Seeing(_qwen3_5, (202, 200, 203), "bfloat16"),
    "internvl": Seeing(_internvl, (200,)),
}
"""By the types in their configs."""
READING = {**SEEING, "gemma3": Seeing(_gemma3, ())}
"""Those, and others that are served for text alone."""
