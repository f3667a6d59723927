"""Defines the synthetic co-training mixture, which consists of eight tasks in T5's formats.

`preparation.synthetic` generates the rows of the tasks and their vocabulary.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.tasks.definitions import DEFINITIONS as OF_T5
from synthesizer_jax.tasks.definitions import UNLABELED
from synthesizer_jax.tasks.task import Task

MIXTURE = "synthetic_co_training"
"""The name of the mixture and its TFDS data set. The data set has one configuration per task."""
QUICKSTART = "synthetic_quickstart"
"""The name of a mixture of three tasks that are learned quickly."""
VOCAB_SIZE = 1024
"""The number of pieces of the vocabulary."""

IMITATED: Mapping[str, tuple[str, float]] = {
    "cola": ("glue_cola_v002", 4.0),
    "sst2": ("glue_sst2_v002", 3.0),
    "stsb": ("glue_stsb_v002", 4.0),
    "mnli": ("glue_mnli_v002", 6.0),
    "boolq": ("super_glue_boolq_v102", 6.0),
    "copa": ("super_glue_copa_v102", 8.0),
    "wic": ("super_glue_wic_v102", 5.0),
    "wsc": ("super_glue_wsc_v102_simple_eval", 3.0),
}
"""Maps each configuration to the T5 task that it imitates and to its rate in the mixture.

Tasks that compare sentences have higher rates, because they need more examples.
"""

_T5 = {task.name: task for task in OF_T5}

DEFINITIONS: Mapping[str, Task] = {
    config: dataclasses.replace(
        _T5[name], name=f"synthetic_{config}", dataset=f"{MIXTURE}/{config}", splits=UNLABELED
    )
    for config, (name, _) in IMITATED.items()
}
"""The synthetic tasks, by configuration."""

MIXTURES: Mapping[str, Mapping[str, float]] = {
    mixture: {DEFINITIONS[config].name: IMITATED[config][1] for config in configs}
    for mixture, configs in ((MIXTURE, tuple(IMITATED)), (QUICKSTART, ("cola", "boolq", "wic")))
}
"""The mixture of all tasks, and the mixture of three tasks that are learned quickly."""


def vocabulary(data_dir: pathlib.Path) -> SentencePiece:
    """Returns the vocabulary of the synthetic mixtures, a SentencePiece model without sentinels.

    The file does not have to exist yet.
    """
    return SentencePiece(str(data_dir / MIXTURE / "vocabulary.model"), extra_ids=0)
