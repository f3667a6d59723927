"""Inspects what the layers of a run's model have learned, on examples of evaluation sets."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from synthesizer_jax.alignments import Alignment, Mixture
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.registry import replace
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.checkpoints.placement import place_variables
from synthesizer_jax.data.batch import assemble_batch
from synthesizer_jax.data.examples import SIDES, DrawnExample
from synthesizer_jax.distillation.distill import DISTILLATION_FILE
from synthesizer_jax.distillation.replacement import blocks_of
from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet, evenly_spaced
from synthesizer_jax.inspection.measures import Measures, QueryView, attention_sums, measure
from synthesizer_jax.inspection.static_attention import can_be_static, measure_static_attention
from synthesizer_jax.mixers import Linformer, Mixer
from synthesizer_jax.mixers.taps import LOGITS
from synthesizer_jax.models import (
    Encoder,
    EncoderDecoder,
    LanguageModel,
    TokenModel,
    UniversalStack,
    stacks_of,
    unroll,
    unroll_variables,
)
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.runs.metrics import METRICS_FILE
from synthesizer_jax.runs.saved import find_checkpoint
from synthesizer_jax.sharding import batch_sharding, gather_to_host, use_mesh
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.postprocessors import to_text
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.initial_parameters import fresh_variables, restore_run
from synthesizer_jax.training.run import open_evaluator
from synthesizer_jax.training.run_directory import load_experiment, with_vocabulary_path
from synthesizer_jax.training.step import Batch, teacher_forced

CROSS = "encoder_decoder_attention"
"""The name of the cross-attention module in a layer of the decoder."""

OF_DISTANCES = ("near", "near_of_equal", "profile")
"""The measures that are defined only if queries and keys belong to the same sequence."""

OF_KEYS_SEEN = ("keys", "spread", "static", "near_of_equal", "histogram")
"""The measures that are defined only if every query sees the first keys of the sequence.

If attention has a window, most queries do not see the first keys.
"""


class Place(NamedTuple):
    """Identifies a mixer of a model by its stack, its kind and its layer.

    Attributes:
      stack: the stack, ``encoder`` or ``decoder``.
      cross: whether the mixer is cross-attention.
      layer: the index of the layer in the stack.
    """

    stack: str
    cross: bool
    layer: int

    def __str__(self) -> str:
        """Returns the mixer's name, which counts layers from 1, as in ``decoder 1 cross``."""
        return f"{self.stack} {self.layer + 1}{' cross' * self.cross}"


