"""Checks and times this package on one NVIDIA GPU of which little time is left, beside other libraries.

    python benchmarks/gpu.py --out results --minutes 8
    python benchmarks/gpu.py --out results --parts steps long --minutes 5
    python benchmarks/gpu.py --results results/gpu.json --json docs/gpu.json --page docs/performance.md

The first two run parts, in the order given; `--tiny` tries all of it on a CPU. Every row is written to
`gpu.json` as soon as it is measured, beside those that are there. A system that ends early or takes too
long gives a row with its error, and so does one that no time is left for. The last command merges such
files, later rows in the place of earlier ones, and writes the tables; it needs no GPU.

Every model runs in a process of its own, and the attention functions of one library one after the other
in one process, twice. Six processes start and compile at a time; then one of them works at a time. Peers
run on `.venv-peers` if that is there, else on this Python.
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
    *(
        "DotProduct + bias",
        "Random",
        "Random + DotProduct + bias",
        "TalkingHeads + bias",
        "Gaussian",
    ),
    *(
        "jax.nn cudnn",
        "jax.nn cudnn + bias",
        "jax.nn xla + bias",
        "Flax + bias",
        "torch SDPA + bias",
    ),
)
PROBLEMS = (
    *(
        "T5, lengths",
        "Random, lengths",
        "Random + T5, lengths",
        "T5, no mask",
        "T5, causal",
        "T5, packed",
    ),
    *(
        "T5, packed causal",
        "T5, 2048",
        "T5, 2048 causal",
        "T5, width 128",
        "T5, 500",
        "cross 114 × 512",
    ),
    *("Random, causal", "Random, packed", "Random, 2048", "Random, 500", "Random + T5, packed"),
    *("taps, lengths", "taps, causal"),
)
STEPS = ("v", "r", "rv", "hc_sa", "v, scanned", "transformers", "transformers, by layer")
LONG = ("v", "r")
DECODE = ("v", "transformers", "r")
PREPARATION, ANSWER, WORKERS = 240, 60, 6
"""Most seconds that a worker takes to start and compile, and to answer; how many compile at a time."""

PARTS = ("correctness", "steps", "functions", "sublayers", "long", "decode")
"""In the order of their value."""


class Results:
    """The rows of all parts, in a file that is replaced whenever a row comes."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        self.facts: Row = found.get("facts", {})
        self.parts: dict[str, list[Row]] = found.get("parts", {})

    def put(self, part: str, row: Row) -> None:
        """Puts a row into the place of the one of that name and shape; an error replaces no measurement."""
        rows = self.parts.setdefault(part, [])
        where = next((i for i, r in enumerate(rows) if identity(r) == identity(row)), len(rows))
        if where == len(rows) or "error" not in row or "error" in rows[where]:
            rows[where : where + 1] = [row]

    def add(self, part: str, row: Row) -> None:
        """Puts a row into its place, writes the file and prints the row."""
        self.put(part, row)
        self.write()
        shown = {
            k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if k != "errors"
        }
        print(
            part,
            *(f"{k} {v}" if k != "name" else v for k, v in shown.items()),
            sep=" | ",
            flush=True,
        )

    def write(self) -> None:
        """Writes the file."""
        report.write_file(self.path, self.json())

    def json(self) -> str:
        """What the file holds."""
        return json.dumps({"facts": self.facts, "parts": self.parts}, indent=1) + "\n"


def identity(row: Row) -> tuple[Any, ...]:
    """What tells the rows of a part apart."""
    return row["name"], row.get("batch"), row.get("length"), row.get("beams")


