"""Generation by transformers on PyTorch, or by CTranslate2 with the same weights."""

import tempfile
import time

import racing
import torch
import torch_t5
import transformers

options = racing.options()
model = torch_t5.build(options).eval()
parameters = sum(p.numel() for p in model.parameters())
inputs = torch.randint(2, 32000, (options["batch"], options["inputs"]))
length, beams = options["new_tokens"], options["beams"]


def by_transformers() -> int:
    """Number of positions decoded."""
    with torch.inference_mode():
        found = model.generate(
            inputs,
            max_new_tokens=length,
            min_new_tokens=length,
            num_beams=beams,
            do_sample=False,
        )
    return found.shape[1] - 1


class Pieces:
    """A vocabulary of numbers, in the place of a tokenizer that conversion asks for."""

    pad_token, eos_token, unk_token, bos_token = "0", "1", "2", None

    def get_vocab(self) -> dict[str, int]:
        """Piece to id."""
        return {str(i): i for i in range(torch_t5.VOCAB_SIZE)}

    def convert_ids_to_tokens(self, index: int) -> str:
        """A piece of an id."""
        return str(index)


def by_ctranslate2():
    """A function like `by_transformers`, and the version."""
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
    rows = [[str(int(i)) for i in row] for row in inputs]

    def run() -> int:
        found = translator.translate_batch(
            rows, beam_size=beams, max_decoding_length=length, min_decoding_length=length
        )
        return min(len(r.hypotheses[0]) for r in found)

    return run, f"ctranslate2 {ctranslate2.__version__}"


if options["engine"] == "ctranslate2":
    decode, versions = by_ctranslate2()
    del model
else:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    decode = by_transformers


def run() -> dict[str, float]:
    """One batch."""
    began = time.perf_counter()
    decoded = decode()
    seconds = time.perf_counter() - began
    assert decoded == length, f"decoded {decoded} positions instead of {length}"
    return {"seconds": seconds, "tokens_per_second": options["batch"] * length / seconds}


racing.serve({"parameters": parameters, "versions": versions}, run)
