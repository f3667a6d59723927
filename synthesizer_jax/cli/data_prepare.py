"""`synthesizer-jax data prepare`."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.options import DataDir, Imports


def prepare_tasks(
    mixture: Annotated[str, typer.Argument(help="Mixture or task to prepare.")],
    *,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            help="A SentencePiece model; by default bytes, or the synthetic mixture's own vocabulary."
        ),
    ] = None,
    extra_ids: Annotated[int, typer.Option(help="Sentinels added to the vocabulary.", min=0)] = 100,
    data_dir: DataDir = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Split to train on; by default train. Repeatable.")
    ] = None,
    evaluation_split: Annotated[
        list[str] | None,
        typer.Option(help="Split to evaluate on; by default validation. Repeatable."),
    ] = None,
    inputs_length: Annotated[
        int, typer.Option(help="Input tokens of a row, for tasks whose steps depend on it.", min=0)
    ] = 0,
    targets_length: Annotated[int, typer.Option(help="Target tokens of a row.", min=0)] = 0,
    epochs: Annotated[
        int, typer.Option(help="How often rows are read, for tasks with random steps.", min=1)
    ] = 1,
    workers: Annotated[
        int, typer.Option(help="Processes that read the files of large data sets.", min=1)
    ] = 1,
    renew: Annotated[bool, typer.Option("--renew", help="Write again what is there.")] = False,
    imports: Imports = None,
) -> None:
    """Tokenize a mixture's tasks once; training and evaluation read the files without TensorFlow.

    They are written into the data directory, where every run with the same vocabulary finds them, whatever
    its lengths. Training, eval, predict, distill and analyze prepare what they miss by themselves. A call
    that is interrupted keeps the files it has finished.
    """
    from synthesizer_jax.cli.data_show import load_tasks
    from synthesizer_jax.data.prepared import PreparedTasks
    from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
    from synthesizer_jax.runs import code
    from synthesizer_jax.tasks import synthetic, task_registry
    from synthesizer_jax.tasks.prepare import prepare

    load_data_libraries()
    directory = task_registry.default_data_dir() if data_dir is None else data_dir
    load_tasks(directory, imports)
    config = Bytes(extra_ids) if vocabulary is None else SentencePiece(vocabulary, extra_ids)
    if mixture == synthetic.MIXTURE:
        synthetic.write(directory)
        config = synthetic.vocabulary(directory) if vocabulary is None else config
    lengths = {"inputs": inputs_length, "targets": targets_length}
    prepared = PreparedTasks(directory, config.build())
    prepare(
        mixture,
        prepared,
        training_splits=[name for name in split or ("train",) if name],
        evaluation_splits=[name for name in evaluation_split or ("validation",) if name],
        lengths=lengths if targets_length else None,
        epochs=epochs,
        workers=workers,
        renew=renew,
        setup=functools.partial(code.load_user_code, imports or ()),
        log=typer.echo,
    )
    typer.echo(f"prepared tasks are in {prepared.root}")
