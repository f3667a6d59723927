"""Records the published model from which the parameters of a run come, in ``source.json``.

A model card names this model and its license. The record is copied from run to run, so that the
card of a fine-tuned run can be written without the run from which it started.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

from synthesizer_jax.base.files import describing, storage_path, write_atomic
from synthesizer_jax.base.registry import check_types
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.runs.saved import REMEDY, find_checkpoint
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.run_directory import has_begun

SOURCE_FILE = "source.json"


@dataclasses.dataclass(frozen=True)
class Source:
    """A published model from which the parameters of a run come.

    Attributes:
      model: the name ``OWNER/NAME`` on the Hugging Face hub, or None if it is not known.
      commit: the commit of the model on the hub, or None if it is not known.
      unchanged: whether the run's parameters at step 0 are the parameters of the model. If it is
        false, they have been trained, averaged or changed since.
      license: the license in the model's own card, such as ``apache-2.0``, or None if the card
        names no license.
      license_name: the name of a license that the hub does not know. The `license` is then
        ``other``.
      license_link: the address of such a license.
      languages: the codes of the languages in the model's own card.
    """

    model: str | None = None
    commit: str | None = None
    unchanged: bool = False
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    languages: tuple[str, ...] = ()


UNKNOWN = Source()
"""The source of a run whose published model is not known, or that started from new parameters."""


def write_source(source: Source, directory: pathlib.Path) -> None:
    """Writes ``source.json`` into a run directory, or removes it if the source is `UNKNOWN`."""
    path = directory / SOURCE_FILE
    if source == UNKNOWN:
        path.unlink(missing_ok=True)
        return
    write_atomic(path, json.dumps(dataclasses.asdict(source), indent=1) + "\n")


def read_source(directory: pathlib.Path) -> Source:
    """Reads ``source.json`` from a run directory, or returns `UNKNOWN` if there is no such file.

    Raises:
      ValueError: if the file is damaged.
    """
    path = directory / SOURCE_FILE
    if not path.is_file():
        return UNKNOWN
    with describing(path, REMEDY):
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["languages"] = tuple(fields["languages"])
        check_types(Source, fields)
        return Source(**fields)


def find_source(experiment: Experiment, directory: pathlib.Path) -> Source:
    """Returns the source of a run that is about to be trained.

    A run that continues keeps its source, because the run from which it started may have been
    deleted. A new run has the source of the run in `Experiment.init_from`. The field `unchanged`
    is only true if the new run starts from step 0 of a converted run.
    """
    if has_begun(directory):
        return read_source(directory)
    if experiment.init_from is None:
        return UNKNOWN
    run, step = find_checkpoint(storage_path(experiment.init_from))
    source = read_source(run)
    if step is None:
        step = max(finished_steps(run / "checkpoints"), default=None)
    return dataclasses.replace(source, unchanged=source.unchanged and step == 0)
