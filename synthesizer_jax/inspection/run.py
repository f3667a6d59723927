"""What a run's model has learned, over examples of its evaluation sets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from synthesizer_jax.checkpoints.manager import finished_steps, restore_variables
from synthesizer_jax.checkpoints.placement import place_variables
from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet
from synthesizer_jax.evaluation.evaluator import Evaluator
from synthesizer_jax.evaluation.files import evaluation_folder
from synthesizer_jax.files import describing
from synthesizer_jax.inspection.layers import (
    Place,
    describe,
    head_projections,
    layer_sums,
    mixers_of,
    mixture_weights,
    rows_of,
    sown_by,
)
from synthesizer_jax.inspection.measures import Measures, Sums, join_cells, logit_ranks, measure
from synthesizer_jax.inspection.static_attention import StaticAttention, measure_run
from synthesizer_jax.messages import Phase, one_line_error, silent_phase
from synthesizer_jax.mixers import Linformer
from synthesizer_jax.models import EncoderDecoder, TokenModel, unroll, unroll_variables
from synthesizer_jax.parameters import Variables
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import batch_sharding, gather_to_host, use_mesh
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.postprocessors import to_text
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.initial_parameters import find_checkpoint, initializer_of
from synthesizer_jax.training.run_data import open_data
from synthesizer_jax.training.run_directory import (
    load_experiment,
    with_vocabulary_path,
)
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.step import Batch

RANKED = 4
"""Examples whose logits' ranks are averaged."""

SOWN = ("attention_weights", "attention_logits")

BINS = 5
"""Most parts, by length, of the examples of a task."""


@dataclasses.dataclass(frozen=True)
class LayerInspection:
    """What is known of one mixer with attention weights.

    Attributes:
      mixer: what it is made of, see `describe`.
      end: its measures.
      start: those before training; None: they are not known.
      rank: ``[heads]`` numerical rank of the logits, without a stack's position bias, as a share of the
        largest that is possible; NaN where there are no logits. See `logit_ranks`.
      effective_rank: ``[heads]`` the same of the effective rank.
      example: ``[heads, q, k]`` the weights of the first example.
    """

    mixer: str
    end: Measures
    start: Measures | None
    rank: np.ndarray
    effective_rank: np.ndarray
    example: np.ndarray


class MixtureHistory(NamedTuple):
    """The weights α of a mixture's parts over the run's checkpoints: ``[steps, heads, parts]``."""

    parts: tuple[str, ...]
    steps: list[int]
    alpha: np.ndarray