def inspect_run(
    run: pathlib.Path,
    *,
    data_dir: pathlib.Path | None = None,
    prepare: Callable[[Experiment, pathlib.Path], None] | None = None,
    mixture: str | None = None,
    examples: int = 128,
    batch_size: int = 16,
    fits: bool = False,
    phase: Phase = silent_phase,
) -> dict[str, Any]:
    """Measures what the layers of a run's model attend to, and what changed during training.

    Args:
      run: ``RUN`` or ``RUN/checkpoints/STEP``.
      data_dir: the directory of the data sets.
      prepare: a function that prepares data sets that are missing. The function is called after
        everything else has been checked.
      mixture: the mixture whose evaluation sets are read. `None` stands for the run's mixture.
      examples: the number of examples to read.
      batch_size: the number of examples in a batch.
      fits: whether to fit static forms to the heads; see `measure_static_attention`.
      phase: a function that reports progress.

    Returns:
      A dictionary:

      - ``step``: the step of the checkpoint.
      - ``start``: a description of the parameters with which training started.
      - ``examples``: the number of examples that were read.
      - ``example``: the texts of one example.
      - ``layers``: a dictionary by the names of layers, such as ``decoder 1 cross``. Each entry
        contains the ``mixer``, the results of `measure` at the ``end`` and at the ``start``, and
        the mean weights of the ``example``. A measure that is not defined is NaN. The entry
        ``start`` is `None` if the parameters at the start are not known.
      - ``without``: the mixers that have no attention weights, by the names of layers.
      - ``mixtures``: for each layer with a mixture, the ``parts`` of the mixture, and the weights
        ``alpha`` of the parts at all ``steps`` up to the inspected step. The weights α have the
        shape ``[heads, parts]``.
      - ``projections``: for each layer with talking heads, the matrices P_l and P_w.
      - ``static``: the result of `measure_static_attention`, or `None` if no head was fitted.

    Raises:
      FileNotFoundError: if the run has no checkpoint, or if no data is found.
      ValueError: if the path is not a run or a checkpoint of a run.
    """
    directory, step = find_checkpoint(run)
    experiment = load_experiment(directory)
    if mixture is not None:
        experiment = replace(experiment, data=replace(experiment.data, mixture=mixture))
    mesh, layout = place_variables(experiment.model, experiment.example, experiment.mesh)
    restore = functools.partial(restore_run, directory, layout=layout)
    step, variables = restore(step=step)

    data_dir = data_dir or task_registry.default_data_dir()
    if prepare is not None:
        prepare(with_vocabulary_path(experiment, directory), data_dir)
    sets = open_evaluator(experiment, directory, data_dir).sets
    count, example, batches = _batches(experiment, sets, examples, batch_size, mesh)

    saved = [n for n in finished_steps(directory / "checkpoints") if n <= step]
    start = "not known"
    before: Variables | None = None
    # A run that contains a converted model has a checkpoint at step 0. Training itself does not
    # save a checkpoint at step 0.
    if 0 in saved and step:
        start = "those saved at step 0"
        before = restore(step=0)[1]
    elif 0 not in saved and _starts_from_seed(directory, experiment):
        start = f"those that the experiment’s seed {experiment.training.seed} makes"
        with use_mesh(mesh):
            before = fresh_variables(experiment, jax.tree.map(lambda x: x.sharding, layout))

    # Use looped layers instead of scanned layers, because layers are measured one by one.
    model = unroll(experiment.model)
    looped = functools.partial(unroll_variables, experiment.model)
    mixers = mixers_of(model)
    end = looped(variables)
    advance = phase(f"weights of {count} examples at the end and at the start", 2)
    with use_mesh(mesh):
        even, odd = sums_of(model, end, batches)
        advance(1)
        first = ({}, {}) if before is None else sums_of(model, looped(before), batches)
        advance(1)

        # Keep only the first example of the first batch, and replace all other rows by padding.
        alone = jax.tree.map(lambda x: x.at[1:].set(0), batches[:1])
        single, _ = sums_of(model, end, alone)

        # Fit static forms to the even batches, and measure the fitted forms on the odd batches.
        fitted = [place for place in odd if fits and _can_be_fitted(model, place, mixers[place])]
        fit_to, measure_on = (
            {(place.stack, place.layer): half[place]["statistics"] for place in fitted}
            for half in (even, odd)
        )
        static = measure_static_attention(
            model, end, fit_to=fit_to, measure_on=measure_on, batches=batches[1::2], phase=phase
        )

    layers = {}
    for place, mixer in mixers.items():
        if place in even:
            layers[str(place)] = {
                "mixer": describe(mixer),
                "end": _measure(place, mixer, even, odd),
                "start": _measure(place, mixer, *first) if first[0] else None,
                "example": measure(single[place], None)["map"],
            }

    def variables_at(number: int) -> Variables:
        """Returns the variables at a step, and restores a checkpoint only if it is needed."""
        if number == step:
            return variables
        if number == 0 and before is not None:
            return before
        return restore(step=number)[1]

    histories: dict[str, dict[str, Any]] = {}
    if _mixtures(model, end):
        steps = {*saved, step}
        if before is not None:
            steps.add(0)
        histories = _mixture_histories(model, looped, sorted(steps), variables_at)
    return {
        "step": step,
        "start": start,
        "examples": count,
        "example": example,
        "layers": layers,
        "without": {str(p): describe(mixer) for p, mixer in mixers.items() if p not in even},
        "mixtures": histories,
        "projections": _projections(model, end),
        "static": static if fitted else None,
    }


