"""A worker of `peers.py` that times T5 1.1 in transformers, or decoding in CTranslate2."""

import tempfile
import time
from collections.abc import Callable

import racing
import torch
import transformers

VOCAB_SIZE = 32128
options = racing.options()
rows, length = options["batch"], options["new_tokens"]
device = options.get("device", "cpu")
is_bfloat16 = options["dtype"] == "bfloat16"
micro_batches = options.get("micro_batches", 1)
torch.set_num_threads(options["threads"])
torch.manual_seed(0)
model = transformers.T5ForConditionalGeneration(
    transformers.T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=options["d_model"],
        d_kv=options["head_dim"],
        d_ff=options["d_ff"],
        num_layers=options["layers"],
        num_heads=options["heads"],
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0 if options["decode"] else options["dropout"],
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
)
# Version 5 of transformers ties T5 1.1's output projection to the embedding. Untie them, as in the
# published models.
model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
if options["decode"] and is_bfloat16:
    model.bfloat16()
model.to(device)
parameters = sum(p.numel() for p in model.parameters())
inputs = torch.randint(2, 32000, (rows, options["inputs"]), device=device)
labels = torch.randint(2, 32000, (rows, options["targets"]), device=device)
backend = options.get("compile")  # None disables compilation
forward = model
if backend and options.get("by_layer"):  # compiles equal layers once
    for layer in (*model.encoder.block, *model.decoder.block):
        layer.compile(dynamic=False, backend=backend)
elif backend:
    forward = torch.compile(model, dynamic=False, backend=backend)
versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
model.train(not options["decode"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)


def step() -> dict[str, float]:
    """Makes a training step and reads its loss."""
    began = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=device)
    for x, y in zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
        with torch.autocast(device, torch.bfloat16, enabled=is_bfloat16):
            loss = forward(input_ids=x, labels=y, use_cache=False).loss / micro_batches
        loss.backward()
        total += loss.detach()
    optimizer.step()
    loss = total.item()  # reading the loss waits for the step
    return {"loss": loss, "seconds": time.perf_counter() - began, **device_peak()}


def device_peak() -> dict[str, float]:
    """Returns the peak of the GPU's memory, or an empty result on a CPU."""
    if device != "cuda":
        return {}
    return {"device_gb": torch.cuda.max_memory_allocated() / 1e9}


def first_step() -> dict[str, float]:
    """Compiles the step, and doubles the number of micro-batches until the memory is sufficient."""
    global micro_batches
    while True:
        began = time.perf_counter()
        try:
            step()
            break
        except torch.OutOfMemoryError:
            if micro_batches >= 8:
                raise
        micro_batches *= 2
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.compiler.reset()
    return {"compile_seconds": time.perf_counter() - began, "micro_batches": micro_batches}


def decode() -> int:
    """Decodes with transformers, and returns the number of new tokens."""
    bounds = {"max_new_tokens": length, "min_new_tokens": length}
    if options.get("compile"):
        # The library transformers compiles decoding steps only if the cache is static.
        bounds["cache_implementation"] = "static"
    with torch.inference_mode():
        found = model.generate(inputs, num_beams=options["beams"], do_sample=False, **bounds)
    return found.cpu().shape[1] - 1


class Pieces:
    """A vocabulary whose pieces are numbers, for the conversion to CTranslate2."""

    pad_token, eos_token, unk_token, bos_token = "0", "1", "2", None

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all pieces."""
        return {str(i): i for i in range(VOCAB_SIZE)}

    def convert_ids_to_tokens(self, index: int) -> str:
        """Returns the piece of a token id."""
        return str(index)


def make_ctranslate2() -> tuple[Callable[[], int], str]:
    """Returns a function that decodes with CTranslate2, and the version of CTranslate2.

    CTranslate2 uses the same weights as transformers.
    """
    import ctranslate2
    from ctranslate2.converters.transformers import T5Loader

    spec = T5Loader()(model, Pieces())
    spec.validate()
    spec.optimize(quantization="float32")
    with tempfile.TemporaryDirectory() as place:
        spec.save(place)
        translator = ctranslate2.Translator(
            place, compute_type="float32", inter_threads=1, intra_threads=options["threads"]
        )
    tokens = [[str(int(i)) for i in row] for row in inputs]
    bounds = {"max_decoding_length": length, "min_decoding_length": length}

    def run() -> int:
        """Decodes the inputs, and returns the number of new tokens in the shortest output."""
        found = translator.translate_batch(tokens, beam_size=options["beams"], **bounds)
        return min(len(r.hypotheses[0]) for r in found)

    return run, f"ctranslate2 {ctranslate2.__version__}"


if options["system"] == "ctranslate2":
    decode, versions = make_ctranslate2()
    del model, optimizer


def decode_batch() -> dict[str, float]:
    """Decodes a batch."""
    began = time.perf_counter()
    decoded = decode()
    seconds = time.perf_counter() - began
    assert decoded == length, f"decoded {decoded} positions instead of {length}"
    return {"seconds": seconds, "tokens_per_second": rows * length / seconds, **device_peak()}


facts = {"parameters": parameters, "versions": versions}
if options.get("compile"):
    if options["decode"]:
        facts["compile_seconds"] = decode_batch()["seconds"]
    else:
        facts.update(first_step())
racing.serve(facts, decode_batch if options["decode"] else step)
