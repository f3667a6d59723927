"""Runs the attention tests of Flax and JAX on this package's layers and functions.

    python benchmarks/foreign_tests.py FOLDER --page docs/composability.md

FOLDER must contain three test files, at any depth: linen/linen_attention_test.py and
nnx/nn/attention_test.py of Flax, and nn_test.py of JAX. Their versions must be those of the
installed packages. Each file is run once unchanged. Then the file is run again for each of our
layers and functions, which replaces a layer or function of Flax or JAX during the tests.
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
"""Our layers and functions that replace those of Flax or jax, for each file of tests."""

CHOSEN = {"nn_test.py": "DotProductAttention"}
"""The tests to run in files that also contain tests of other features."""

PLACES = {
    "MultiHeadAttention": "`flax.linen.MultiHeadAttention`",
    "nnx.MultiHeadAttention": "`flax.nnx.MultiHeadAttention`",
    "attention_fn": "`dot_product_attention` and the default `attention_fn` of the layers",
    "dot_product_attention": "`jax.nn.dot_product_attention`",
    "nothing": "",
}
"""The layer or function that each of our layers and functions replaces."""


def main() -> None:
    """Runs all files, and writes the table."""
    parser = report.arguments(__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="folder of the test files")
    args = parser.parse_args()
    rows = []
    for suite, substitutions in SUITES.items():
        file = next(args.folder.resolve().rglob(suite), None)
        if file is None:
            raise SystemExit(
                f"{args.folder} does not contain {suite}. Copy it from the repository of Flax or "
                "jax."
            )
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
    for name in ("passed", "failed", "skipped"):
        columns[name] = f"{name}|d"
    text = report.table(rows, columns)
    failures = [f"- {row['suite']}, {row['ours']}, {x}" for row in rows for x in row["failures"]]
    if failures:
        text += "\n\nFailed:\n\n" + "\n".join(failures)
    facts = {name: importlib.metadata.version(name) for name in ("flax", "jax")}
    sys.argv = ["foreign_tests.py", "FOLDER"]  # the command that the page shows
    report.write("foreign tests", text, result={"rows": rows}, options=args, facts=facts)


def run(suite: str, ours: str, file: str) -> None:
    """Runs a file of tests in this process, and prints the number of tests with each outcome."""
    substitute(suite, ours)
    outcomes: collections.Counter[str] = collections.Counter(passed=0, failed=0, skipped=0)
    failures = []

    class Counter:
        """A pytest plugin that counts the outcomes of tests and collects failures."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            """Counts the outcome of a test, or of a fixture that failed."""
            if report.when == "call" or not report.passed:
                outcomes[report.outcome] += 1
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                line = (crash.message if crash else str(report.longrepr)).splitlines()[0]
                failures.append(f"`{report.nodeid.split('::')[-1]}`: {line}")

    options = ["-q", "-p", "no:cacheprovider", "-k", CHOSEN.get(suite, ""), file]
    code = pytest.main([*options, f"--rootdir={pathlib.Path(file).parent}"], plugins=[Counter()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r} for {file}.")
    print(json.dumps({**outcomes, "failures": failures}))


def substitute(suite: str, ours: str) -> None:
    """Replaces a layer or function of Flax or JAX with one of this package, in this process."""
    import flax.linen as nn
    import jax
    from flax import nnx

    import synthesizer_jax as sj
    import synthesizer_jax.linen.functional as replacement
    import synthesizer_jax.nnx as snnx

    # Our functions must still call the original functions of Flax, so give them a copy of Flax's
    # namespace.
    replacement.nn = types.SimpleNamespace(**vars(nn))

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
        # Flax names parameters after the class of their module. Make subclasses with the original
        # class names, so that the parameters also have their original names.
        for name in ("MultiHeadDotProductAttention", "MultiHeadAttention"):
            fields = {"__annotations__": dict.fromkeys(defaults, Any), **defaults}
            setattr(nn, name, type(name, (base,), fields))


def _dot_product_attention(theirs: Any, *arrays: Any, **options: Any) -> Any:
    """Calls our function with the arguments of JAX's function.

    Our function lacks two of these arguments. If ``return_residual`` is set, JAX's function is
    called instead. The argument ``implementation`` is ignored.
    """
    import synthesizer_jax as sj

    if options.get("return_residual"):
        return theirs(*arrays, **options)
    options.pop("implementation", None)
    return sj.dot_product_attention(*arrays, **options)


if __name__ == "__main__":
    main()
