"""Compares a training step or decoding of two commits, which take turns.

    python benchmarks/ab.py HEAD~1 HEAD --systems v r
    python benchmarks/ab.py HEAD~1 HEAD --systems v --decode --beams 4

Both commits run with the packages of the current environment, each in a process of its own, on the
same random model and batch. The commits are checked out into a temporary directory. A change of
attention, of decoding or of the training step should take at most 1.02 of the time of its parent.

The model has the small size of T5 1.1, and computes in float32 on CPUs. The options of the model
are those of `peers.py`, whose worker `workers/ours.py` measures both commits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import racing
from peers import SIZES

ROOT = pathlib.Path(__file__).parent.parent


def main() -> None:
    """Measures the two commits and prints the ratios of their times."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("old", help="the commit to compare with")
    parser.add_argument("new", help="the commit that may be slower")
    parser.add_argument("--systems", nargs="+", default=["v", "r"], help="variants, as in peers.py")
    parser.add_argument("--rounds", type=int, default=8, help="the number of rounds")
    parser.add_argument("--decode", action="store_true", help="decode instead of training")
    parser.add_argument("--beams", type=int, default=1, help="the number of beams with --decode")
    parser.add_argument("--batch", type=int, default=8, help="the number of examples")
    args = parser.parse_args()

    with contextlib.ExitStack() as stack:
        folders = {name: stack.enter_context(checkout(name)) for name in (args.old, args.new)}
        for system in args.systems:
            commits = [
                racing.System(
                    name,
                    worker=str(folder / "benchmarks" / "workers" / "ours.py"),
                    options=worker_options(args, system),
                    environment={
                        "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "benchmarks")])
                    },
                )
                for name, folder in folders.items()
            ]
            old, new = racing.race(commits, rounds=args.rounds)
            print(
                f"{system}: {args.old} takes {old['seconds']:.3f} s and {args.new} takes "
                f"{new['seconds']:.3f} s, which is {new['seconds'] / old['seconds']:.3f} of the "
                f"time (medians of {args.rounds} rounds)",
                flush=True,
            )


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[pathlib.Path]:
    """Checks out a commit into a temporary directory, which is removed afterwards."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "commit"
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def worker_options(args: argparse.Namespace, system: str) -> dict[str, Any]:
    """Returns the options for the worker of a commit."""
    d_model, layers, d_ff, heads, head_dim = SIZES["small"]
    return {
        "system": system,
        "d_model": d_model,
        "layers": layers,
        "d_ff": d_ff,
        "heads": heads,
        "head_dim": head_dim,
        "batch": args.batch,
        "inputs": 128 if args.decode else 512,
        "targets": 114,
        "new_tokens": 64,
        "decode": args.decode,
        "beams": args.beams,
        "dropout": 0.1,
        "dtype": "float32",
        "small": False,
        "scan": False,
        "remat": None,
        "threads": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
