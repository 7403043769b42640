"""make_tiny_vision_model: a random vision-language model of about half a million parameters, in two families that expand images
differently.

`idefics3` cuts an image into tiles of fixed size, each a fixed number of placeholders between marker tokens (SmolVLM's way).
`qwen2.5-vl` keeps the aspect ratio, has as many placeholders as the image has cells, and M-RoPE positions over its grid. Tokenizer and chat
template are those of `examples.demo.tiny_model`; the template shows images where they stand among the text, in tool results too. Nothing
is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from examples.demo.tiny_model import make_tokenizer

Family = Literal["idefics3", "qwen2.5-vl"]

TILE = 56
"""Idefics3: the side of a tile in pixels, 4 placeholders each."""
CELL = 28
"""Qwen2.5-VL: the side in pixels of what one placeholder stands for."""
_TEXT_ONLY, _WITH_IMAGES = (
    "{{- part.text if part.text is defined else '' -}}",
    "{{- part.text if part.text is defined else 'IMAGE' if part.type in ['image', 'image_url'] else '' -}}",
)


def make_tiny_vision_model(
    directory: Path,
    *,
    family: Family = "idefics3",
    seed: int = 0,
    hidden_size: int = 64,
    layers: int = 2,
    vocabulary: int = 1024,
    initializer_range: float = 0.2,
    longest_edge: int = 2 * TILE,
    texts: Sequence[str] = (),
) -> Path:
    """The directory, holding all that `transformers` and vLLM read: the same arguments give the same files.

    `longest_edge`, in pixels: of Idefics3, to which it enlarges or reduces every image before it cuts it; at `TILE` every image is one
    tile. `initializer_range` is large enough that an image changes what the model says; `texts` are more for the tokenizer to learn.
    """
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    text = {
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 64,
        "max_position_embeddings": 8192,
        "initializer_range": initializer_range,
        "bos_token_id": None,
    }
    if family == "idefics3":
        _make_idefics3(directory, text, vocabulary, texts, longest_edge)
    elif family == "qwen2.5-vl":
        _make_qwen(directory, text, vocabulary, texts)
    else:
        raise ValueError(f"family is {family!r}, not 'idefics3' or 'qwen2.5-vl'")
    return directory


def _make_idefics3(directory: Path, text: Mapping[str, Any], vocabulary: int, texts: Sequence[str], longest_edge: int) -> None:
    side = longest_edge // TILE
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, side + 1) for column in range(1, side + 1)]
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer = _make_tokenizer(vocabulary, texts, special, image="<image>")
    width = text["hidden_size"]
    config = Idefics3Config(
        text_config=LlamaConfig(**text, **_vocabulary(tokenizer), head_dim=32),
        vision_config={
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": 14,
            "initializer_range": text["initializer_range"],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    _save(directory, Idefics3ForConditionalGeneration(config), tokenizer)
    _write(
        directory / "preprocessor_config.json",
        _PIXELS
        | {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "size": {"longest_edge": longest_edge},
            "max_image_size": {"longest_edge": TILE},
            "do_image_splitting": True,
            "do_pad": True,
        },
    )
    _write(directory / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 4})


def _make_qwen(directory: Path, text: Mapping[str, Any], vocabulary: int, texts: Sequence[str]) -> None:
    special = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _make_tokenizer(vocabulary, texts, special, image="<|vision_start|><|image_pad|><|vision_end|>")
    start, end, _, image, video = map(tokenizer.convert_tokens_to_ids, special)
    width, patch = text["hidden_size"], CELL // 2
    config = Qwen2_5_VLConfig(
        text_config={
            **text,
            **_vocabulary(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_heads": 2,
            "patch_size": patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": width,
            "window_size": 2 * CELL,
            "fullatt_block_indexes": [1],
            "initializer_range": text["initializer_range"],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
    )
    _save(directory, Qwen2_5_VLForConditionalGeneration(config), tokenizer)
    common = _PIXELS | {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": 4 * CELL**2, "longest_edge": 64 * CELL**2},
    }
    _write(directory / "preprocessor_config.json", common | {"image_processor_type": "Qwen2VLImageProcessor"})
    _write(directory / "video_preprocessor_config.json", common | {"video_processor_type": "Qwen2VLVideoProcessor"})


_PIXELS: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def _make_tokenizer(vocabulary: int, texts: Sequence[str], special: Sequence[str], *, image: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(vocabulary, texts=texts, special=special)
    tokenizer.chat_template = tokenizer.chat_template.replace(_TEXT_ONLY, _WITH_IMAGES.replace("IMAGE", image))
    return tokenizer


def _vocabulary(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _save(directory: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    # A reply that ends with the padding token could not be continued: in the template a turn ends with the other one.
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
