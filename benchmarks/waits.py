"""Measures how long users of two commits wait before the first step and the first answer.

    python benchmarks/waits.py OLD_COMMIT NEW_COMMIT --page docs/performance.md

The commits take turns, and every measurement is made in a new process. The table shows medians:

- `load`: `sj.load` of a text encoder of T5 XL's size in bfloat16, from three safetensors files with
  random weights, and the peak of the process's memory.
- *train*: `synthesizer-jax train` of T5 1.1 small with 8 examples of 128 + 16 tokens, from the
  command to the moment when the step is ready, without and with compiled programs in the cache.
- *attention*: the first call of attention with 512 keys on a CPU, which includes its imports.
- *inspect*: `synthesizer-jax inspect` of a tiny model, without compiled programs.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np
import report
from ab import checkout
from safetensors.numpy import save_file

XL = {"d_model": 2048, "d_ff": 5120, "num_heads": 32, "d_kv": 64, "num_layers": 24}
SHARDS = 3

LOAD = """
import sys, time, resource
import jax
import synthesizer_jax as sj
began = time.perf_counter()
loaded = sj.load(sys.argv[1], encoder_only=True, dtype="bfloat16")
jax.block_until_ready(loaded.variables)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(time.perf_counter() - began, peak / sum(x.nbytes for x in jax.tree.leaves(loaded.variables)))
"""
"""A program that prints the seconds of `sj.load`, and the peak memory divided by the weights."""

ATTENTION = """
import time
import jax.numpy as jnp
from synthesizer_jax import attention
x = jnp.ones((2, 512, 2, 8))
x.block_until_ready()
began = time.perf_counter()
attention.attend((attention.low_rank(x, x, token_keys=True),), x).block_until_ready()
print(time.perf_counter() - began)
"""
"""A program that prints the seconds of the first call of attention."""

SMALL = [
    "quickstart:dot_product",
    *("--set", "model=t5_1_1_small", "--set", "data.batch_size=8"),
    *("--set", "data.inputs_length=128", "--set", "data.targets_length=16"),
    *("--set", "evaluation.every=0", "--set", "training.steps=1000"),
]
TINY = [
    "papers.cotraining:synthetic:v",
    *("--set", "training.steps=20", "--set", "evaluation.every=0"),
]


def main() -> None:
    """Measures both commits in turns, and writes the table."""
    parser = report.arguments(__doc__, rounds=3)
    parser.add_argument("old", help="the commit to compare with")
    parser.add_argument("new", help="the commit that should be faster")
    args = parser.parse_args()
    facts = report.machine()
    with (
        tempfile.TemporaryDirectory() as scratch,
        checkout(args.old) as old,
        checkout(args.new) as new,
    ):
        model = pathlib.Path(scratch) / "model"
        make_encoder(model)
        commits = {"old": Commit(old, model), "new": Commit(new, model)}
        for name, commit in commits.items():
            print(f"preparing {name}", file=sys.stderr, flush=True)
            commit.prepare()
        seconds: dict[str, dict[str, list[float]]] = {}
        for _ in range(args.rounds):
            for name, commit in commits.items():
                for what, value in commit.measure().items():
                    print(f"{name}: {what} {value:.2f}", file=sys.stderr, flush=True)
                    seconds.setdefault(what, {}).setdefault(name, []).append(value)
    rows = [
        {"name": what, **{name: statistics.median(values) for name, values in of.items()}}
        for what, of in seconds.items()
    ]
    for row in rows:
        row["ratio"] = row["new"] / row["old"]
    columns = {
        "name": "wait",
        "old": f"{args.old}|.2f",
        "new": f"{args.new}|.2f",
        "ratio": "ratio|.2f",
    }
    caption = (
        "Waits in seconds, and the peak memory of `load` relative to the weights. Medians of "
        f"{args.rounds} processes of each of two commits, which took turns."
    )
    report.write(
        "waits",
        f"{caption}\n\n{report.table(rows, columns)}",
        result={"rows": rows},
        options=args,
        facts=facts,
    )


class Commit:
    """A commit to measure.

    Args:
      folder: the checkout of the commit. Data sets and runs are written beside it.
      model: the folder of the model to load.
    """

    def __init__(self, folder: pathlib.Path, model: pathlib.Path):
        self.folder = folder
        self.model = model
        self.scratch = folder.parent / "scratch"
        self.scratch.mkdir()
        # An installation has the recipes of `configs/` as the package `synthesizer_jax.recipes`.
        (folder / "synthesizer_jax" / "recipes").symlink_to(folder / "configs")

    def prepare(self) -> None:
        """Prepares the data, trains the model to inspect, and fills the cache of programs."""
        self._train("inspected", TINY, until=None)
        self._train("warm", SMALL, until="ready in")

    def measure(self) -> dict[str, float]:
        """Returns the seconds of all waits."""
        load, peak = map(float, self._python("-c", LOAD, self.model).split())
        (attention,) = map(float, self._python("-c", ATTENTION).split())
        cold, warm = (
            self._train("measured", SMALL, until="ready in", cache=cache)
            for cache in ("empty", "cache")
        )
        began = time.perf_counter()
        self._cli("inspect", "inspected", "--data-dir", "data", cache="empty")
        return {
            "load": load,
            "load, peak memory / weights": peak,
            "train, without compiled programs": cold,
            "train, with compiled programs": warm,
            "attention": attention,
            "inspect": time.perf_counter() - began,
        }

    def _train(
        self, run: str, words: list[str], *, until: str | None, cache: str = "cache"
    ) -> float:
        """Trains until a line of the output contains a text, and returns the seconds until then."""
        shutil.rmtree(self.scratch / run, ignore_errors=True)
        command = ["train", *words, "--workdir", run, "--data-dir", "data"]
        began = time.perf_counter()
        process = self._start([*command], cache)
        assert process.stdout is not None
        for line in process.stdout:
            if until is not None and until in line:
                seconds = time.perf_counter() - began
                process.kill()
                process.wait()
                return seconds
        if process.wait() or until is not None:
            raise SystemExit(f"{' '.join(command)} failed in {self.folder}")
        return time.perf_counter() - began

    def _cli(self, *words: str, cache: str) -> None:
        """Runs a command of the command line."""
        output, _ = self._start(list(words), cache).communicate()
        if "error:" in output:
            raise SystemExit(output)

    def _start(self, words: list[str], cache: str) -> subprocess.Popen[str]:
        """Starts a command of the command line. The cache ``empty`` is emptied first."""
        directory = self.scratch / cache
        if cache == "empty":
            shutil.rmtree(directory, ignore_errors=True)
        return subprocess.Popen(
            [sys.executable, "-m", "synthesizer_jax", *words],
            cwd=self.scratch,
            env={**self._environment(), "XDG_CACHE_HOME": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _python(self, *words: str | pathlib.Path) -> str:
        """Runs Python and returns what it prints."""
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.scratch,
            env=self._environment(),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def _environment(self) -> dict[str, str]:
        """Returns the environment in which Python imports the commit's package."""
        own = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
        return {**own, "PYTHONPATH": str(self.folder), "JAX_PLATFORMS": "cpu"}


