"""Checks and times this package and other libraries on one NVIDIA GPU within a time limit.

    python benchmarks/gpu.py --out results --minutes 8
    python benchmarks/gpu.py --out results --parts steps long --minutes 5
    python benchmarks/gpu.py --results results/gpu.json --json docs/gpu.json \\
        --page docs/performance.md

The first two commands run parts of the measurements in the given order. With `--tiny`, these
commands run everything in tiny sizes on a CPU. Every row is added to `gpu.json` as soon as it is
measured. If a system crashes, takes too long, or has no time left, its row contains an error
instead of measurements. The last command merges several files of results and writes the tables, for
which it needs no GPU. Rows of later files replace rows of earlier files.

Every model runs in a separate process. The attention functions of one library run one after the
other in one process, and each function is measured twice. Up to six processes start and compile at
the same time, but only one process is measured at a time. Other libraries run in the virtual
environment `.venv-peers` if it exists, and otherwise in the environment of this script.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import itertools
import json
import pathlib
import re
import sys
import time
from typing import Any

import peers
import racing
import report

from synthesizer_jax.costs.chips import peak_flops

Row = dict[str, Any]

FUNCTIONS = ("ours", "jax.nn cudnn", "jax.nn xla", "torch SDPA")
SUBLAYERS = (
    "DotProduct + bias",
    "Random",
    "Random + DotProduct + bias",
    "TalkingHeads + bias",
    "Gaussian",
    "jax.nn cudnn",
    "jax.nn cudnn + bias",
    "jax.nn xla + bias",
    "Flax + bias",
    "torch SDPA + bias",
)
PROBLEMS = (
    "T5, lengths",
    "Random, lengths",
    "Random + T5, lengths",
    "T5, no mask",
    "T5, causal",
    "T5, packed",
    "T5, packed causal",
    "T5, 2048",
    "T5, 2048 causal",
    "T5, width 128",
    "T5, 500",
    "cross 114 × 512",
    "Random, causal",
    "Random, packed",
    "Random, 2048",
    "Random, 500",
    "Random + T5, packed",
    "taps, lengths",
    "taps, causal",
)
STEPS = ("v", "r", "rv", "hc_sa", "v, scanned", "transformers", "transformers, by layer")
LONG = ("v", "r")
DECODE = ("v", "transformers", "r")
PREPARATION = 240
"""The maximum time in seconds for a worker to start and compile."""
ANSWER = 60
"""The maximum time in seconds for a worker to answer."""
WORKERS = 6
"""The number of workers that start and compile at the same time."""

PARTS = ("correctness", "steps", "functions", "sublayers", "long", "decode")
"""The parts of the measurements. The most valuable part comes first."""


class Results:
    """The rows of all parts. The file of results is rewritten whenever a row is added."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        self.facts: Row = found.get("facts", {})
        self.parts: dict[str, list[Row]] = found.get("parts", {})

    def put(self, part: str, row: Row) -> None:
        """Adds a row, or replaces the row with the same name and shape.

        A row with an error does not replace a row with measurements.
        """
        rows = self.parts.setdefault(part, [])
        for index, other in enumerate(rows):
            if identity(other) == identity(row):
                if "error" not in row or "error" in other:
                    rows[index] = row
                return
        rows.append(row)

    def add(self, part: str, row: Row) -> None:
        """Adds or replaces a row, writes the file of results, and prints the row."""
        self.put(part, row)
        self.write()
        words = [part]
        for key, value in row.items():
            if key == "errors":
                continue
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            words.append(text if key == "name" else f"{key} {text}")
        print(*words, sep=" | ", flush=True)

    def write(self) -> None:
        """Writes the file of results."""
        report.write_file(self.path, self.json())

    def json(self) -> str:
        """Returns the content of the file of results."""
        return json.dumps({"facts": self.facts, "parts": self.parts}, indent=1) + "\n"


def identity(row: Row) -> tuple[Any, ...]:
    """Returns the values that identify a row among the rows of the same part."""
    return row["name"], row.get("batch"), row.get("length"), row.get("beams")