class Session:
    """A limited time on a device."""

    def __init__(self, args: argparse.Namespace, results: Results):
        self.args, self.results = args, results
        self.pool = concurrent.futures.ThreadPoolExecutor(WORKERS)
        self.prepared: dict[str, concurrent.futures.Future[racing.Worker]] = {}
        self.deadline = time.monotonic() + 60 * args.minutes
        sizes = peers.SIZES["tiny" if args.tiny else "base"]
        names = ("d_model", "layers", "d_ff", "heads", "head_dim")
        self.options: Row = dict(zip(names, sizes, strict=True)) | {
            "tiny": args.tiny,
            "dropout": 0.1,
        }
        self.options |= {
            "dtype": "bfloat16",
            "threads": 8,
            "device": "cpu" if args.tiny else "cuda",
        }
        self.options |= {"compile": "eager" if args.tiny else "inductor"}
        self.environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
        if args.tiny:
            self.environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

    def _start(self, name: str, worker: str, options: Row) -> racing.Worker:
        """Starts a worker; raises `SystemExit` where it ends early, or no time is left."""
        left = self.deadline - time.monotonic()
        if left < 15:
            raise SystemExit("no time was left")
        is_torch = worker in ("pytorch.py", "torch_attention.py")
        python = str(racing.PEERS) if is_torch and racing.PEERS.exists() else sys.executable
        system = racing.System(name, worker, {**self.options, **options}, python, self.environment)
        worker = racing.Worker(system, min(PREPARATION, left))
        worker.limit = (
            ANSWER if options.get("part") != "correctness" else PREPARATION
        )  # it compiles then
        return worker

    def prepare(self, *args: Any) -> None:
        """Starts a worker beside others; `start` returns it, or raises why it ended."""
        self.prepared[repr(args)] = self.pool.submit(self._start, *args)

    def start(self, *args: Any) -> racing.Worker:
        """Returns a worker that was prepared, or starts it."""
        future = self.prepared.pop(repr(args), None)
        return self._start(*args) if future is None else future.result()

    def run_cases(
        self, worker: str, part: str, cases: list[Row], *, passes: int, ahead: bool
    ) -> None:
        """Runs a worker that answers with the row of one case after the other, `passes` times.

        After a case with which the worker ends, a new one goes on with those that remain; a worker that
        cannot start does none. `ahead`: it is prepared only.
        """
        if ahead and cases:
            self.prepare(worker, worker, {"part": part, "cases": cases})
        while cases and not ahead:
            done, failed = 0, cases
            try:
                running = self.start(worker, worker, {"part": part, "cases": cases})
                failed = cases[:1]
                for case in cases * passes:
                    for row in (answer := running.run_round()).pop("rows", [answer]):
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
        """Runs a model, in micro-batches where memory asks; `ahead`: it is prepared only."""
        kind, _, suffix = name.partition(", ")
        options = {"name": name, "system": kind, "remat": None, **options}
        options |= {"scan": suffix == "scanned", "by_layer": suffix == "by layer"}
        if part == "decode" and not suffix:
            options["compile"] = None
        worker = peers.PEERS.get(kind, "ours.py")
        shown = {k: options[k] for k in ("name", "batch", "inputs", "targets", "beams")}
        # transformers keeps the weights of all heads; where they do not fit, it would compile anew.
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
    """The last line of an error that says something."""
    lines = [line for line in str(end).splitlines() if line.strip() and not line.startswith(" ")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines)[-1][:300]


def run_part(session: Session, part: str, *, ahead: bool) -> None:
    """Runs a part, or with `ahead` prepares its workers."""
    tiny, systems = session.args.tiny, session.args.systems
    wanted = lambda name: systems is None or name in systems
    if part == "correctness":
        cases = [{"name": name} for name in (PROBLEMS[1::6] if tiny else PROBLEMS) if wanted(name)]
        session.run_cases("gpu_attention.py", part, cases, passes=1, ahead=ahead)
    elif part in ("functions", "sublayers"):
        shapes = [(128, 512), (16, 2048)] if part == "functions" else [(16, 512), (4, 2048)]
        names = (
            [f + b for b in (" + bias", "") for f in FUNCTIONS]
            if part == "functions"
            else SUBLAYERS
        )
        shapes = [(2, 32), (1, 64)] if tiny else shapes
        cases = [
            {"name": n, "batch": b, "length": k} for b, k in shapes for n in names if wanted(n)
        ]
        for worker in ("gpu_attention.py", "torch_attention.py"):
            mine = [c for c in cases if c["name"].startswith("torch") == worker.startswith("torch")]
            session.run_cases(worker, part, mine, passes=2, ahead=ahead)
    elif part in ("steps", "long"):
        batch, inputs = (128, 512) if part == "steps" else (32, 2048)
        shape = (4, 32, 16) if tiny else (batch, inputs, 114)
        options: Row = dict(zip(("batch", "inputs", "targets"), shape, strict=True))
        options |= {"decode": False, "new_tokens": shape[2], "beams": None}
        for name in filter(wanted, STEPS if part == "steps" else LONG):
            session.run_model(part, name, options, rounds=5, ahead=ahead)
    else:
        shape = (2, 32, 8) if tiny else (32, 512, 64)
        options = dict(zip(("batch", "inputs", "new_tokens"), shape, strict=True))
        options |= {"decode": True, "targets": shape[2]}
        for beams, name in itertools.product((1, 4), filter(wanted, DECODE)):
            session.run_model(part, name, {**options, "beams": beams}, rounds=2, ahead=ahead)


def run(args: argparse.Namespace) -> None:
    """Runs the parts."""
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
    """Rows of steps with tokens a second, MFU, and the speed relative to transformers."""
    base = min(
        (r["seconds"] for r in rows if r["name"].startswith("transformers") and "loss" in r),
        default=None,
    )
    vanilla = next((r["flops"] for r in rows if r["name"] == "v" and "flops" in r), None)
    result = []
    for r in rows:
        if "loss" in r:
            flops, seconds = r.get("flops", vanilla), r["seconds"]
            r = r | {
                "tokens": r["batch"] * (r["inputs"] + r["targets"]) / seconds,
                "ms": 1e3 * seconds,
            }
            r["mfu"] = flops / seconds / peak if flops and peak else None
            r["speed"] = base / seconds if base else None
        result.append(r)
    return result


