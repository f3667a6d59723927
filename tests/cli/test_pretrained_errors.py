"""What users of convert, export, analyze and average get wrong is one sentence, and leaves nothing."""

import pytest

from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.models import Size, t5
from synthesizer_jax.models.zoo import language_model
from synthesizer_jax.registry import replace
from synthesizer_jax.training.run_directory import save_run
from synthesizer_jax.training.trainer import Trainer
from tests.cli.commands import call
from tests.pretrained.folders import TINY, make_folder, make_tensors
from tests.training.tiny import experiment


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders of transformers, and runs of a T5 and a language model."""
    place = tmp_path_factory.mktemp("errors")
    make_folder(place / "t5", TINY, make_tensors(TINY))
    small = TINY | {"vocab_size": 100}
    make_folder(place / "small", small, make_tensors(small))
    recipe = experiment()
    models = {
        "t5_run": t5(Size(8, 2, 16, 2, 4), vocab_size=384),
        "lm_run": language_model("v", Size(8, 1, 16, 2, 4)).copy(vocab_size=384),
    }
    for name, model in models.items():
        made = replace(recipe, model=model)
        save_run(made, place / name)
        checkpoints = Checkpoints(place / name / "checkpoints")
        checkpoints.save(Trainer(made).init(), None)
        checkpoints.close()
    return place


CASES = {
    "convert t5 new --extra-ids 3": "--extra-ids belongs to --vocabulary; name one",
    "convert t5 new --max-length 3": "--max-length belongs to --encoder and --decoder; give one",
    "convert t5 new --encoder rw": r"--encoder is 'rw', did you mean 'r'\?; use v, d, r",
    "convert t5 new --encoder r": "cannot start as the model; fit and distill it with",
    "convert small new": "the vocabulary has 384 ids, but the embedding of .*small has 100 rows",
    "convert lm_run new": "lm_run holds a LanguageModel; only EncoderDecoder models can be converted",
    "convert nowhere new": "there is no nowhere; give a folder or a checkpoint file",
    "convert t5 t5": "t5 exists; give a new directory",
    "export lm_run new": "a LanguageModel is not a T5; only T5s can be exported",
    "export t5_run new --to onnx": "--to is 'onnx'; use huggingface, t5x",
    "analyze lm_run": "lm_run contains a LanguageModel; give the run of an EncoderDecoder",
    "average t5_run new": r"holds 1 checkpoint \(0\), and a mean needs two; train with",
    "average t5_run new --last 2": r"holds 1 checkpoint \(0\), and --last is 2; give a smaller",
    "generate --workdir t5_run --top-p 0.5 a": "top_p is 0.5 with temperature 0, .*; give a temperature",
    "generate --workdir t5_run --input t5/config.json a": "arguments or with --input, not both",
}


@pytest.mark.parametrize("command", CASES)
def test_a_mistake_is_one_sentence(place, monkeypatch, command):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    with pytest.raises((ValueError, OSError), match=CASES[command]) as raised:
        call(*command.split())
    assert "\n" not in str(raised.value)
    assert sorted(place.rglob("*")) == before
