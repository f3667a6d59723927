"""Training steps of T5 1.1 with PyTorch and transformers."""

import time

import racing
import torch
import torch_t5
import transformers

options = racing.options()
model = torch_t5.build(options).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
shape = options["batch"]
inputs = torch.randint(2, 32000, (shape, options["inputs"]))
labels = torch.randint(2, 32000, (shape, options["targets"]))


def step() -> dict[str, float]:
    """One step, its loss read at the end."""
    began = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = model(input_ids=inputs, labels=labels).loss
    loss.backward()
    optimizer.step()
    return {"loss": loss.item(), "seconds": time.perf_counter() - began}


racing.serve(
    {
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "dropout": "a draw per activation and per attention weight" if options["dropout"] else "0",
    },
    step,
)