def make_encoder(folder: pathlib.Path) -> None:
    """Writes the encoder of a T5 1.1 of XL's size, as transformers saves it, in bfloat16.

    The folder also gets the tokenizer of a ByT5, because `sj.load` needs a tokenizer.
    """
    folder.mkdir()
    config = {
        **XL,
        "model_type": "t5",
        "architectures": ["T5EncoderModel"],
        "vocab_size": 32128,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.1,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}), encoding="utf-8"
    )
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        """Returns random weights in bfloat16."""
        return (0.05 * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)

    width, inner = XL["d_model"], XL["num_heads"] * XL["d_kv"]
    tensors = {"shared.weight": draw(32128, width)}
    for i in range(XL["num_layers"]):
        attention, network = (f"encoder.block.{i}.layer.{n}" for n in (0, 1))
        for name in "qkv":
            tensors[f"{attention}.SelfAttention.{name}.weight"] = draw(inner, width)
        tensors[f"{attention}.SelfAttention.o.weight"] = draw(width, inner)
        if i == 0:
            bias = f"{attention}.SelfAttention.relative_attention_bias.weight"
            tensors[bias] = draw(32, XL["num_heads"])
        tensors[f"{attention}.layer_norm.weight"] = draw(width)
        tensors[f"{network}.layer_norm.weight"] = draw(width)
        for name in ("wi_0", "wi_1"):
            tensors[f"{network}.DenseReluDense.{name}.weight"] = draw(XL["d_ff"], width)
        tensors[f"{network}.DenseReluDense.wo.weight"] = draw(width, XL["d_ff"])
    tensors["encoder.final_layer_norm.weight"] = draw(width)

    files = {}
    names = list(tensors)
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = names[shard::SHARDS]
        save_file({name: tensors[name] for name in part}, folder / file)
        files |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


if __name__ == "__main__":
    main()