class Session:
    """Starts and runs workers on a device until a deadline."""

    def __init__(self, args: argparse.Namespace, results: Results):
        self.args = args
        self.results = results
        self.pool = concurrent.futures.ThreadPoolExecutor(WORKERS)
        self.prepared: dict[str, concurrent.futures.Future[racing.Worker]] = {}
        self.deadline = time.monotonic() + 60 * args.minutes
        sizes = peers.SIZES["tiny" if args.tiny else "base"]
        names = ("d_model", "layers", "d_ff", "heads", "head_dim")
        self.options: Row = {
            **dict(zip(names, sizes, strict=True)),
            "tiny": args.tiny,
            "dropout": 0.1,
            "dtype": "bfloat16",
            "threads": 8,
            "device": "cpu" if args.tiny else "cuda",
            "compile": "eager" if args.tiny else "inductor",
        }
        self.environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
        if args.tiny:
            self.environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

    def _start(self, name: str, worker: str, options: Row) -> racing.Worker:
        """Starts a worker. Raises `SystemExit` if the worker ends early or if no time is left."""
        left = self.deadline - time.monotonic()
        if left < 15:
            raise SystemExit("no time was left")
        is_torch = worker in ("pytorch.py", "torch_attention.py")
        python = str(racing.PEERS) if is_torch and racing.PEERS.exists() else sys.executable
        system = racing.System(name, worker, {**self.options, **options}, python, self.environment)
        running = racing.Worker(system, min(PREPARATION, left))
        # Workers that check correctness compile programs for every answer, so they need more time.
        compiles_late = options.get("part") == "correctness"
        running.limit = PREPARATION if compiles_late else ANSWER
        return running

    def prepare(self, *args: Any) -> None:
        """Starts a worker in the background.

        A later call of `start` returns it or raises its error.
        """
        self.prepared[repr(args)] = self.pool.submit(self._start, *args)

    def start(self, *args: Any) -> racing.Worker:
        """Returns the worker that `prepare` has started, or starts a worker now."""
        future = self.prepared.pop(repr(args), None)
        if future is None:
            return self._start(*args)
        return future.result()

    def run_cases(
        self, worker: str, part: str, cases: list[Row], *, passes: int, ahead: bool
    ) -> None:
        """Runs a worker that measures one case after the other and sends a row for each case.

        If the worker crashes during a case, a new worker continues with the next case. If a worker
        cannot start, all its cases fail.

        Args:
          worker: the file of the worker.
          part: the part of the measurements.
          cases: the cases, with their names and shapes.
          passes: how many times every case is measured.
          ahead: whether to only start the worker in the background. A later call measures.
        """
        if ahead:
            if cases:
                self.prepare(worker, worker, {"part": part, "cases": cases})
            return
        while cases:
            done, failed = 0, cases
            try:
                running = self.start(worker, worker, {"part": part, "cases": cases})
                failed = cases[:1]
                for case in cases * passes:
                    answer = running.run_round()
                    for row in answer.get("rows", [answer]):
                        self.results.add(part, {**case, **running.facts, **row})
                    done += 1
                    failed = cases[done : done + 1]
                running.close()
                return
            except SystemExit as end:
                for case in failed:
                    self.results.add(part, {**case, "error": last_line(end)})
            cases = cases[done + len(failed) :] if done < len(cases) else []

    def run_model(self, part: str, name: str, options: Row, *, rounds: int, ahead: bool) -> None:
        """Measures a model. If the memory is too small, tries again with more micro-batches.

        Args:
          part: the part of the measurements.
          name: the name of the row. The name consists of a system and, optionally, the way in which
            the system is compiled, as in ``v, scanned``.
          options: the options of the worker.
          rounds: the number of rounds.
          ahead: whether to only start the worker in the background. A later call measures.
        """
        kind, _, suffix = name.partition(", ")
        options = {
            "name": name,
            "system": kind,
            "remat": None,
            **options,
            "scan": suffix == "scanned",
            "by_layer": suffix == "by layer",
        }
        if part == "decode" and not suffix:
            options["compile"] = None
        worker = peers.PEERS.get(kind, "ours.py")
        shown = {k: options[k] for k in ("name", "batch", "inputs", "targets", "beams")}
        # The library transformers keeps the attention weights of all heads for the backward pass.
        # Start with four micro-batches, because the worker would have to compile again if the
        # weights of a larger batch did not fit into memory.
        counts = (4,) if kind == "transformers" else (1, 2, 4)
        if ahead:
            self.prepare(name, worker, {**options, "micro_batches": counts[0]})
            return
        for count in counts:
            try:
                running = self.start(name, worker, {**options, "micro_batches": count})
                results = [running.run_round() for _ in range(rounds)]
                running.close()
            except SystemExit as end:
                row = {**shown, "error": last_line(end)}
                if "RESOURCE_EXHAUSTED" in str(end):
                    continue
                break
            facts = {"micro_batches": count, **running.facts}
            row = {**shown, **racing.summarize_results(name, facts, results)}
            break
        self.results.add(part, row)


