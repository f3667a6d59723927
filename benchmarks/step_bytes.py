"""Compiles a training step for one chip without the chip, and lists its operations by the bytes they move.

    JAX_PLATFORMS=cpu python benchmarks/step_bytes.py --chip v5e:2x2 --page docs/tpu.md

Counted are the operands and results of every operation of the optimized program that lie in the chip's main
memory, in a loop as often as it runs. Of an array that a fusion slices or updates in place only that part
counts. Unlike the compiler's ``bytes accessed``, on-chip memory (VMEM) does not count.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
from typing import NamedTuple

import jax
import report
from tpu_pods import VARIANTS, WIDTHS, make_experiment

from synthesizer_jax.base.registry import replace
from synthesizer_jax.costs import chips
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training import plan
from synthesizer_jax.training.trainer import Trainer

FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "iota",
    "opt-barrier",
}
FREE |= {"partition-id", "add-dependency"}
RESERVED = "AllocateBuffer", "ConcatBitcast"
"""TPU calls that move nothing."""


class Operation(NamedTuple):
    """A line ``name = result kind(operands), attributes``; ``@`` follows arrays that are on the chip."""

    result: str
    kind: str
    operands: list[str]
    text: str
    is_root: bool

    def called(self, role: str = "calls") -> str:
        """Returns the name of the computation that it calls."""
        return re.findall(rf"{role}=\{{?%?([\w.\-]+)", self.text)[0]


class Program(dict[str, dict[str, Operation]]):
    """The computations of an optimized program, and ``entry``, the name of the first one that runs."""

    def __init__(self, text: str):
        super().__init__()
        text = re.sub(r"\{[\d,]*(:[A-Z][^{}]*)?\}", lambda m: "@" if "S(" in m[0] else "", text)
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                operations = self.setdefault(head[2], {})
                self.entry = head[2]  # the last one
            elif found := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)", line):
                names = re.findall(r"%([\w.\-]+)", found[5].split(")")[0])
                operations[found[2]] = Operation(
                    found[3], found[4], names, found[5], bool(found[1])
                )

    def read(self, computation: str, name: str) -> int:
        """Returns how many bytes of one of its arrays a fused computation reads."""
        operations, total = self[computation], 0
        for user, op in operations.items():
            for i, operand in enumerate(op.operands):
                if operand != name or (op.kind == "dynamic-update-slice" and i == 0):
                    continue
                if op.kind == "bitcast":
                    total += self.read(computation, user)
                elif op.kind == "fusion":
                    total += self.read(op.called(), self.parameters(op.called())[i])
                else:
                    is_sliced = op.kind in ("slice", "dynamic-slice", "gather") and i == 0
                    total += size(op.result if is_sliced else operations[name].result)
        return min(total, size(operations[name].result))

    def written(self, computation: str, name: str | None = None) -> int:
        """Returns how many bytes of its result, or of one of its arrays, a fused computation writes."""
        operations = self[computation]
        op = operations[name or next(n for n, op in operations.items() if op.is_root)]
        if op.kind == "fusion":
            return self.written(op.called())
        if op.kind in ("tuple", "bitcast"):
            return sum(self.written(computation, operand) for operand in op.operands)
        return size(
            operations[op.operands[1]].result if op.kind == "dynamic-update-slice" else op.result
        )

    def parameters(self, computation: str) -> dict[int, str]:
        """Returns the names of a computation's parameters by their numbers."""
        found = self[computation].items()
        return {int(op.text.split(")")[0]): name for name, op in found if op.kind == "parameter"}

    def moved(self, computation: str, op: Operation) -> int:
        """Returns the bytes that an operation reads and writes in main memory."""
        operands = [size(self[computation][name].result) for name in op.operands]
        if (
            op.kind in FREE
            or op.kind.endswith("-done")
            or any(name in op.text for name in RESERVED)
        ):
            return 0
        if op.kind == "slice-start":  # ((operand), result, context)
            result = op.result.split("), ", 1)[1]
            return size(result) + size(result.replace("@", ""))
        if op.kind == "copy-start":
            return size(op.result)
        if op.kind in ("fusion", "fusion-start"):
            inside = self.parameters(op.called())
            reads = [min(n, self.read(op.called(), inside[i])) for i, n in enumerate(operands)]
            return sum(reads) + min(size(op.result), self.written(op.called()))
        return sum(operands) + size(op.result)

    def rows(
        self, computation: str | None = None, times: int = 1
    ) -> collections.Counter[tuple[str, ...]]:
        """Returns the bytes of all operations by where they come from, what they are and make."""
        computation, rows = computation or self.entry, collections.Counter[tuple[str, ...]]()
        for op in self[computation].values():
            if op.kind == "while":
                trips = re.findall(r'known_trip_count":\{"n":"(\d+)', op.text)
                if not trips:  # TPU programs compare the index with a constant
                    bounds = self[op.called("condition")].values()
                    trips = [o.text.split(")")[0] for o in bounds if o.kind == "constant"]
                rows += self.rows(op.called("body"), times * int(trips[0]))
            elif op.kind in ("conditional", "call"):
                role = "branch_computations" if op.kind == "conditional" else "to_apply"
                rows += self.rows(op.called(role), times)
            else:
                text = op.text
                if op.kind == "fusion" and "op_name" not in text:
                    text = " ".join(inner.text for inner in self[op.called()].values())
                rows[(*origin(text), op.kind, op.result)] += times * self.moved(computation, op)
        return rows


