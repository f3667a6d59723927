"""Defines `Facts`, which are known about an exported model from its run or from the user."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from synthesizer_jax.pretrained.huggingface.card import HUB, LANGUAGE, LICENSE, MODEL_NAME
from synthesizer_jax.pretrained.huggingface.hub import OWNERS
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.mixtures import MIXTURES
from synthesizer_jax.tasks.task import Task
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.source import Source

# The hub's names of the libraries that load a folder.
TRANSFORMERS = "transformers"
PEFT = "peft"
OURS = "synthesizer_jax"


@dataclasses.dataclass(frozen=True)
class Details:
    """Facts about an exported model that a user gives. They take precedence over the run's facts.

    Attributes:
      name: the name ``OWNER/NAME`` that the model will have on the hub. The default is the name of
        the exported directory.
      license: the hub's name of the license, such as ``apache-2.0``.
      languages: the codes of the languages, such as ``("en", "de")``.
      base_model: the name ``OWNER/NAME`` of the model on the hub from which the run started.
    """

    name: str | None = None
    license: str | None = None
    languages: tuple[str, ...] = ()
    base_model: str | None = None

    def __post_init__(self) -> None:
        if self.base_model in OWNERS:
            object.__setattr__(self, "base_model", f"{OWNERS[self.base_model]}/{self.base_model}")
        for option, model in (("--name", self.name), ("--base-model", self.base_model)):
            if model is not None and not re.fullmatch(MODEL_NAME, model):
                raise ValueError(
                    f"{option} is {model!r}, but it must be the OWNER/NAME of a model on the "
                    "Hugging Face hub, such as google/flan-t5-small."
                )
        if self.license is not None and not re.fullmatch(LICENSE, self.license):
            raise ValueError(
                f"--license is {self.license!r}, but it must be the hub's name of a license, such "
                f"as apache-2.0, mit or cc-by-4.0. {HUB}/docs/hub/repositories-licenses lists the "
                "names."
            )
        for language in self.languages:
            if not re.fullmatch(LANGUAGE, language):
                raise ValueError(
                    f"--language contains {language!r}, but each language must be a code of ISO "
                    "639, such as en, or the word multilingual or code. Separate languages by "
                    "commas."
                )


NO_DETAILS = Details()
"""The details if the user gives none."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """All facts from which the model card of an exported run is made.

    Attributes:
      experiment: the experiment of the run.
      step: the exported step. Step 0 is a model that was converted and not trained.
      source: the published model from which the run started.
      details: the facts that the user has given.
      folder_name: the name of the exported directory.
      library: the library that loads the folder, `TRANSFORMERS`, `PEFT` or `OURS`.
      results: the contents of ``results.json`` for the exported step, or None if the step was not
        evaluated.
      config: the contents of ``config.json``, or an empty dictionary if the folder has no such
        file.
      tokenizer: the class of the folder's tokenizer in transformers.
    """

    experiment: Experiment
    step: int
    source: Source
    details: Details
    folder_name: str
    library: str
    results: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: str = "AutoTokenizer"

    @property
    def title(self) -> str:
        """The title of the page, which is the name of the model without its owner."""
        return (self.details.name or self.folder_name).rpartition("/")[2]

    @property
    def base(self) -> str | None:
        """The name on the hub of the model from which this model was trained or converted.

        Adapters only fit the model with which they were trained. For adapters, the name is
        therefore not known if the run's base was itself trained from a published model.
        """
        if self.library == PEFT and not self.source.unchanged:
            return self.details.base_model
        return self.details.base_model or self.source.model

    @property
    def evaluated(self) -> Sequence[Mapping[str, Any]]:
        """The results of each evaluated task."""
        return self.results["tasks"] if self.results else ()

    @property
    def tasks(self) -> list[Task]:
        """The tasks on which the model was trained, if they are known.

        Imported tasks are not known, because only the directory of their data describes them.
        """
        if not self.step:
            return []
        mixture = self.experiment.data.mixture
        known = {*task_registry.mixture_names(), *task_registry.task_names()}
        if mixture not in known:
            return []
        rates = MIXTURES.get(mixture, {})
        names = task_registry.member_names(mixture)
        # Tasks with the rate 0 are only evaluated.
        return [task_registry.find_task(name) for name in names if rates.get(name, 1) != 0]