def last_line(end: SystemExit) -> str:
    """Returns the last line of an error that names an exception.

    This line is the most informative.
    """
    lines = [line for line in str(end).splitlines() if line.strip() and not line.startswith(" ")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines)[-1][:300]


def timed_cases(part: str, *, tiny: bool) -> list[Row]:
    """Returns the cases of the parts ``functions`` and ``sublayers``, with their shapes."""
    if part == "functions":
        shapes = [(128, 512), (16, 2048)]
        names = [name + bias for bias in (" + bias", "") for name in FUNCTIONS]
    else:
        shapes = [(16, 512), (4, 2048)]
        names = list(SUBLAYERS)
    if tiny:
        shapes = [(2, 32), (1, 64)]
    return [
        {"name": name, "batch": batch, "length": length}
        for batch, length in shapes
        for name in names
    ]


def run_part(session: Session, part: str, *, ahead: bool) -> None:
    """Runs a part of the measurements, or only starts the workers of the part.

    Args:
      session: the session, which limits the time on the device.
      part: the part of the measurements.
      ahead: whether to only start the workers in the background. A later call measures.
    """
    tiny = session.args.tiny

    def wanted(name: str) -> bool:
        """Returns whether the option `--systems` selects the row."""
        return session.args.systems is None or name in session.args.systems

    if part == "correctness":
        problems = PROBLEMS[1::6] if tiny else PROBLEMS
        cases = [{"name": name} for name in problems if wanted(name)]
        session.run_cases("gpu_attention.py", part, cases, passes=1, ahead=ahead)
    elif part in ("functions", "sublayers"):
        cases = [case for case in timed_cases(part, tiny=tiny) if wanted(case["name"])]
        for worker in ("gpu_attention.py", "torch_attention.py"):
            mine = [c for c in cases if c["name"].startswith("torch") == worker.startswith("torch")]
            session.run_cases(worker, part, mine, passes=2, ahead=ahead)
    elif part in ("steps", "long"):
        if part == "steps":
            batch, inputs, systems = 128, 512, STEPS
        else:
            batch, inputs, systems = 32, 2048, LONG
        shape = (4, 32, 16) if tiny else (batch, inputs, 114)
        options: Row = {
            **dict(zip(("batch", "inputs", "targets"), shape, strict=True)),
            "decode": False,
            "new_tokens": shape[2],
            "beams": None,
        }
        for name in filter(wanted, systems):
            session.run_model(part, name, options, rounds=5, ahead=ahead)
    else:
        shape = (2, 32, 8) if tiny else (32, 512, 64)
        options = {
            **dict(zip(("batch", "inputs", "new_tokens"), shape, strict=True)),
            "decode": True,
            "targets": shape[2],
        }
        for beams, name in itertools.product((1, 4), filter(wanted, DECODE)):
            session.run_model(part, name, {**options, "beams": beams}, rounds=2, ahead=ahead)


def run(args: argparse.Namespace) -> None:
    """Runs the chosen parts of the measurements."""
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "gpu.json")
    session = Session(args, results)
    worker = session.start("rates", "gpu_attention.py", {"part": "rates"})
    results.facts = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        **worker.run_round(),
    }
    worker.close()
    results.write()
    print(results.facts, flush=True)
    for part in args.parts:
        run_part(session, part, ahead=True)
    for part in args.parts:
        began = time.monotonic()
        if part != "correctness":
            concurrent.futures.wait(session.prepared.values())
        run_part(session, part, ahead=False)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)