TIMES = {"name": "", "forward_ms": "forward, ms|.3f", "both_ms": "forward + backward, ms|.3f"}
TIMES |= {
    "forward_tflops": "TFLOP/s|.0f",
    "both_tflops": "forward + backward, TFLOP/s|.0f",
    "spread": "spread|.0%",
}
TIMES |= {
    "temporaries_mb": "temporaries, MB|.1f",
    "compile_seconds": "compiling, s|.1f",
    "error": "error",
}
STEP = {"name": "system", "micro_batches": "micro-batches|d", "tokens": "tokens/s|,.0f"}
STEP |= {"ms": "step, ms|.1f", "mfu": "MFU|.1%", "speed": "speed|.2f"}
STEP |= {"device_gb": "peak memory, GB|.1f", "parameters": "parameters|,d"}
STEP |= {"compile_seconds": "compiling, s|.0f", "error": "error"}
DECODED = {"name": "system", "beams": "beams|d", "tokens_per_second": "tokens/s|,.0f"}
DECODED |= {"seconds": "batch, s|.3f"}
DECODED |= {
    "device_gb": "peak memory, GB|.1f",
    "compile_seconds": "compiling, s|.0f",
    "error": "error",
}
CHECKED = {
    "kind": "dtype and computation",
    "passed": "calls within the bound",
    "difference": "largest ‖x − r‖ / ‖r‖|.1e",
}
CHECKED |= {"bound": "bound|.0e", "error": "error"}
COLUMNS = {"correctness": CHECKED, "decode": DECODED, "steps": STEP, "long": STEP}
TITLES = {
    "correctness": "Values and gradients of attention compared with the reference route in float32, whose "
    "matrix products have the highest precision. Each call has new random inputs. On a GPU, matrix "
    "products of float32 arrays are computed in TF32. *r* is a result of the reference route, and "
    "*x* is the result that is compared with it.",
    "steps": "One training step of T5 1.1 base with AdamW, in bfloat16 with float32 parameters and "
    "dropout 0.1. *scanned* models compute their layers in one `lax.scan`. transformers runs under "
    "autocast and is compiled by `torch.compile`, either as a whole or layer by layer. It divides "
    "the batch into 4 micro-batches, because it stores the attention weights of all heads for the "
    "backward pass. Ours does not store them and takes the batch at once. Whether transformers "
    "would be faster with fewer micro-batches was not measured. MFU counts six FLOPs for each "
    "multiply-add of the forward pass. *Speed* is relative to transformers.",
    "long": "The same step with longer inputs.",
    "decode": "Greedy decoding and beam search of 64 new tokens with T5 1.1 base, for 32 inputs of 512 "
    "tokens, in bfloat16. transformers is not compiled.",
    "functions": "The attention function without projections, 12 heads of 64, in bfloat16, with a padding "
    "mask. *+ bias* is a learned relative bias like that of T5. Times are means of two "
    "measurements, and *spread* is the relative difference between them. TFLOP/s include two "
    "matrix products for the forward pass and seven for forward and backward together. Masked "
    "pairs of positions are included.",
    "sublayers": "Attention sub-layers with their projections, d_model 768, 12 heads of 64, in bfloat16, "
    "with a padding mask. TFLOP/s include masked pairs of positions. For Random, they include one "
    "matrix product for the forward pass and three for forward and backward together.",
}


def write_page(args: argparse.Namespace) -> None:
    """Merges results and writes them and their tables."""
    first, *others = (Results(path) for path in args.results)
    for other in others:
        # A rate is lower while other programs run.
        most = {k: max(x, other.facts[k]) for k, x in first.facts.items() if isinstance(x, float)}
        first.facts |= other.facts | most
        for part, rows in other.parts.items():
            for row in rows:
                first.put(part, row)
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
    """Returns the row with the largest error of every dtype and implementation of a route."""
    kinds: dict[str, list[Row]] = {}
    for r in rows:
        _, dtype, route = r["name"].rsplit(", ", 2)
        kinds.setdefault(f"{dtype}, {r.get('default', route)}", []).append(r)
    result = []
    for kind, found in kinds.items():
        passed = sum(r.get("verdict") == "PASS" for r in found)
        worst = max(found, key=lambda r: r.get("difference", 0.0))
        result.append(worst | {"kind": kind, "passed": f"{passed} of {len(found)}"})
    return result


def shape_of(row: Row) -> str:
    """Batch and lengths of a row."""
    if "batch" not in row:
        return ""
    if "length" in row:
        return f"Batch {row['batch']} × {row['length']}:"
    return f"Batch {row['batch']} × {row['inputs']}/{row['targets']}:"


def main() -> None:
    """Runs parts, or writes the page."""
    parser = report.arguments(__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="folder of gpu.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--systems", nargs="+", help="these rows of the parts only")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument(
        "--results", type=pathlib.Path, nargs="+", help="files whose tables to write"
    )
    args = parser.parse_args()
    if args.results:
        write_page(args)
    else:
        run(args)


if __name__ == "__main__":
    main()
