"""PyTorch's scaled dot-product attention on one device, alone and as a sub-layer, for `gpu.py`."""

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
    """Attention with T5's bias, with projections or alone."""

    def __init__(self, batch: int, length: int, *, bias: bool, projections: bool):
        super().__init__()
        position = torch.arange(length)
        # Any map of distances to 32 buckets costs the same; this one has not T5's bounds.
        self.register_buffer("buckets", (position[None] - position[:, None] + 16).clamp(0, 31))
        lengths = length - torch.arange(batch) % 2 * (length // 8)
        self.register_buffer(
            "visible", (position < lengths[:, None])[:, None, None]
        )  # [b, 1, 1, k]
        linear = lambda a, b: torch.nn.Linear(a, b, bias=False)
        d = options["d_model"]
        self.qkv = torch.nn.ModuleList(linear(d, width) for _ in range(3)) if projections else None
        self.out = linear(width, d) if projections else None
        self.table = torch.nn.Parameter(torch.randn(32, heads)) if bias else None

    def forward(self, *tokens: torch.Tensor) -> torch.Tensor:
        """``[b, n, d]``, or query, key and value ``[b, heads, n, head_dim]``."""
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
    """Compiles and times a sub-layer, or the function alone."""
    torch.compiler.reset()
    projections = options["part"] == "sublayers"
    layer = SubLayer(batch, length, bias=name.endswith("+ bias"), projections=projections).to(
        device
    )
    shape = (
        (batch, length, options["d_model"])
        if projections
        else (batch, heads, length, width // heads)
    )
    tokens = [
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(1 if projections else 3)
    ]
    compiled = torch.compile(layer, dynamic=False, backend=options["compile"])
    inputs = [*tokens, *layer.parameters()]

    def forward() -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            return compiled(*tokens)

    def both() -> tuple[torch.Tensor, ...]:
        with torch.autocast(device, torch.bfloat16):
            y = compiled(*tokens)
        return torch.autograd.grad((y.float() ** 2).mean(), inputs)

    def wait(_: Any) -> None:
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
    """A row for every case, and then one more."""
    first = []
    for case in options["cases"]:
        first.append(make_row(**case))
        yield first[-1]
    for case, row in zip(options["cases"], first, strict=True):
        yield racing.merge_rows(row, make_row(**case))


racing.answer({"versions": f"torch {torch.__version__}"}, rows())
