"""Measures the peak memory and the speed of converting a made checkpoint to a run.

    python benchmarks/convert.py --size 3b --page docs/performance.md

A folder of transformers with random float32 weights of T5 3B's shapes is written (11 GB), converted in a
process of its own, and copied with `cp`. Needs three times the checkpoint's size on the disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import report
from safetensors.numpy import save_file

from synthesizer_jax.pretrained.architecture import Architecture
from synthesizer_jax.pretrained.huggingface.config import write_config
from synthesizer_jax.pretrained.huggingface.names import torch_name
from synthesizer_jax.pretrained.tensors import correspondences

SIZES: dict[str, dict[str, int]] = {
    "small": {"d_model": 512, "num_heads": 8, "d_ff": 2048, "layers": 6},
    "large": {"d_model": 1024, "num_heads": 16, "d_ff": 4096, "layers": 24},
    "3b": {"d_model": 1024, "num_heads": 32, "head_dim": 128, "d_ff": 16384, "layers": 24},
}
"""T5 1.0's sizes."""

SHARD = 2 * 10**9


def main() -> None:
    """Runs the measurement and writes the table."""
    parser = report.arguments(__doc__)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--scratch", type=pathlib.Path, help="directory for the files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        row = measure(pathlib.Path(scratch), args.size)
    columns = {
        "size": "T5 1.0",
        "checkpoint": "checkpoint, GB|.2f",
        "largest": "largest tensor, GB|.3f",
        "peak": "peak memory, GB|.2f",
        "limit": "1.3 × largest + 1.5 GB|.2f",
        "convert": "conversion, GB/s|.2f",
        "copy": "cp, GB/s|.2f",
    }
    text = (
        "`synthesizer-jax convert` of a made float32 checkpoint, in a process of its own; both times "
        "include `sync`.\n\n" + report.table([row], columns)
    )
    report.write("convert", text, result=row, options=args, facts=report.machine())


def measure(scratch: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns one row of the table."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        sizes = pool.apply(make_folder, (scratch / "source", name))
    total, largest = sum(sizes) / 1e9, max(sizes) / 1e9
    copy, _ = run(["cp", "-r", str(scratch / "source"), str(scratch / "copy")])
    shutil.rmtree(scratch / "copy")
    command = [sys.executable, "-m", "synthesizer_jax", "convert", str(scratch / "source")]
    convert, peak = run([*command, str(scratch / "run")])
    return {
        "size": name,
        "checkpoint": total,
        "largest": largest,
        "peak": peak,
        "limit": 1.3 * largest + 1.5,
        "convert": total / convert,
        "copy": total / copy,
    }


def run(command: list[str]) -> tuple[float, float]:
    """Runs a command and `sync`; returns the seconds and the command's peak memory in GB."""
    began = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} failed")
    subprocess.run(["sync"], check=True)
    return time.perf_counter() - began, usage.ru_maxrss * 1024 / 1e9


def make_folder(folder: pathlib.Path, name: str) -> list[int]:
    """Writes a folder with random weights, shard by shard; returns the tensors' sizes in bytes."""
    size = SIZES[name]
    architecture = Architecture(
        vocab_size=32128,
        d_model=size["d_model"],
        num_heads=size["num_heads"],
        head_dim=size.get("head_dim", 64),
        d_ff=size["d_ff"],
        num_layers=size["layers"],
        num_decoder_layers=size["layers"],
        activations=("relu",),
        tied=True,
        scaled=True,
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_config(architecture, "float32")))
    tokenizer = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    rng, shard, weight_map, sizes = np.random.default_rng(0), {}, {}, []

    def write() -> None:
        file = f"model-{len(list(folder.glob('*.safetensors'))) + 1:05}.safetensors"
        save_file(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for c in correspondences(architecture.build(), torch_name):
        x = rng.standard_normal(c.layout.shape(c.shape), np.float32)
        if sum(y.nbytes for y in shard.values()) + x.nbytes > SHARD:
            write()
        shard[c.name] = x
        sizes.append(x.nbytes)
    write()
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sizes


if __name__ == "__main__":
    main()