def with_rates(rows: list[Row], peak: float | None) -> list[Row]:
    """Returns rows with tokens per second, MFU, and the speed relative to transformers.

    Args:
      rows: the rows of systems that were measured with the same shape. Only the rows of training
        steps change.
      peak: the peak rate of the device in FLOP/s, or None if it is not known.
    """
    finished = [row for row in rows if "loss" in row]
    of_transformers = [row for row in finished if row["name"].startswith("transformers")]
    base = min((row["seconds"] for row in of_transformers), default=None)
    # The row of transformers has no FLOPs. Use those of the variant *v*, which performs the same
    # computation.
    vanilla = next((r["flops"] for r in rows if r["name"] == "v" and "flops" in r), None)
    result = []
    for row in rows:
        if "loss" in row:
            seconds = row["seconds"]
            flops = row.get("flops", vanilla)
            tokens = row["batch"] * (row["inputs"] + row["targets"])
            row = {
                **row,
                "tokens": tokens / seconds,
                "ms": 1e3 * seconds,
                "mfu": flops / seconds / peak if flops and peak else None,
                "speed": base / seconds if base else None,
            }
        result.append(row)
    return result


TIMES = {
    "name": "",
    "forward_ms": "forward, ms|.3f",
    "both_ms": "forward + backward, ms|.3f",
    "forward_tflops": "TFLOP/s|.0f",
    "both_tflops": "forward + backward, TFLOP/s|.0f",
    "spread": "spread|.0%",
    "temporaries_mb": "temporaries, MB|.1f",
    "compile_seconds": "compiling, s|.1f",
    "error": "error",
}
STEP = {
    "name": "system",
    "micro_batches": "micro-batches|d",
    "tokens": "tokens/s|,.0f",
    "ms": "step, ms|.1f",
    "mfu": "MFU|.1%",
    "speed": "speed|.2f",
    "device_gb": "peak memory, GB|.1f",
    "parameters": "parameters|,d",
    "compile_seconds": "compiling, s|.0f",
    "error": "error",
}
DECODED = {
    "name": "system",
    "beams": "beams|d",
    "tokens_per_second": "tokens/s|,.0f",
    "seconds": "batch, s|.3f",
    "device_gb": "peak memory, GB|.1f",
    "compile_seconds": "compiling, s|.0f",
    "error": "error",
}
CHECKED = {
    "kind": "dtype and computation",
    "passed": "calls within the bound",
    "difference": "largest ‖x − r‖ / ‖r‖|.1e",
    "bound": "bound|.0e",
    "error": "error",
}
COLUMNS = {"correctness": CHECKED, "decode": DECODED, "steps": STEP, "long": STEP}
"""The columns of the tables by part. All other parts have the columns `TIMES`."""
TITLES = {
    "correctness": (
        "Values and gradients of attention compared with the reference route in float32, whose "
        "matrix products have the highest precision. Each call has new random inputs. On a GPU, "
        "matrix products of float32 arrays are computed in TF32. *r* is a result of the "
        "reference route, and *x* is the result that is compared with it."
    ),
    "steps": (
        "One training step of T5 1.1 base with AdamW, in bfloat16 with float32 parameters and "
        "dropout 0.1. *scanned* models compute their layers in one `lax.scan`. transformers runs "
        "under autocast and is compiled by `torch.compile`, either as a whole or layer by layer. "
        "It divides the batch into 4 micro-batches, because it stores the attention weights of "
        "all heads for the backward pass. Ours does not store them and takes the batch at once. "
        "Whether transformers would be faster with fewer micro-batches was not measured. MFU "
        "counts six FLOPs for each multiply-add of the forward pass. *Speed* is relative to "
        "transformers."
    ),
    "long": "The same step with longer inputs.",
    "decode": (
        "Greedy decoding and beam search of 64 new tokens with T5 1.1 base, for 32 inputs of 512 "
        "tokens, in bfloat16. transformers is not compiled."
    ),
    "functions": (
        "The attention function without projections, 12 heads of 64, in bfloat16, with a padding "
        "mask. *+ bias* is a learned relative bias like that of T5. Times are means of two "
        "measurements, and *spread* is the relative difference between them. TFLOP/s include two "
        "matrix products for the forward pass and seven for forward and backward together. "
        "Masked pairs of positions are included."
    ),
    "sublayers": (
        "Attention sub-layers with their projections, d_model 768, 12 heads of 64, in bfloat16, "
        "with a padding mask. TFLOP/s include masked pairs of positions. For Random, they "
        "include one matrix product for the forward pass and three for forward and backward "
        "together."
    ),
}
"""The captions of the tables by part."""