def _starts_from_seed(directory: pathlib.Path, experiment: Experiment) -> bool:
    """Returns whether the experiment's seed determines the parameters with which a run started."""
    is_trained = (directory / METRICS_FILE).is_file()
    is_distilled = (directory / DISTILLATION_FILE).is_file()
    return is_trained and not is_distilled and experiment.init_from is None


def _can_be_fitted(model: TokenModel, place: Place, mixer: Mixer) -> bool:
    """Returns whether static forms can be fitted to the heads of a layer.

    If layers share their parameters, a single layer cannot be replaced on its own.
    """
    return not place.cross and can_be_static(mixer) and not _shares(model, place)


def mixers_of(model: TokenModel) -> dict[Place, Mixer]:
    """Returns a dictionary from the `Place` of every mixer to the mixer."""
    mixers = {}
    for name in stacks_of(model):
        for i, block in enumerate(blocks_of(model, name)):
            mixers[Place(name, False, i)] = block.self_mixer
            if block.cross_mixer is not None:
                mixers[Place(name, True, i)] = block.cross_mixer
    return dict(sorted(mixers.items(), key=lambda item: (item[0].stack != "encoder", item[0])))


def _entries(model: TokenModel, tree: PyTree) -> Iterator[tuple[Place, Mixer, PyTree]]:
    """Yields every mixer with its `Place` and the mixer's entries in a collection of variables.

    The layers of the model must be looped.
    """
    for place, mixer in mixers_of(model).items():
        stack = tree.get(place.stack, {})
        layer = stack.get("shared" if _shares(model, place) else f"layers_{place.layer}", {})
        names = [CROSS] if place.cross else ["attention", "self_attention"]
        yield place, mixer, next((layer[name] for name in names if name in layer), {})


def _shares(model: TokenModel, place: Place) -> bool:
    """Returns whether the layers of a stack share their parameters."""
    return isinstance(stacks_of(model)[place.stack], UniversalStack)


def describe(module: Mixer | Alignment) -> str:
    """Returns a string that describes the parts of a mixer or alignment.

    For example, the string may be ``Attention: Random + DotProduct``.
    """
    parts = getattr(module, "parts", None)
    if parts is not None:
        # A mixture adds the logits of its parts, so the string has a plus sign. In a `PerHead`,
        # each part has its own heads, so the string has a bar.
        separator = " + " if isinstance(module, Mixture) else " | "
        return separator.join(map(describe, parts))
    name = type(module).__name__
    alignment = getattr(module, "alignment", None)
    return name if alignment is None else f"{name}: {describe(alignment)}"


def sums_of(
    model: TokenModel, variables: Variables, batches: Sequence[Batch]
) -> tuple[dict[Place, Measures], dict[Place, Measures]]:
    """Returns the `attention_sums` of all layers that have weights.

    The sums are computed separately for the even batches and for the odd batches.
    """
    halves: tuple[dict[Place, Measures], dict[Place, Measures]] = {}, {}
    for i, batch in enumerate(batches):
        for place, sums in _batch_sums(variables, batch, model=model).items():
            new = jax.tree.map(lambda x: gather_to_host(x).astype(np.float64), sums)
            old = halves[i % 2].get(place)
            halves[i % 2][place] = new if old is None else jax.tree.map(np.add, old, new)
    return halves


def _measure(
    place: Place, mixer: Mixer, even: Mapping[Place, Measures], odd: Mapping[Place, Measures]
) -> Measures:
    """Returns the result of `measure` for a layer. Measures that are not defined are NaN."""
    measures = measure(even[place], odd.get(place))
    undefined: tuple[str, ...] = OF_DISTANCES if place.cross or isinstance(mixer, Linformer) else ()
    if getattr(mixer, "window", None) is not None:
        undefined += OF_KEYS_SEEN
    return measures | {name: np.nan * measures[name] for name in undefined}


