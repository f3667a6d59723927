"""Converts a checkpoint of another library to a run directory."""

from __future__ import annotations

import pathlib

import jax
import numpy as np

from synthesizer_jax.base.files import new_directory
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.registry import replace
from synthesizer_jax.base.typing import AUTO, PyTree
from synthesizer_jax.checkpoints.streamed import Unread, save_streamed
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.tokenizer_json import AnyVocabulary
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.distillation.transplant import start_as, with_variants
from synthesizer_jax.models import Encoder, EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.optimizers import Adafactor, Constant
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.pretrained.huggingface.card import read_source_of
from synthesizer_jax.pretrained.huggingface.folder import model_of
from synthesizer_jax.pretrained.opening import check_size, open_pretrained
from synthesizer_jax.runs import code
from synthesizer_jax.runs.events import add_event
from synthesizer_jax.runs.saved import find_checkpoint, is_run
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.run_directory import read_recorded, save_run
from synthesizer_jax.training.source import Source, read_source, write_source


def convert_checkpoint(
    source: pathlib.Path,
    directory: pathlib.Path,
    *,
    revision: str | None = None,
    vocabulary: AnyVocabulary | None = None,
    encoder: str | None = None,
    decoder: str | None = None,
    max_length: int = 512,
    phase: Phase = silent_phase,
) -> PyTree:
    """Writes a run directory with the parameters of another library's checkpoint, at step 0.

    The experiment of the new run is T5's fine-tuning on GLUE. The commands `eval` and `generate`
    can use the new run, and other runs can start from its parameters with ``init_from``. If the
    source is a msgpack file or a run, it is read into memory completely. From all other sources, at
    most two parameters are in memory at a time. The directory is created only when all of its files
    are complete. The file ``events.jsonl`` of the run contains the event ``converted``, which names
    the source. If the source is a model from the hub, the event also names the commit. The file
    ``source.json`` records the published model for later model cards; see `training.source`.

    Args:
      source: the checkpoint; see `open_pretrained`. If the source is a run, the new run has the
        same experiment, except for the model.
      directory: the new directory.
      revision: a branch, tag or commit of a model on the hub. `None` means the main branch.
      vocabulary: a vocabulary to use instead of the vocabulary in the checkpoint. Checkpoints of
        T5X do not contain a vocabulary.
      encoder: the name of a variant. The encoder's self-attention gets the alignments of this
        variant; see `with_variants`. Before any training, the new model computes the same outputs
        as the old model; see `start_as`. `None` keeps the model's alignments.
      decoder: the name of a variant for the decoder's self-attention; see `encoder`.
      max_length: the number of positions in the tables of new alignments.
      phase: a function that reports progress.

    Returns:
      The parameters as nested dictionaries of `Unread`, which contain the shapes of the parameters.
    """
    with (
        new_directory(directory) as staging,
        open_pretrained(
            source, revision=revision, vocabulary=vocabulary, phase=phase
        ) as pretrained,
    ):
        experiment = _experiment(pretrained, source, vocabulary)
        params = pretrained.params

        if encoder or decoder:
            teacher = pretrained.model
            assert isinstance(teacher, EncoderDecoder)
            model = with_variants(teacher, encoder=encoder, decoder=decoder, max_length=max_length)
            params = start_as(teacher, model, params)
            # Replace the dtype of `model`, which comes from the checkpoint, with the dtype of the
            # experiment.
            experiment = replace(experiment, model=replace(model, dtype=experiment.model.dtype))
            # Convert the new parameters, which are arrays, because `save_streamed` accepts only
            # `Unread`.
            params = jax.tree.map(lambda x: x if isinstance(x, Unread) else Unread.of(x), params)

        save_run(experiment, staging)
        add_event(staging, "converted", step=0, text=pretrained.origin)
        write_source(_source_of(pretrained, source), staging)
        if is_run(source):
            code.record_code(staging, code.recorded_code(find_checkpoint(source)[0]))
        step = Unread.of(np.int32(0))
        state = {"step": step, "params": params, "constants": {}, "opt_state": {}}
        save_streamed(staging / "checkpoints", 0, state, phase=phase)
    return params


def experiment_of(folder: pathlib.Path) -> Experiment:
    """Returns the experiment of the run that `convert_checkpoint` would make from a folder.

    The folder must be in the format of transformers. Only the configuration in the folder is read.
    The vocabulary of the experiment is always `Bytes`, even if the folder contains a different
    vocabulary.
    """
    return _fine_tuning(model_of(folder), Bytes(), source=folder)


def _experiment(
    pretrained: Pretrained, source: pathlib.Path, vocabulary: AnyVocabulary | None
) -> Experiment:
    """Returns the experiment of a converted run.

    If the source is a run, the result is the experiment of the source, with the converted model. If
    the source is not a run, the result is the experiment that fine-tunes T5.
    """
    model = pretrained.model
    vocabulary = vocabulary or pretrained.vocabulary
    if vocabulary is None:
        raise FileNotFoundError(
            f"{source} has no vocabulary that is known here. Give one with --vocabulary, such as "
            "T5's spiece.model, or 'bytes' for a ByT5."
        )
    _check_is_trained(model, source)
    vocabulary.build().check_ids(model.ids, source)
    check_size(vocabulary, model, source=source)
    if is_run(source):
        saved = read_recorded(find_checkpoint(source)[0])
        model = replace(model, dtype=saved.model.dtype)
        return replace(saved, model=model, vocabulary=vocabulary).starting_from(None)
    return _fine_tuning(model, vocabulary, source=source)


def _source_of(pretrained: Pretrained, source: pathlib.Path) -> Source:
    """Returns what is known about the published model from which a converted run comes."""
    if is_run(source):
        return replace(read_source(find_checkpoint(source)[0]), unchanged=False)
    assert pretrained.folder is not None
    return read_source_of(pretrained.folder, pretrained.origin)


def _check_is_trained(model: TokenModel, source: pathlib.Path) -> None:
    """Raises a `ValueError` if a model of another library is only an encoder."""
    if isinstance(model, Encoder):
        raise ValueError(
            f"{source} contains only an encoder, which cannot be trained here. Use it with "
            "synthesizer_jax.load and synthesizer_jax.encode."
        )


def _fine_tuning(
    model: TokenModel, vocabulary: AnyVocabulary, *, source: pathlib.Path
) -> Experiment:
    """Returns the experiment that fine-tunes a model like T5, on GLUE.

    Error messages name `source`, the checkpoint from which the model was read.
    """
    _check_is_trained(model, source)
    assert isinstance(model, EncoderDecoder)
    return Experiment(
        model=replace(model, dtype=AUTO),
        vocabulary=vocabulary,
        data=DataConfig("glue_v002_proportional", 512, 84, batch_size=128, pack=True),
        training=Training(steps=20_000, optimizer=Adafactor(Constant(1e-3))),
        evaluation=Evaluation(every=1000),
    )