def merge(results: list[Results]) -> Results:
    """Adds the rows of later files to the first file, and returns the merged results."""
    first, *others = results
    for other in others:
        # Keep the highest measured rate, because other programs on the device lower a rate.
        rates = {name: x for name, x in first.facts.items() if isinstance(x, float)}
        highest = {name: max(x, other.facts[name]) for name, x in rates.items()}
        first.facts = {**first.facts, **other.facts, **highest}
        for part, rows in other.parts.items():
            for row in rows:
                first.put(part, row)
    return first


def write_page(args: argparse.Namespace) -> None:
    """Merges files of results, and writes the merged file and its tables."""
    first = merge([Results(path) for path in args.results])
    facts = first.facts
    rows = itertools.chain.from_iterable(first.parts.values())
    versions = ", ".join(r["versions"] for r in rows if "versions" in r).split(", ")
    rates = f"{facts['product_tflops']:.0f} TFLOP/s and copies {facts['copy_gbytes']:,.0f} GB/s"
    device = (
        f"The measurements are from {facts['date']}, with {', '.join(dict.fromkeys(versions))}. "
        f"The {facts['device']} multiplies bfloat16 matrices at {rates}. All measurements are in "
        "[gpu.json](gpu.json). This command writes the tables from them:\n\n"
        "`python benchmarks/gpu.py --results docs/gpu.json --page docs/performance.md`\n"
    )
    page = args.page.read_text(encoding="utf-8") if args.page.exists() else ""
    page = report.with_section(page, "gpu device", device)
    for part, rows in first.parts.items():
        tables = [TITLES[part]]
        rows = worst_rows(rows) if part == "correctness" else rows
        for shape, chosen in itertools.groupby(sorted(rows, key=shape_of), shape_of):
            shown = with_rates([*chosen], peak_flops(facts["device"], "bfloat16"))
            columns = COLUMNS.get(part, TIMES)
            used = {k: c for k, c in columns.items() if any(r.get(k) is not None for r in shown)}
            tables.append(f"{shape}\n\n{report.table(shown, used)}".strip())
        tables.append(
            f"`python benchmarks/gpu.py --out results --parts {part}` ({facts['device']})"
        )
        page = report.with_section(page, f"gpu {part}", "\n\n".join(tables) + "\n")
    report.write_file(args.page, page)
    if args.json:
        report.write_file(args.json, first.json())


def worst_rows(rows: list[Row]) -> list[Row]:
    """Returns the row with the largest error for every pair of a dtype and a route."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        _, dtype, route = row["name"].rsplit(", ", 2)
        kinds.setdefault(f"{dtype}, {row.get('default', route)}", []).append(row)
    result = []
    for kind, found in kinds.items():
        passed = sum(row.get("verdict") == "PASS" for row in found)
        worst = max(found, key=lambda row: row.get("difference", 0.0))
        result.append(worst | {"kind": kind, "passed": f"{passed} of {len(found)}"})
    return result


def shape_of(row: Row) -> str:
    """Returns the heading of the table for a row, with the batch size and the lengths."""
    if "batch" not in row:
        return ""
    if "length" in row:
        return f"Batch {row['batch']} × {row['length']}:"
    return f"Batch {row['batch']} × {row['inputs']}/{row['targets']}:"


def main() -> None:
    """Runs parts of the measurements, or writes the page."""
    parser = report.arguments(__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="folder of gpu.json")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run, in order"
    )
    parser.add_argument("--systems", nargs="+", help="rows to measure, by default all")
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes, on a CPU")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="time limit in minutes (default: 8)"
    )
    parser.add_argument(
        "--results", type=pathlib.Path, nargs="+", help="files of results to write as tables"
    )
    args = parser.parse_args()
    if args.results:
        write_page(args)
    else:
        run(args)


if __name__ == "__main__":
    main()
