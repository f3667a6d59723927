"""`synthesizer-jax data cache`."""

from __future__ import annotations

from typing import Annotated

import typer

from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.options import DataDir, Imports


def cache_tasks(
    mixture: Annotated[str, typer.Argument(help="Mixture or task to tokenize.")],
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
        list[str] | None, typer.Option(help="Split to cache; by default train. Repeatable.")
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Also write current caches again.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Tokenize a mixture's tasks once, for training that reads the tokens without TensorFlow.

    The caches are written into the data directory, where training with the same vocabulary finds them,
    whatever its lengths.
    """
    from synthesizer_jax.cli.data_show import load_tasks
    from synthesizer_jax.data import synthetic, tasks
    from synthesizer_jax.data.cache import Caches
    from synthesizer_jax.data.cache_writing import write_caches
    from synthesizer_jax.data.vocabularies import Bytes, SentencePiece

    load_data_libraries()
    directory = tasks.default_data_dir() if data_dir is None else data_dir
    load_tasks(directory, imports)
    own = synthetic.prepare(directory).vocabulary if mixture == synthetic.MIXTURE else None
    config = Bytes(extra_ids) if vocabulary is None else SentencePiece(vocabulary, extra_ids)
    caches = Caches(directory, (own or config if vocabulary is None else config).build())
    for name in split or ["train"]:
        report = write_caches(mixture, caches, split=name, renew=renew)
        for info in report.written:
            size = sum(size for size, _ in info.files.values())
            typer.echo(
                f"{info.task}, {name}: {info.examples:,} examples, "
                f"{sum(info.tokens.values()):,} tokens, {size / 1e6:,.1f} MB"
            )
        for task in report.kept:
            typer.echo(f"{task}, {name}: is cached")
        for task, reason in report.live.items():
            typer.echo(f"{task}, {name}: is not cached, {reason}")
    typer.echo(f"caches are in {caches.root}")