@functools.partial(jax.jit, static_argnames="model")
def _batch_sums(variables: Variables, batch: Batch, *, model: TokenModel) -> dict[Place, Measures]:
    """Returns the `attention_sums` of all layers that have weights, for one batch."""
    collections = ["intermediates", LOGITS]
    if isinstance(model, Encoder):
        _, sown = model.apply(variables, batch["encoder_input_tokens"], mutable=collections)
    else:
        _, sown = teacher_forced(model, variables, batch, collection=collections)  # type: ignore[arg-type]
    views = _query_views(model, batch)
    logits = {place: arrays for place, _, arrays in _entries(model, sown.get(LOGITS, {}))}
    totals = {}
    for place, mixer, arrays in _entries(model, sown.get("intermediates", {})):
        if "attention_weights" not in arrays:
            continue
        # If layers share their parameters, the shared module sows one value for each layer.
        arrays = {
            name: x[place.layer if len(x) > 1 else 0]
            for name, x in {**arrays, **logits[place]}.items()
        }
        weights = arrays["attention_weights"]
        view = views[place.stack, place.cross]
        # In a Linformer, every query sees all keys. The keys are mixtures of tokens and have no
        # positions.
        if isinstance(mixer, Linformer):
            seen = jnp.full_like(view.seen, weights.shape[-1])
            view = QueryView(view.real, seen, view.diagonal * jnp.nan)
        totals[place] = attention_sums(weights, arrays.get("attention_logits"), view)
    return totals


def _query_views(
    model: TokenModel, batch: Mapping[str, jax.Array]
) -> dict[tuple[str, bool], QueryView]:
    """Returns which keys the queries of unpacked rows see.

    A key of the dictionary is a pair of the name of the stack and a bool, which is True for
    cross-attention.
    """
    # `n` is the number of encoder positions, and `m` is the number of decoder positions. Both
    # numbers include padding.
    n, m = (batch[f"{side}_input_tokens"].shape[1] for side in ("encoder", "decoder"))
    # `inputs` and `targets` are the numbers of real tokens, with the shape ``[b, 1]``.
    inputs = (batch["encoder_input_tokens"] != model.ids.padding).sum(1, keepdims=True)
    targets = (batch["decoder_loss_weights"] > 0).sum(1, keepdims=True)

    def view_of(
        length: int, real: jax.Array, seen: jax.Array, ratio: jax.Array | float = 1
    ) -> QueryView:
        """Returns the `QueryView` for queries of one stack.

        Args:
          length: the number of queries in a row, including padding.
          real: ``[b, 1]``, the number of real queries.
          seen: ``[b, 1]``, the number of keys that all queries see. If `seen` is negative, each
            query sees the keys up to its own position.
          ratio: ``[b, 1]`` or 1, the position of the key on the diagonal divided by the position of
            the query.
        """
        q = jnp.arange(length)[None]
        seen = jnp.where(seen < 0, q + 1, jnp.maximum(seen, 0))
        parts = (q < real, seen, q * ratio)
        return QueryView(*(jnp.broadcast_to(x, (len(real), length)) for x in parts))

    causal = jnp.full_like(inputs, -1)
    if isinstance(model, LanguageModel):
        # A row contains the inputs followed by the targets. In a prefix model, every query sees all
        # inputs.
        whole = view_of(n + m, inputs + targets, causal)
        seen = jnp.maximum(whole.seen, inputs) if model.prefix else whole.seen
        return {("decoder", False): whole._replace(seen=seen)}
    by_kind = {("encoder", False): view_of(n, inputs, inputs)}
    if isinstance(model, EncoderDecoder):
        by_kind["decoder", False] = view_of(m, targets, causal)
        by_kind["decoder", True] = view_of(m, targets, inputs, inputs / jnp.maximum(targets, 1))
    return by_kind


