"""A worker of `gpu.py` that times PyTorch's attention as a function or as a sub-layer."""

import time
from collections.abc import Iterator
from typing import Any

import racing
import torch
from torch.nn.functional import embedding, scaled_dot_product_attention

options = racing.options()
device = options["device"]
heads = options["heads"]
width = heads * options["head_dim"]
torch.manual_seed(0)


class SubLayer(torch.nn.Module):
    """Attention with or without T5's bias, and with or without projections."""

    def __init__(self, batch: int, length: int, *, bias: bool, projections: bool):
        super().__init__()
        position = torch.arange(length)
        # This map from distances to 32 buckets is simpler than T5's map, but it has the same cost.
        self.register_buffer("buckets", (position[None] - position[:, None] + 16).clamp(0, 31))
        lengths = length - torch.arange(batch) % 2 * (length // 8)
        visible = position < lengths[:, None]
        self.register_buffer("visible", visible[:, None, None])  # [b, 1, 1, k]
        self.qkv = self.out = self.table = None
        if projections:
            d_model = options["d_model"]
            self.qkv = torch.nn.ModuleList(
                torch.nn.Linear(d_model, width, bias=False) for _ in range(3)
            )
            self.out = torch.nn.Linear(width, d_model, bias=False)
        if bias:
            self.table = torch.nn.Parameter(torch.randn(32, heads))

    def forward(self, *tokens: torch.Tensor) -> torch.Tensor:
        """Computes attention for an input, or for query, key and value.

        With projections, the only argument is the input ``[b, n, d]``. Without projections, the
        three arguments are query, key and value, each ``[b, heads, n, head_dim]``.
        """
        if self.qkv is not None:
            (x,) = tokens
            tokens = tuple(f(x).unflatten(-1, (heads, -1)).transpose(1, 2) for f in self.qkv)
        mask = self.visible
        if self.table is not None:
            bias = embedding(self.buckets, self.table.to(tokens[0].dtype)).permute(2, 0, 1)[None]
            mask = torch.where(self.visible, bias, float("-inf"))
        y = scaled_dot_product_attention(*tokens, attn_mask=mask)
        return y if self.out is None else self.out(y.transpose(1, 2).flatten(2))


def make_row(name: str, batch: int, length: int) -> dict[str, Any]:
    """Compiles and times a sub-layer, or only the function."""
    torch.compiler.reset()
    projections = options["part"] == "sublayers"
    has_bias = name.endswith("+ bias")
    layer = SubLayer(batch, length, bias=has_bias, projections=projections).to(device)
    if projections:
        shape = (batch, length, options["d_model"])
    else:
        shape = (batch, heads, length, width // heads)
    tokens = [
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(1 if projections else 3)
    ]
    compiled = torch.compile(layer, dynamic=False, backend=options["compile"])
    inputs = [*tokens, *layer.parameters()]

    def forward() -> torch.Tensor:
        """Computes the forward pass."""
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            return compiled(*tokens)

    def both() -> tuple[torch.Tensor, ...]:
        """Computes the forward and the backward pass."""
        with torch.autocast(device, torch.bfloat16):
            y = compiled(*tokens)
        return torch.autograd.grad((y.float() ** 2).mean(), inputs)

    def wait(_: Any) -> None:
        """Waits until the device has completed all computations."""
        if device == "cuda":
            torch.cuda.synchronize()

    began = time.perf_counter()
    wait((forward(), both()))
    row = {"name": name, "compile_seconds": time.perf_counter() - began}
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        row["temporaries_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    flops = racing.attention_flops(
        {**options, "batch": batch, "length": length},
        products=2,
        projections=4 if projections else 0,
    )
    return row | racing.timed_row({"forward": forward, "both": both}, wait, flops)


def rows() -> Iterator[dict[str, Any]]:
    """Measures all cases twice.

    Yields a row for every case, and then a second row for every case.
    """
    first = []
    for case in options["cases"]:
        first.append(make_row(**case))
        yield first[-1]
    for case, row in zip(options["cases"], first, strict=True):
        yield racing.merge_rows(row, make_row(**case))


racing.answer({"versions": f"torch {torch.__version__}"}, rows())
