"""Compiles a training step for a TPU that is not present, and lists the bytes of its operations.

    JAX_PLATFORMS=cpu python benchmarks/step_bytes.py --chip v5e:2x2 --page docs/tpu.md

For every operation of the optimized program, the script counts the bytes of operands and results
that are in the chip's main memory. An operation in a loop counts once for each iteration. If a
fusion slices an array or updates a part of it in place, only this part counts. Arrays in on-chip
memory (VMEM) do not count, unlike in the compiler's ``bytes accessed``.
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
    "partition-id",
    "add-dependency",
}
"""The kinds of operations that do not move data."""
RESERVED = ("AllocateBuffer", "ConcatBitcast")
"""The targets of TPU calls that do not move data."""


class Operation(NamedTuple):
    """An operation, parsed from a program's line ``name = result kind(operands), attributes``.

    Attributes:
      result: the shape of the result, such as ``bf16[8,512]``. A ``@`` follows arrays that are in
        on-chip memory.
      kind: the name of the operation, such as ``fusion``.
      operands: the names of the operands.
      text: the rest of the line, beginning with the operands.
      is_root: whether the operation is the result of its computation.
    """

    result: str
    kind: str
    operands: list[str]
    text: str
    is_root: bool

    def called(self, role: str = "calls") -> str:
        """Returns the name of the computation that an attribute, such as ``body``, refers to."""
        return re.findall(rf"{role}=\{{?%?([\w.\-]+)", self.text)[0]


class Program(dict[str, dict[str, Operation]]):
    """An optimized program, in which ``program[computation][operation]`` is an `Operation`.

    Attributes:
      entry: the name of the computation that runs first.
    """

    def __init__(self, text: str):
        super().__init__()
        # Remove the layouts of arrays. Mark arrays that are in on-chip memory with "@".
        text = re.sub(r"\{[\d,]*(:[A-Z][^{}]*)?\}", lambda m: "@" if "S(" in m[0] else "", text)
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                operations = self.setdefault(head[2], {})
                self.entry = head[2]  # the entry is the last computation
                continue
            found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)", line)
            if found:
                root, name, result, kind, rest = found.groups()
                operands = re.findall(r"%([\w.\-]+)", rest.split(")")[0])
                operations[name] = Operation(result, kind, operands, rest, bool(root))

    def read(self, computation: str, name: str) -> int:
        """Returns how many bytes of an array a fused computation reads."""
        operations = self[computation]
        total = 0
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
        """Returns how many bytes of its result, or of another array, a fused computation writes."""
        operations = self[computation]
        if name is None:
            name = next(n for n, op in operations.items() if op.is_root)
        op = operations[name]
        if op.kind == "fusion":
            return self.written(op.called())
        if op.kind in ("tuple", "bitcast"):
            return sum(self.written(computation, operand) for operand in op.operands)
        if op.kind == "dynamic-update-slice":
            return size(operations[op.operands[1]].result)
        return size(op.result)

    def parameters(self, computation: str) -> dict[int, str]:
        """Returns a dictionary from the numbers of a computation's parameters to their names."""
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
        if op.kind == "slice-start":
            # The shape of `slice-start` is ((operand), result, context). The operation reads as
            # many bytes as it writes.
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
        """Returns the bytes that operations move, summed over operations of the same kind.

        Args:
          computation: the computation, by default the whole program.
          times: how many times the computation runs.

        Returns:
          A counter of bytes. Its keys contain the pass, the part of the model, the kind of
          operation, and the shape of the result.
        """
        if computation is None:
            computation = self.entry
        rows = collections.Counter[tuple[str, ...]]()
        for op in self[computation].values():
            if op.kind == "while":
                rows += self.rows(op.called("body"), times * self.trips(op))
            elif op.kind in ("conditional", "call"):
                role = "branch_computations" if op.kind == "conditional" else "to_apply"
                rows += self.rows(op.called(role), times)
            else:
                text = op.text
                if op.kind == "fusion" and "op_name" not in text:
                    text = " ".join(inner.text for inner in self[op.called()].values())
                rows[(*origin(text), op.kind, op.result)] += times * self.moved(computation, op)
        return rows

    def trips(self, loop: Operation) -> int:
        """Returns how many times the body of a loop runs."""
        trips = re.findall(r'known_trip_count":\{"n":"(\d+)', loop.text)
        if not trips:  # TPU programs compare a loop's index with a constant
            bounds = self[loop.called("condition")].values()
            trips = [op.text.split(")")[0] for op in bounds if op.kind == "constant"]
        return int(trips[0])


def size(result: str) -> int:
    """Returns the size in bytes of those arrays of a shape that are in main memory.

    Arrays of the dtype s8 do not count, because they are scratch memory.
    """
    total = 0
    for dtype, dims, on_chip in re.findall(r"([a-z]+\d*)\[([\d,]*)\](@?)", result):
        if not on_chip and dtype != "s8":
            total += WIDTHS.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)
    return total


def origin(text: str) -> tuple[str, str]:
    """Returns the pass and the part of the model that an operation's metadata names."""
    name = "".join(re.findall(r'op_name="([^"]*)"', text)[:1])
    parts = [
        part
        for part in re.split(r"[/()]", name)
        if part and not re.search(r"jit|jvp|transpose|while|body|run|call", part)
    ]
    direction = ""
    if "transpose(" in name:
        direction = "backward"
    elif parts:
        direction = "forward"
    return direction, "/".join(parts[1:])[-60:]


def main() -> None:
    """Compiles the step and writes the table."""
    parser = report.arguments(__doc__, rows=8, top=20)
    parser.add_argument(
        "--chip", default="v5e:2x2", help="topology, whose first device runs the step"
    )
    parser.add_argument(
        "--variant", choices=VARIANTS, default="v", help="variant of self-attention"
    )
    args: argparse.Namespace = parser.parse_args()
    experiment = replace(make_experiment("base", args.variant, args.rows, 1), mesh=MeshShape())
    device = plan.devices_of(chips.parse_topology(args.chip))[0]
    trainer = Trainer(experiment, [device])
    with jax.set_mesh(trainer.mesh):  # this tells Pallas which chip to compile for
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