def _batches(
    experiment: Experiment, sets: Sequence[EvaluationSet], count: int, batch_size: int, mesh: Mesh
) -> tuple[int, list[str], list[Batch]]:
    """Returns examples in at least two batches, the number of examples, and one example's texts.

    The examples come from all evaluation sets. All rows are padded to the length of the longest
    row. The last batch is filled up with rows that contain only padding.

    Returns:
      The number of examples, the texts of one example, and the batches.
    """
    each = -(-count // len(sets))
    rows = [row for s in sets for row in evenly_spaced(s.examples, each)]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:count]]

    # Limit the batch size to half of the examples, so that there are at least two batches. Then
    # round the batch size up to a multiple of the number of devices.
    batch_size = min(batch_size, -(-len(rows) // 2))
    batch_size = -(-batch_size // mesh.size) * mesh.size
    data = replace(experiment.data, pack=False)
    limits = experiment.data.lengths
    cut = [{side: np.asarray(row[side])[: limits[side]] for side in SIDES} for row in rows]
    inputs, targets = (
        max(min(limits[side], 1), *(len(ids[side]) for ids in cut)) for side in SIDES
    )
    batches = []
    for i in range(0, len(rows), batch_size):
        part = [[DrawnExample(**ids, member=0, epoch=0)] for ids in cut[i : i + batch_size]]
        part += [[]] * (batch_size - len(part))
        host = assemble_batch(part, data, lengths=(inputs, targets), ids=experiment.model.ids)
        batches.append(jax.device_put(host, batch_sharding(mesh)))
    texts = [to_text(rows[0][f"{side}_pretokenized"]) for side in SIDES]
    return len(rows), texts, batches


def _mixtures(model: TokenModel, variables: Variables) -> dict[str, tuple[list[str], np.ndarray]]:
    """Returns the parts of each mixture in a model, and the parts' weights α ``[heads, parts]``.

    The layers of the model must be looped.
    """
    mixtures = {}
    for place, mixer, params in _entries(model, variables["params"]):
        alignment: Any = getattr(mixer, "alignment", None)
        if isinstance(alignment, Mixture) and alignment.weights != "sum":
            align = jax.tree.map(gather_to_host, params["align"])
            alpha = np.asarray(alignment.alpha(align))
            mixtures[str(place)] = list(map(describe, alignment.parts)), alpha
    return mixtures


def _mixture_histories(
    model: TokenModel,
    looped: Callable[[Variables], Variables],
    steps: Sequence[int],
    variables_at: Callable[[int], Variables],
) -> dict[str, dict[str, Any]]:
    """Returns the entry ``mixtures`` of the result of `inspect_run`.

    Args:
      model: the model, with looped layers.
      looped: a function that converts variables of the run to variables of `model`.
      steps: the steps, in ascending order.
      variables_at: a function that returns the variables of the run at a step.
    """
    histories: dict[str, dict[str, Any]] = {}
    for step in steps:
        for name, (parts, alpha) in _mixtures(model, looped(variables_at(step))).items():
            history = histories.setdefault(name, {"parts": parts, "steps": [], "alpha": []})
            history["steps"].append(step)
            history["alpha"].append(alpha)
    return histories


def _projections(model: TokenModel, variables: Variables) -> dict[str, dict[str, np.ndarray]]:
    """Returns the matrices P_l and P_w ``[from, to]`` of each layer with talking heads."""
    names = {"logits_projection": "P_l", "weights_projection": "P_w"}
    projections = {
        str(place): {names[n]: gather_to_host(params[n]) for n in names if n in params}
        for place, _, params in _entries(model, variables["params"])
    }
    return {place: matrices for place, matrices in projections.items() if matrices}
