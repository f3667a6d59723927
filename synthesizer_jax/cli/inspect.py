"""Defines the command `inspect`, which writes an HTML page about what a model has learned."""

from __future__ import annotations

import functools
import pathlib

import typer

from synthesizer_jax.base.files import absolute
from synthesizer_jax.base.typing import Count
from synthesizer_jax.cli.options import DataDir, Imports


def inspect(
    run: pathlib.Path,
    *,
    data_dir: DataDir = None,
    output: pathlib.Path = pathlib.Path("inspection.html"),
    mixture: str | None = None,
    examples: Count = 256,
    batch_size: Count = 16,
    static_forms: bool = True,
    imports: Imports = None,
) -> None:
    """Show where the attention heads of a model look, and how sharp, local and static they are.

    The command writes an HTML page, and a JSON file with the same numbers. The
    page and the file contain attention maps, histograms of the attention
    weights before and after training, distances, ranks, mixture weights,
    projections, and the similarity of heads. The page also shows how much of
    each head is lost if it is replaced by a static form of attention, which
    depends only on positions.

    Example: synthesizer-jax inspect runs/rv --data-dir DATA --output rv.html

    Args:
      run: the directory RUN of a run, or one checkpoint, RUN/checkpoints/STEP.
      output: the HTML file to write.
      mixture: the task or mixture whose examples are read. The default is the mixture of the run.
      examples: the number of examples to read from the evaluation sets.
      batch_size: the number of examples per batch.
      static_forms: fit static forms of attention to the heads, and measure the model's loss if
        heads are replaced by tables.
    """
    from synthesizer_jax.cli.data import prepare_missing
    from synthesizer_jax.inspection.page import summary, write_inspection
    from synthesizer_jax.inspection.run import inspect_run
    from synthesizer_jax.runs import code
    from synthesizer_jax.runs.progress import show_phases

    code.load_user_code(imports or ())
    with show_phases() as phase:
        inspection = inspect_run(
            run,
            data_dir=data_dir,
            prepare=functools.partial(prepare_missing, trains=False),
            mixture=mixture,
            phase=phase,
            examples=examples,
            batch_size=batch_size,
            fits=static_forms,
        )
    numbers = write_inspection(output, inspection, title=f"What {run} has learned")
    pages = f"page: {absolute(output)}", f"numbers: {absolute(numbers)}"
    typer.echo("\n".join([*summary(inspection), *pages]))
