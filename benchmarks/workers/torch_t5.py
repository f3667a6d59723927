"""T5 1.1 in PyTorch, as transformers has it."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB_SIZE = 32128


def build(options: dict[str, Any]) -> transformers.T5ForConditionalGeneration:
    """A model of made weights with an output projection of its own.

    Args:
      options: the worker's: sizes, ``threads``, and ``dropout`` where it trains.
    """
    torch.set_num_threads(options["threads"])
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=options["d_model"],
        d_kv=options["head_dim"],
        d_ff=options["d_ff"],
        num_layers=options["layers"],
        num_heads=options["heads"],
        feed_forward_proj="gated-gelu",
        dropout_rate=options.get("dropout", 0.0),
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    # transformers 5 ties T5 1.1's output projection to the embedding; the published models do not.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model
