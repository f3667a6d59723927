"""Compares every kind of folder that is taken with transformers, on tiny random models.

    python benchmarks/pretrained.py --page docs/finetune.md

It runs in the environment of `make bench-peers`, and has a row for PEFT where that is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import report
import torch
import transformers
from safetensors.numpy import load_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from synthesizer_jax.inference import encode_tokens
from synthesizer_jax.models import Encoder
from synthesizer_jax.pretrained import Loaded, generate, load
from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.primitives.parameters import apply_method
from tests.pretrained import gemma
from tests.pretrained.folders import FAMILIES, TINY

KINDS: dict[str, dict[str, Any]] = {k: TINY | x for k, x in FAMILIES.items() if k != "efficient"}
KINDS["MADLAD-400"] = KINDS["T5 1.1, FLAN-T5"] | gemma.MADLAD
KINDS |= {f"T5Gemma, {k}": x | {"model_type": "t5gemma"} for k, x in gemma.CONFIGS.items()}
CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "t5gemma": "T5Gemma"}
TEXTS, LENGTH = ["what is it?", "a longer text, of two parts"], 12


def make(folder: pathlib.Path, kind: str) -> None:
    """Writes a model of transformers with its tokenizer."""
    torch.manual_seed(0)
    fields = {k: v for k, v in KINDS[kind].items() if k not in ("model_type", "architectures")}
    name = CLASSES[KINDS[kind]["model_type"]]
    config = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3 if p.ndim == 1 else p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    if fields["vocab_size"] == gemma.VOCAB_SIZE:
        gemma.write_tokenizer(folder, gemma=name == "T5Gemma")
    else:
        transformers.ByT5Tokenizer(extra_ids=125).save_pretrained(folder)


def read(folder: pathlib.Path) -> Any:
    """Returns a folder's model, as transformers reads it."""
    config = json.loads((folder / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder).float().eval()
    if config["model_type"] == "umt5" and config["architectures"][0].endswith("Generation"):
        model.config.tie_word_embeddings = False  # version 5 would scale its outputs
    return model


def deviation(loaded: Loaded, theirs: Any) -> float:
    """Returns the largest difference of logits, or of an encoder's states, as a share of the largest."""
    model, ids, rng = loaded.model, loaded.model.ids, np.random.default_rng(0)
    rows = rng.integers(3, model.vocab_size, (2, 12))
    rows[1, 7:] = ids.padding
    real = rows != ids.padding
    targets = np.insert(rng.integers(3, model.vocab_size, (2, 8)), 0, ids.start, axis=1)
    inputs = {"input_ids": torch.as_tensor(rows), "attention_mask": torch.as_tensor(real)}
    with torch.no_grad():
        if isinstance(model, Encoder):
            ours = encode_tokens(loaded.variables, jnp.asarray(rows), model=model)[real]
            expected = theirs(**inputs).last_hidden_state.numpy()[real]
        else:
            ours = apply_method(model.__call__, loaded.variables, jnp.asarray(rows), jnp.asarray(targets))
            expected = theirs(decoder_input_ids=torch.as_tensor(targets), **inputs).logits.numpy()
    return float(np.abs(np.asarray(ours) - expected).max() / np.abs(expected).max())


def same_texts(folder: pathlib.Path, loaded: Loaded, theirs: Any) -> bool:
    """Whether greedy texts are equal, with the tokenizer of a folder."""
    umt5 = theirs.config.model_type == "umt5"  # for which AutoTokenizer of version 5 has no class
    tokenizer = (transformers.ByT5Tokenizer if umt5 else transformers.AutoTokenizer).from_pretrained(folder)
    inputs = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    settings = {"max_new_tokens": LENGTH, "do_sample": False, "use_cache": False}
    found = [theirs.generate(**x, **settings)[0, 1:].tolist() for x in inputs]
    return generate(loaded, TEXTS, max_length=LENGTH) == [loaded.vocabulary.decode(x) for x in found]


def row(kind: str, folder: pathlib.Path, theirs: Any, *, back: pathlib.Path) -> dict[str, Any]:
    """Returns a row of the table; the model is exported to the folder `back`."""
    back.mkdir()
    loaded = load(folder)
    write_folder(back, *loaded)
    found = {"kind": kind, "in": deviation(loaded, theirs), "out": deviation(loaded, read(back))}
    if (folder / "model.safetensors").exists():
        first, second = (load_file(path / "model.safetensors") for path in (folder, back))
        same = first.keys() == second.keys() and all(np.array_equal(first[n], second[n]) for n in first)
        found["bits"] = ("no", "yes")[same]
    if not isinstance(loaded.model, Encoder):
        found["texts"] = ("no", "yes")[same_texts(back, loaded, theirs)]
    return found


def rows(scratch: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the rows; folders are made in the directory `scratch`."""
    for kind in KINDS:
        make(folder := scratch / kind, kind)
        yield row(kind, folder, read(folder), back=folder / "back")
    for kind in ("T5 1.1, FLAN-T5", "umT5", "T5Gemma, unbalanced"):
        whole, folder = scratch / kind, scratch / kind / "text_encoder"  # as pipelines of diffusers have it
        cls = getattr(transformers, CLASSES[KINDS[kind]["model_type"]] + "EncoderModel")
        config = transformers.AutoConfig.from_pretrained(whole, is_encoder_decoder=False)
        cls.from_pretrained(whole, config=config).save_pretrained(folder)
        (whole / "tokenizer").symlink_to(whole)
        yield row(f"encoder alone, of {kind}", folder, read(folder), back=folder / "back")
    if importlib.util.find_spec("peft"):
        peft, folder = importlib.import_module("peft"), scratch / "peft"
        lora = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(read(scratch / "T5 1.1, FLAN-T5"), lora)
        adapted.save_pretrained(folder)
        yield row("LoRA of PEFT", folder, adapted.base_model.model, back=folder / "back")


if __name__ == "__main__":
    options = report.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = list(rows(pathlib.Path(directory)))
    columns = {"kind": "folder", "in": "difference, read|.0e", "out": "difference, exported|.0e"}
    columns |= {"bits": "same bits", "texts": "same greedy texts"}
    facts = {"transformers": transformers.__version__, "torch": torch.__version__}
    report.write(
        "folders", report.table(found, columns), result={"rows": found}, options=options, facts=facts
    )