def size(result: str) -> int:
    """Returns the bytes of those arrays of a shape that are in main memory, without work space (s8)."""
    arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\](@?)", result)
    found = [(dtype, dims) for dtype, dims, on_chip in arrays if not on_chip and dtype != "s8"]
    return sum(
        WIDTHS.get(d, 4) * math.prod(int(n) for n in dims.split(",") if n) for d, dims in found
    )


def origin(text: str) -> tuple[str, str]:
    """Returns the pass and the part of the model that an operation is from, by its metadata."""
    name = "".join(re.findall(r'op_name="([^"]*)"', text)[:1])
    parts = [
        p
        for p in re.split(r"[/()]", name)
        if p and not re.search(r"jit|jvp|transpose|while|body|run|call", p)
    ]
    return (
        "backward" if "transpose(" in name else "forward" if parts else "",
        "/".join(parts[1:])[-60:],
    )


def main() -> None:
    """Compiles the step and writes the table."""
    parser = report.arguments(__doc__, rows=8, top=20)
    parser.add_argument("--chip", default="v5e:2x2", help="a topology; its first device is taken")
    parser.add_argument("--variant", choices=VARIANTS, default="v")
    args: argparse.Namespace = parser.parse_args()
    experiment = replace(make_experiment("base", args.variant, args.rows, 1), mesh=MeshShape())
    device = plan.devices_of(chips.parse_topology(args.chip))[0]
    trainer = Trainer(experiment, [device])
    with jax.set_mesh(trainer.mesh):  # Pallas asks it what chip it lowers for
        compiled = trainer.trace().lower().compile()
    found = Program(compiled.as_text()).rows()
    rows = [
        {
            "pass": key[0],
            "part": key[1],
            "kind": key[2],
            "result": key[3].replace("@", "")[:60],
            "gb": n / 1e9,
        }
        for key, n in found.most_common(args.top)
    ]
    temporaries = compiled.memory_analysis().temp_size_in_bytes / 1e9
    text = (
        f"A training step of T5 1.1 base (*{args.variant}*) on one device of {args.chip}, with "
        f"{args.rows} rows of 512 input and 114 target tokens, scanned layers, bfloat16 and "
        f"Adafactor. The step moves {found.total() / 1e9:.1f} GB to and from main memory and has "
        f"{temporaries:.2f} GB of temporary arrays. The table lists the operations that move the "
        "most bytes; equal operations are added up.\n\n"
        + report.table(
            rows,
            {
                "gb": "GB|.2f",
                "pass": "pass",
                "part": "part",
                "kind": "operation",
                "result": "result",
            },
        )
    )
    facts = {
        "jax": jax.__version__,
        "compiled by": "libtpu on a CPU" if "v" in args.chip else "XLA on a CPU",
    }
    report.write(
        f"step_bytes {args.chip} {args.variant}",
        text,
        result={"rows": rows},
        options=args,
        facts=facts,
    )


if __name__ == "__main__":
    main()
