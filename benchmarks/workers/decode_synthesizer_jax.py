"""Decoding by this project."""

import time

import jax
import numpy as np
import racing

from synthesizer_jax.costs.summary import summarize
from synthesizer_jax.inference import decode
from synthesizer_jax.models import Size, t5, zoo

options = racing.options()
size = Size(*(options[k] for k in ("d_model", "layers", "d_ff", "heads", "head_dim")))
length, beams = options["new_tokens"], options["beams"]
longest = max(options["inputs"], length)
kind = zoo.alignment(options["variant"], head_dim=size.head_dim, max_length=longest)
model = t5(size, encoder=kind, dtype=options["dtype"])
tokens = np.random.default_rng(0).integers(2, 32000, (options["batch"], options["inputs"]))
tokens = jax.device_put(tokens.astype(np.int32))
variables = jax.jit(model.init)(jax.random.key(0), tokens[:1, :8], tokens[:1, :8])
# Without a column of its own, the end of the sequence is never the most probable token.
kernel = variables["params"]["logits_kernel"]
variables["params"]["logits_kernel"] = kernel.at[:, 1].set(0.0)


def run() -> dict[str, float]:
    """One batch."""
    began = time.perf_counter()
    found = decode(variables, tokens, model=model, max_length=length, beams=beams)
    decoded = np.asarray(found.tokens)
    seconds = time.perf_counter() - began
    assert (decoded != 0).all(), "a sequence ended early"
    return {"seconds": seconds, "tokens_per_second": options["batch"] * length / seconds}


began = time.perf_counter()
run()
summary = summarize(model, inputs_length=options["inputs"], targets_length=length)
racing.serve(
    {
        "parameters": summary.parameters,
        "cache_bytes": summary.cache_bytes_per_token,
        "versions": f"jax {jax.__version__}",
        "device": jax.devices()[0].device_kind,
        "first_seconds": time.perf_counter() - began,
    },
    run,
)