class LengthBin(NamedTuple):
    """The quality of examples of similar length.

    Attributes:
      task: the task.
      shortest: smallest number of tokens, of inputs or, where there are none, of the text.
      longest: largest.
      examples: how many.
      metrics: the task's metrics, or the loss of texts in nats per token.
    """

    task: str
    shortest: int
    longest: int
    examples: int
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What `inspect_run` found.

    Attributes:
      step: of the checkpoint.
      start: what the parameters at the start are.
      examples: how many were read.
      example: the inputs and targets of the first.
      layers: by name, such as ``encoder 1`` or ``decoder 1 cross``.
      without: mixers without attention weights, by the name of the layer.
      mixtures: by layer.
      projections: P_l and P_w of talking heads, by layer.
      quality: of the predictions of the newest evaluation, by task and length.
      evaluated: the step of that evaluation; None: there is none.
      static: how static forms describe the attention, if that was measured.
      static_problem: why it was not.
    """

    step: int
    start: str
    examples: int
    example: tuple[str, str]
    layers: Mapping[str, LayerInspection]
    without: Mapping[str, str]
    mixtures: Mapping[str, MixtureHistory]
    projections: Mapping[str, Mapping[str, np.ndarray]]
    quality: Sequence[LengthBin]
    evaluated: int | None
    static: StaticAttention | None
    static_problem: str


def inspect_run(
    run: pathlib.Path,
    *,
    data_dir: pathlib.Path | None = None,
    mixture: str | None = None,
    examples: int = 128,
    batch_size: int = 16,
    fit_examples: tuple[int, int] = (0, 0),
    tolerance: float = 0.01,
    phase: Phase = silent_phase,
) -> Inspection:
    """Inspects a run's model.

    Args:
      run: ``RUN`` or ``RUN/checkpoints/STEP``.
      data_dir: directory of the data sets.
      mixture: the task or mixture whose examples are read; None: the run's.
      examples: how many examples of the evaluation sets are read.
      batch_size: examples of a batch.
      fit_examples: training examples that static forms are fitted to, and held-out ones on which they are
        measured; 0: they are left out.
      tolerance: see `measure_static_attention`.
      phase: is told what is done.

    Raises:
      FileNotFoundError: there is no checkpoint or no data.
      ValueError: there is no run.
    """
    directory, step = find_checkpoint(run)
    experiment = load_experiment(directory)
    if mixture is not None:
        experiment = replace(experiment, data=replace(experiment.data, mixture=mixture))
    mesh, layout = place_variables(experiment.model, experiment.example, experiment.mesh)
    restore = functools.partial(restore_variables, directory / "checkpoints", layout=layout)
    step, variables = restore(step=step)
    data_dir = data_dir or task_registry.default_data_dir()
    evaluator = open_data(experiment, directory, data_dir)
    batch_size = -(-min(batch_size, -(-examples // 2)) // mesh.size) * mesh.size
    example, batches = _batches(experiment, evaluator.sets, examples, batch_size, mesh)
    model, looped = unroll(experiment.model), functools.partial(unroll_variables, experiment.model)
    start, before = _start(experiment, layout, mesh)
    saved = finished_steps(directory / "checkpoints")
    if 0 in saved and step:
        start, before = "Those saved at step 0", restore(step=0)[1]
    advance = phase(f"weights of {examples} examples at the end and at the start", 2)
    with use_mesh(mesh):
        end = _measure(model, looped(variables), batches)
        advance(1)
        first = {} if before is None else _measure(model, looped(before), batches)
        advance(1)
        layers = _inspect_layers(model, looped(variables), batches[0], end, first)
    over = {n: lambda n=n: restore(step=n)[1] for n in saved} | {step: lambda: variables}
    if before is not None:
        over = {0: lambda: before} | over
    mixers = {str(place): describe(mixer) for place, mixer in mixers_of(model).items()}
    evaluated, quality = _quality(directory, evaluator, step)
    measure_static = functools.partial(
        measure_run,
        with_vocabulary_path(experiment, directory),
        variables,
        vocabulary=evaluator.vocabulary,
        data_dir=data_dir,
        mesh=mesh,
        examples=fit_examples,
        batch_size=batch_size,
        tolerance=tolerance,
        phase=phase,
    )
    static, problem = _static_attention(measure_static, experiment, fits=fit_examples[0] > 0)
    return Inspection(
        step=step,
        start=start,
        examples=examples,
        example=example,
        layers=layers,
        without={name: mixer for name, mixer in mixers.items() if name not in layers},
        mixtures=_mixture_histories(experiment, {n: over[n] for n in sorted(over)}),
        projections=head_projections(looped(variables)),
        quality=quality,
        evaluated=evaluated,
        static=static,
        static_problem=problem,
    )


def _batches(
    experiment: Experiment,
    sets: Sequence[EvaluationSet],
    count: int,
    batch_size: int,
    mesh: Mesh,
) -> tuple[tuple[str, str], list[Batch]]:
    """Returns the texts of one example, and batches of examples of all sets, as long as their longest.

    The last batch is filled up with empty rows, of which nothing is real.
    """
    each = -(-count // len(sets))
    rows = [
        row
        for s in sets
        for row in itertools.islice(s.examples, 0, None, max(1, len(s.examples) // each))
    ]
    order = np.random.default_rng(0).permutation(len(rows))[:count]
    rows = [rows[i] for i in order]
    limits = experiment.data.lengths
    tokens = {
        name: [np.asarray(row[name])[: limits[name]] for row in rows]
        for name in ("inputs", "targets")
    }
    padded = {}
    for name, ids in tokens.items():
        longest = max(1 if limits[name] else 0, *map(len, ids))
        padded[name] = np.zeros((-(-len(ids) // batch_size) * batch_size, longest), np.int32)
        for i, x in enumerate(ids):
            padded[name][i, : len(x)] = x
    arrays = {
        "encoder_input_tokens": padded["inputs"],
        "decoder_input_tokens": np.pad(padded["targets"][:, :-1], ((0, 0), (1, 0))),
        "decoder_loss_weights": (padded["targets"] != 0).astype(np.float32),
    }
    batches = [
        jax.device_put(
            {name: x[i : i + batch_size] for name, x in arrays.items()}, batch_sharding(mesh)
        )
        for i in range(0, len(padded["inputs"]), batch_size)
    ]
    shown = (to_text(rows[0][f"{name}_pretokenized"]) for name in tokens)
    return tuple(shown), batches  # type: ignore[return-value]


def _start(experiment: Experiment, layout: Variables, mesh: Mesh) -> tuple[str, Variables | None]:
    """Returns what the parameters before training are, and themselves if they can be made again."""
    shardings = jax.tree.map(lambda x: x.sharding, layout)
    seed, tokens = experiment.training.seed, experiment.example
    make = lambda key: experiment.model.init(key, *(jnp.zeros(t.shape, t.dtype) for t in tokens))
    with use_mesh(mesh):
        fresh = jax.jit(make, out_shardings=shardings)(jax.random.key(seed))
    state = TrainState(jnp.zeros((), jnp.int32), fresh["params"], fresh.get("constants", {}), {})
    try:
        initialize = initializer_of(
            replace(experiment, init_optimizer=False), report=lambda _: None
        )
        if initialize is None:
            return f"Those that the experiment's seed {seed} makes", state.variables
        return f"Those of {experiment.init_from}", initialize(state).variables
    except (OSError, ValueError) as error:
        return f"Not known: {one_line_error(error)}", None


def _measure(
    model: TokenModel, variables: Variables, batches: Sequence[Batch]
) -> dict[Place, Measures]:
    """Returns the measures of all layers that have weights; even and odd batches are the halves."""
    rows = [jax.tree.map(gather_to_host, rows_of(model, batch)) for batch in batches]
    centers = {  # where weights add up to one, their mean over the pairs seen
        key: sum(r[key].real.sum(where=r[key].seen > 1) for r in rows)
        / max(sum(r[key].seen.sum(where=r[key].real & (r[key].seen > 1)) for r in rows), 1)
        for key in rows[0]
    }
    halves: list[dict[Place, Sums]] = [{}, {}]
    for i, batch in enumerate(batches):
        half = halves[i % 2]
        for place, sums in layer_sums(variables, batch, centers, model=model).items():
            own = Sums(*(gather_to_host(x).astype(np.float64) for x in sums))
            half[place] = own if place not in half else Sums(*map(np.add, half[place], own))
    return {
        place: measure(first, halves[1].get(place), center=centers[place.stack, place.cross])
        for place, first in halves[0].items()
    }


def _inspect_layers(
    model: TokenModel,
    variables: Variables,
    batch: Batch,
    end: Mapping[Place, Measures],
    start: Mapping[Place, Measures],
) -> dict[str, LayerInspection]:
    """Adds ranks and single examples of a batch to measures."""
    sown = jax.jit(
        lambda *args: [
            {p: x[:RANKED] for p, x in sown_by(model, *args, name).items()} for name in SOWN
        ]
    )
    weights, logits = jax.tree.map(gather_to_host, sown(variables, batch))
    rows, mixers, found = rows_of(model, batch), mixers_of(model), {}
    for place, measures in sorted(end.items(), key=lambda item: _order(item[0])):
        own = jax.tree.map(gather_to_host, rows[place.stack, place.cross])
        cut = [  # the real queries of an example, and the keys that they see
            np.s_[:, : int(real.sum()), : int(seen[real].max(initial=0))]
            for real, seen in zip(own.real[:RANKED], own.seen, strict=False)
        ]
        nothing = np.full((2, len(measures.mean)), np.nan)
        arrays = logits.get(place, nothing[:0])
        examples = [arrays[min(i, len(arrays) - 1)][c] for i, c in enumerate(cut) if len(arrays)]
        ranks = [logit_ranks(x) for x in examples if min(x.shape[1:]) > 1]
        rank, effective = np.mean(ranks, axis=0) if ranks else nothing
        example = weights[place][0]
        if isinstance(mixers[place], Linformer):  # its keys have no positions
            names = ("near", "distance", "off_diagonal", "profile")
            nan = {name: getattr(measures, name) * np.nan for name in names}
            measures = dataclasses.replace(measures, **nan)
        else:
            example = example[cut[0]]
        found[str(place)] = LayerInspection(
            mixer=describe(mixers[place]),
            end=measures,
            start=start.get(place),
            rank=rank,
            effective_rank=effective,
            example=join_cells(np.abs(example)),
        )
    return found


def _order(place: Place) -> tuple[bool, bool, int]:
    """Returns the order of layers: encoder, decoder, cross-attention."""
    return place.stack != "encoder", place.cross, place.layer


def _mixture_histories(
    experiment: Experiment, checkpoints: Mapping[int, Callable[[], Variables]]
) -> dict[str, MixtureHistory]:
    """Returns α of all mixtures over checkpoints; without mixtures only the first one is read."""
    histories: dict[str, MixtureHistory] = {}
    for step, restore in checkpoints.items():
        looped = unroll_variables(experiment.model, restore())
        weights = mixture_weights(unroll(experiment.model), looped)
        if not weights:
            break
        for name, (parts, alpha) in weights.items():
            old = histories.get(name, MixtureHistory(parts, [], np.zeros((0, *alpha.shape))))
            histories[name] = MixtureHistory(
                parts, [*old.steps, step], np.concatenate([old.alpha, alpha[None]])
            )
    return histories


def _quality(
    directory: pathlib.Path, evaluator: Evaluator, step: int
) -> tuple[int | None, list[LengthBin]]:
    """Returns the step of the run's newest predictions, up to a step, and their quality by length."""
    folder = directory / "evaluation"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    steps = [int(n) for n in names if n.isdecimal() and int(n) <= step]
    for newest in sorted(steps, reverse=True):
        if found := quality_by_length(evaluator.sets, evaluation_folder(directory, newest)):
            return newest, found
    return None, []


