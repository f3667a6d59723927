"""Makes runs with untrained models, and small data sets for them.

The data sets are labeled, unlabeled, grouped, or free text.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds

from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.models import Encoder, Size, alignment, t5
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.preparation.writing import write_dataset
from synthesizer_jax.primitives.initializers import Normal
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.run_directory import save_experiment
from synthesizer_jax.training.trainer import Trainer

MIXTURE = "small_evaluation"
RATES = {
    "glue_rte_v002": 2.0,
    "glue_stsb_v002": 1.0,
    "super_glue_multirc_v102": 1.0,
    "super_glue_record_v102": 1.0,
    "multi30k_en_de": 1.0,
    "glue_ax_v002": 0.0,
}


def write_data(data_dir: pathlib.Path) -> None:
    """Writes five data sets.

    RTE, STS-B and MultiRC have hidden test labels. ReCoRD has no test labels, and Multi30k has a
    labeled test split.
    """
    text = tfds.features.Text()
    number = np.int32
    strings = tfds.features.Sequence(text)
    pair = {"sentence1": text, "sentence2": text, "idx": number}
    place = {"paragraph": number, "question": number, "answer": number}

    def pairs(n, label):
        return [
            {"sentence1": f"a {i}", "sentence2": f"b {i}", "label": label(i), "idx": i}
            for i in range(n)
        ]

    def multirc(hidden):
        return [
            {
                "paragraph": f"p {q // 2}",
                "question": f"q {q}",
                "answer": f"a {a}",
                "label": -1 if hidden else a % 2,
                "idx": {"paragraph": q // 2, "question": q, "answer": 3 * q + a},
            }
            for q in range(4)
            for a in range(3)
        ]

    queries = [
        {
            "passage": "p",
            "query": f"q {i} @placeholder",
            "entities": ["x", "y"],
            "answers": ["x", "y"][: 1 + i % 2],
            "idx": {"passage": i, "query": i},
        }
        for i in range(4)
    ]
    words = [{"en": f"word {i}", "de": f"Wort {i}"} for i in range(7)]

    def odd(i):
        """Returns the label of an example of a task with two classes."""
        return i % 2

    def half(i):
        """Returns the label of an example of a similarity task."""
        return i / 2

    def hidden(i):
        """Returns the label of an example whose true label is hidden."""
        return -1

    sets = {
        "glue/rte": (
            pair | {"label": np.int64},
            {"train": pairs(4, odd), "validation": pairs(6, odd), "test": pairs(5, hidden)},
        ),
        "glue/stsb": (
            pair | {"label": np.float32},
            {"validation": pairs(6, half), "test": pairs(6, hidden)},
        ),
        "super_glue/multirc": (
            {"paragraph": text, "question": text, "answer": text, "label": np.int64, "idx": place},
            {"validation": multirc(False), "test": multirc(True)},
        ),
        "super_glue/record": (
            {
                "passage": text,
                "query": text,
                "entities": strings,
                "answers": strings,
                "idx": {"passage": number, "query": number},
            },
            {"validation": queries},
        ),
        "multi30k/en_de": ({"en": text, "de": text}, {"validation": words, "test": words[:4]}),
    }
    for name, (features, splits) in sets.items():
        read = {split: (lambda rows=rows: rows) for split, rows in splits.items()}
        write_dataset(name, "1.0.0", features, read, data_dir)


def experiment(**changes) -> Experiment:
    """Returns an experiment that trains a tiny byte-level T5 on `MIXTURE`."""
    return Experiment(
        model=t5(Size(16, 1, 32, 2, 8), encoder=alignment("v", head_dim=8), vocab_size=384),
        data=DataConfig(MIXTURE, inputs_length=32, targets_length=8, batch_size=8, shards=1),
        training=Training(steps=4, optimizer=AdamW(learning_rate=Constant(1e-3))),
        evaluation=Evaluation(method="rank", batch_size=8),
        vocabulary=Bytes(),
        **changes,
    )


def classifier(**changes) -> Experiment:
    """Returns an experiment that trains the encoder of a tiny T5 as a classifier for RTE.

    The classes of the model have a different order than the label words of the task.
    """
    whole = experiment(**changes)
    classes = ("not_entailment", "entailment")
    stack = whole.model.encoder
    return replace(
        whole,
        model=Encoder(vocab_size=384, d_model=16, encoder=stack, outputs=2, head_init=Normal(1.0)),
        data=replace(whole.data, mixture="glue_rte_v002", targets_length=1, classes=classes),
    )


def write_run(directory: pathlib.Path, experiment: Experiment, *, steps=(2, 4), value=None) -> None:
    """Writes the directory of a run.

    The parameters of each step are initialized with a different seed, or with a single value.
    """
    save_experiment(experiment, directory)
    checkpoints = Checkpoints(directory / "checkpoints", keep_latest=len(steps))
    for step in steps:
        training = replace(experiment.training, seed=step)
        single = replace(experiment, mesh=MeshShape(), training=training)
        state = Trainer(single, jax.devices()[:1]).init()
        params = state.params
        if value is not None:
            params = jax.tree.map(lambda x: jnp.full_like(x, value), params)
        checkpoints.save(dataclasses.replace(state, step=jnp.asarray(step), params=params), None)
        checkpoints.wait()
    checkpoints.close()
