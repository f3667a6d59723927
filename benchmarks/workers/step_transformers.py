"""Training steps of T5 1.1 with PyTorch and transformers."""

import time

import racing
import torch
import transformers

options = racing.options()
torch.set_num_threads(options["threads"])
torch.manual_seed(0)
config = transformers.T5Config(
    vocab_size=32128,
    d_model=options["d_model"],
    d_kv=options["head_dim"],
    d_ff=options["d_ff"],
    num_layers=options["layers"],
    num_heads=options["heads"],
    feed_forward_proj="gated-gelu",
    dropout_rate=options["dropout"],
    tie_word_embeddings=False,
    decoder_start_token_id=0,
)
model = transformers.T5ForConditionalGeneration(config).train()
# transformers 5 ties T5 1.1's output projection to the embedding; the published models do not.
model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
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
