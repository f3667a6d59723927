"""Runs Flax's and jax's own tests of attention with this package's functions in the place of theirs.

    python benchmarks/foreign_tests.py FOLDER --page docs/composability.md

FOLDER holds, at any depth, linen/linen_attention_test.py and nnx/nn/attention_test.py of Flax's tests and
nn_test.py of jax's, of the installed versions. Each file also runs as it is.
"""

from __future__ import annotations

import collections
import functools
import importlib.metadata
import json
import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest
import report

SUITES = {
    "linen/linen_attention_test.py": ("nothing", "MultiHeadAttention", "attention_fn"),
    "nnx/nn/attention_test.py": ("nothing", "nnx.MultiHeadAttention", "attention_fn"),
    "nn_test.py": ("nothing", "dot_product_attention"),
}
"""What is put in the place of the peer's, for each file of tests."""

CHOSEN = {"nn_test.py": "DotProductAttention"}
"""The tests that are of attention, where a file has others."""

PLACES = {
    "MultiHeadAttention": "`flax.linen.MultiHeadAttention`",
    "nnx.MultiHeadAttention": "`flax.nnx.MultiHeadAttention`",
    "attention_fn": "`dot_product_attention` and the default `attention_fn` of the layers",
    "dot_product_attention": "`jax.nn.dot_product_attention`",
    "nothing": "",
}


def main() -> None:
    """Runs all files, and writes the table."""
    parser = report.arguments(__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="where the files of tests lie")
    args = parser.parse_args()
    rows = []
    for suite, substitutions in SUITES.items():
        file = next(args.folder.resolve().rglob(suite), None)
        if file is None:
            raise SystemExit(f"{args.folder} has no {suite}; take it from the peer's repository")
        for ours in substitutions:
            program = f"import foreign_tests; foreign_tests.run({suite!r}, {ours!r}, {str(file)!r})"
            process = subprocess.run(
                [sys.executable, "-c", program],
                cwd=pathlib.Path(__file__).parent,
                stdout=subprocess.PIPE,
                check=True,
            )
            counts = json.loads(process.stdout.decode().splitlines()[-1])
            name = "none" if ours == "nothing" else f"`{ours}`"
            rows.append({"suite": f"`{suite}`", "ours": name, "place": PLACES[ours], **counts})
    columns = {"suite": "tests", "ours": "our layer or function", "place": "replaces"}
    columns |= {name: f"{name}|d" for name in ("passed", "failed", "skipped")}
    failures = "".join(
        f"- {row['suite']}, {row['ours']}, {x}\n" for row in rows for x in row["failures"]
    )
    text = report.table(rows, columns) + (f"\n\nFailed:\n\n{failures.rstrip()}" if failures else "")
    facts = {name: importlib.metadata.version(name) for name in ("flax", "jax")}
    sys.argv = ["foreign_tests.py", "FOLDER"]  # as the page shows it
    report.write("foreign tests", text, result={"rows": rows}, options=args, facts=facts)


def run(suite: str, ours: str, file: str) -> None:
    """Runs one file of tests in this process, and prints the counts of outcomes as JSON."""
    substitute(suite, ours)
    outcomes: collections.Counter[str] = collections.Counter(passed=0, failed=0, skipped=0)
    failures = []

    class Counter:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            outcomes[report.outcome] += report.when == "call" or not report.passed
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                line = (crash.message if crash else str(report.longrepr)).splitlines()[0]
                failures.append(f"`{report.nodeid.split('::')[-1]}`: {line}")

    options = ["-q", "-p", "no:cacheprovider", "-k", CHOSEN.get(suite, ""), file]
    code = pytest.main([*options, f"--rootdir={pathlib.Path(file).parent}"], plugins=[Counter()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"{file}: pytest ended with {code!r}")
    print(json.dumps({**outcomes, "failures": failures}))


def substitute(suite: str, ours: str) -> None:
    """Puts one of this package's functions or layers in the place of the peer's, in this process."""
    import flax.linen as nn
    import jax
    from flax import nnx

    import synthesizer_jax as sj
    import synthesizer_jax.linen.functional as replacement
    import synthesizer_jax.nnx as snnx

    replacement.nn = types.SimpleNamespace(**vars(nn))  # ours goes on calling Flax's functions

    if ours == "dot_product_attention":
        jax.nn.dot_product_attention = functools.wraps(jax.nn.dot_product_attention)(
            functools.partial(_dot_product_attention, jax.nn.dot_product_attention)
        )
    elif ours == "nnx.MultiHeadAttention":
        nnx.MultiHeadAttention = snnx.MultiHeadAttention
    elif ours == "attention_fn" and suite.startswith("nnx"):
        nnx.dot_product_attention = sj.attention_fn
        nnx.MultiHeadAttention.__init__.__kwdefaults__["attention_fn"] = sj.attention_fn
    elif ours != "nothing":
        defaults = {"attention_fn": sj.attention_fn} if ours == "attention_fn" else {}
        base = nn.MultiHeadDotProductAttention if defaults else sj.MultiHeadAttention
        nn.dot_product_attention = defaults.get("attention_fn", nn.dot_product_attention)
        for name in ("MultiHeadDotProductAttention", "MultiHeadAttention"):  # parameters have it
            fields = {"__annotations__": dict.fromkeys(defaults, Any), **defaults}
            setattr(nn, name, type(name, (base,), fields))


def _dot_product_attention(theirs: Any, *arrays: Any, **options: Any) -> Any:
    """Ours, without the two arguments of jax's that it does not have."""
    import synthesizer_jax as sj

    if options.get("return_residual"):
        return theirs(*arrays, **options)
    options.pop("implementation", None)
    return sj.dot_product_attention(*arrays, **options)


if __name__ == "__main__":
    main()