def quality_by_length(sets: Sequence[EvaluationSet], folder: pathlib.Path) -> list[LengthBin]:
    """Returns the quality of a folder's predictions, in up to `BINS` parts of each set by length.

    Tasks whose file is absent, or holds other examples than the set, are left out.
    """
    found = []
    for examples in sets:
        path, records = folder / f"{examples.task.name}.jsonl", []
        if path.is_file():
            with describing(path), path.open(encoding="utf-8") as file:
                records = list(map(json.loads, file))
        texts = [to_text(row["inputs_pretokenized"]) for row in examples.examples]
        if [record["input"] for record in records] != texts or not texts:
            continue
        lengths = np.array([len(x) for x in examples.inputs])
        tokens = np.array([len(x) for x in examples.targets])
        predicted = "prediction" in records[0]
        lengths = lengths if predicted and lengths.any() else tokens
        limits = np.unique(np.quantile(lengths, np.arange(1, BINS) / BINS, method="nearest"))
        parts = np.searchsorted(limits, lengths)
        for part in map(np.flatnonzero, np.unique(parts)[:, None] == parts):
            chosen = [records[i] for i in part]
            if predicted:
                of_part = dataclasses.replace(
                    examples, examples=[examples.examples[i] for i in part]
                )
                metrics = of_part.score([record["prediction"] for record in chosen])
            else:
                nats = -sum(record["score"] or np.nan for record in chosen)
                metrics = {"loss": nats / max(int(tokens[part].sum()), 1)}
            ends = int(lengths[part].min()), int(lengths[part].max())
            found.append(LengthBin(examples.task.name, *ends, len(part), metrics))
    return found


def _static_attention(
    measure_static: Callable[[], StaticAttention], experiment: Experiment, *, fits: bool
) -> tuple[StaticAttention | None, str]:
    """Returns how static the attention is, or why that is not measured."""
    if not isinstance(experiment.model, EncoderDecoder):
        kind = type(experiment.model).__name__
        return (
            None,
            f"They are fitted to encoder-decoders only, and this model is of the class {kind}.",
        )
    if not fits:
        return None, "They were left out (--fit-examples 0)."
    try:
        return measure_static(), ""
    except (FileNotFoundError, ValueError) as error:
        return None, f"They could not be fitted: {error}."
