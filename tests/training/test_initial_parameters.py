"""Tests runs that start from another run: the parameters, how they are resized, and the report."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from synthesizer_jax.base.registry import replace
from synthesizer_jax.models import alignment, stacks_of, unroll_variables
from synthesizer_jax.optimizers import Adafactor, AdamW, Constant, optax_optimizer
from synthesizer_jax.optimizers.base import count_updates
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.experiment import InitRule
from synthesizer_jax.training.first_state import initialize_from_checkpoint
from synthesizer_jax.training.origins import (
    INITIALIZED,
    RESIZED,
    RESTORED,
    find_origins,
    resize,
)
from synthesizer_jax.training.run_directory import save_run
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import ClassStream, encoder, experiment, logged, save
from tests.training.tiny import run as train

OLD = {
    "params/embedding": (16, 8),
    "params/encoder/layers_0/attention/align/table": (2, 8, 8),
    "params/encoder/layers_0/attention/align/query/kernel": (8, 2, 4),
    "params/adapter": (3,),
}
NEW = {
    "params/embedding": (20, 8),
    "params/encoder/layers_0/attention/align/table": (2, 12, 12),
    "params/encoder/layers_0/attention/align/part_1/query/kernel": (8, 2, 4),
    "params/encoder/layers_0/attention/align/part_0/table": (2, 8, 8),
}
RULES = (
    InitRule("embedding|logits_kernel", "resize", fill="fresh"),
    InitRule(r"(.*/align)/part_1/(.*)", source=r"\1/\2"),
    InitRule(".*/part_0/.*", "fresh"),
    InitRule(".*/table", "resize", fill="distance"),
)


def test_the_first_rule_that_matches_decides():
    found = find_origins(OLD, NEW, RULES)
    assert [found[name].status for name in NEW] == [RESIZED, RESIZED, RESTORED, INITIALIZED]
    query = "params/encoder/layers_0/attention/align/part_1/query/kernel"
    assert found[query].source == "params/encoder/layers_0/attention/align/query/kernel"
    assert all(origin.problem is None for origin in found.values())
    problems = [origin.problem for origin in find_origins(OLD, NEW).values()]
    assert problems[:2] == [
        "has the shape (16, 8) in the checkpoint and (20, 8) in the new model",
        "has the shape (2, 8, 8) in the checkpoint and (2, 12, 12) in the new model",
    ]
    assert problems[2:] == ["is not in the checkpoint"] * 2


@pytest.mark.parametrize("fill", ["edge", "distance", "fresh"])
@pytest.mark.parametrize(
    ("old", "new"), [((2, 5, 3), (3, 4, 6)), ((1, 3, 3), (1, 7, 7)), ((3, 4, 5), (2, 1, 5))]
)
def test_resized_tables_are_cropped_or_extended(old, new, fill):
    x = np.arange(np.prod(old), dtype=np.float32).reshape(old)
    fresh = -1 - np.arange(np.prod(new), dtype=np.float32).reshape(new)
    found = np.asarray(resize(jax.numpy.asarray(x), jax.numpy.asarray(fresh), fill))
    assert found.shape == new
    for index in np.ndindex(new):
        inside = all(i < n for i, n in zip(index, old, strict=True))
        h, q, k = (min(i, n - 1) for i, n in zip(index, old, strict=True))
        expected = x[h, q, k]
        if fill == "fresh" and not inside:
            expected = fresh[index]
        if fill == "distance" and not inside:
            back = max(index[1] - old[1] + 1, index[2] - old[2] + 1, 0)
            expected = x[h, max(index[1] - back, 0), max(index[2] - back, 0)]
        assert found[index] == expected


def test_a_source_that_does_not_fit_its_pattern_is_an_error():
    with pytest.raises(ValueError, match=r"init_rules: '\(' is not a valid regular expression"):
        InitRule("(")
    with pytest.raises(ValueError, match=r"source '\\\\2' does not fit the pattern '\(\.\*\)'"):
        find_origins(OLD, NEW, [InitRule("(.*)", source=r"\2")])
    rule = InitRule("scale", "resize", fill="distance")  # distances need two positions
    origin = find_origins({"params/scale": (3,)}, {"params/scale": (4,)}, [rule])["params/scale"]
    assert origin.problem == "has the shape (3,) in the checkpoint and (4,) in the new model"


UNUSED = {
    "misspelled": (
        InitRule("embeding", "fresh"),
        r"'embeding' matches no parameter, did you mean 'embedding'",
    ),
    "no such part": (
        InitRule("nothing", "fresh"),
        r"'nothing' matches no parameter\. One of the paths is 'embedding'\. A pattern must match "
        r"a whole path\. The paths end in align/table, embedding, part_0/table, query/kernel\.",
    ),
    "shadowed": (
        InitRule(".*/table", "fresh"),
        r"'\.\*/table' has no effect, because earlier patterns",
    ),
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_rule_that_decides_nothing_is_an_error(name):
    rule, message = UNUSED[name]
    with pytest.raises(ValueError, match=f"init_rules: {message}"):
        find_origins(OLD, NEW, [*RULES, rule])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The directory, the experiment and the state of a run.

    The state differs from the initial state, as after training.
    """
    directory = tmp_path_factory.mktemp("source")
    recipe = experiment(seed=3, layers=2)
    state = Trainer(recipe).init()
    state = dataclasses.replace(state, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    save(directory, recipe, state)
    return directory, recipe, state


def started(recipe, directory):
    lines = []
    trainer = Trainer(recipe)
    recipe = replace(recipe, init_from=str(directory))
    found = initialize_from_checkpoint(trainer, experiment=recipe, report=lines.append)
    return trainer.init(), found, "\n".join(lines)


def test_the_same_model_is_restored_with_scanned_layers_over_a_mesh(source):
    (directory, recipe, saved) = source
    mesh = MeshShape(data=2, fsdp=4)
    model = recipe.model
    scanned = model.copy(**{k: s.copy(scan=True) for k, s in stacks_of(model).items()})
    averaged = replace(recipe.training, ema=0.5)
    fresh, found, table = started(
        replace(recipe, model=scanned, mesh=mesh, training=averaged), directory
    )
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, fresh)
    for params in (found.params, found.ema):
        looped = unroll_variables(scanned, {"params": params})["params"]
        jax.tree.map(np.testing.assert_array_equal, looped, saved.params)

    def pointer(tree):
        """Returns the memory address of the embedding."""
        return tree["embedding"].addressable_data(0).unsafe_buffer_pointer()

    assert pointer(found.params) != pointer(found.ema), "a step donates both"
    assert "initialized              0 parameters in 0 arrays" in table


def test_a_longer_model_is_resized_with_a_report(source):
    directory, recipe, saved = source
    longer = alignment("rv", head_dim=4, max_length=12)
    (run,) = recipe.model.encoder.runs
    mixer = run.block.self_mixer.copy(alignment=longer)
    stack = recipe.model.encoder.copy(runs=(replace(run, block=run.block.copy(self_mixer=mixer)),))
    model = recipe.model.copy(encoder=stack, vocab_size=20)
    with pytest.raises(
        ValueError, match=r"another model\. These parameters do not fit: .*; and 1 more\."
    ):
        started(replace(recipe, model=model), directory)
    ruled = replace(recipe, model=model, init_rules=(RULES[0], RULES[-1]))
    fresh = Trainer(ruled).init()
    (_, found, table) = started(ruled, directory)
    np.testing.assert_array_equal(found.params["embedding"][:16], saved.params["embedding"])
    np.testing.assert_array_equal(found.params["embedding"][16:], fresh.params["embedding"][16:])

    def table_of(state):
        """Returns the table of the second layer."""
        return state.params["encoder"]["layers_1"]["attention"]["align"]["part_0"]["table"]

    np.testing.assert_array_equal(table_of(found)[:, 8, 8], table_of(saved)[:, 7, 7])
    assert "encoder/layers_*/attention/align/part_0/table (2, 12, 12), 2 layers" in table


def test_the_optimizer_continues_if_asked_to(source):
    directory, recipe, saved = source
    going_on = replace(recipe, init_optimizer=True, mesh=MeshShape(data=2, fsdp=4))
    fresh, found, _ = started(going_on, directory)
    jax.tree.map(np.testing.assert_array_equal, found.opt_state, saved.opt_state)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, fresh)
    fresh, found, _ = started(recipe, directory)  # starts afresh by default
    jax.tree.map(np.testing.assert_array_equal, found.opt_state, fresh.opt_state)
    training = replace(recipe.training, optimizer=Adafactor())
    with pytest.raises(
        ValueError, match=r"belongs to another model or optimizer\. For example, opt_state/"
    ):
        started(replace(recipe, training=training, init_optimizer=True), directory)


@pytest.mark.parametrize("decays", [(0.0, 0.1), (0.1, 0.0)])
def test_the_optimizer_goes_on_with_another_weight_decay(tmp_path, decays):
    # Both optimizers have the same moments. Their states differ only in a part that has no arrays.
    before, after = (experiment(optimizer=AdamW(weight_decay=decay)) for decay in decays)
    state = Trainer(before).init()
    state = dataclasses.replace(state, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    save(tmp_path, before, state)
    _, found, _ = started(replace(after, init_optimizer=True), tmp_path)
    for old, new in zip(*map(jax.tree.leaves, (state.opt_state, found.opt_state)), strict=True):
        np.testing.assert_array_equal(old, new)


OPTIMIZERS = {
    "clipped adafactor": Adafactor(Constant(0.01, warmup_steps=8), clip_norm=1.0),
    "optax's sgd": optax_optimizer("sgd", Constant(0.01, warmup_steps=8)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_logged_rate_is_that_of_the_continued_optimizer(tmp_path, name):
    recipe = experiment(encoder(), optimizer=OPTIMIZERS[name], steps=3, save_every=2)
    save_run(recipe, tmp_path / "a")
    train(tmp_path / "a", recipe, ClassStream())
    going_on = replace(recipe, init_from=str(tmp_path / "a"), init_optimizer=True)
    initialize = functools.partial(
        initialize_from_checkpoint, experiment=going_on, report=lambda _: None
    )
    for steps in (3, 5):
        longer = replace(going_on, training=replace(recipe.training, steps=steps))
        train(tmp_path / "b", longer, ClassStream(), initialize=initialize)
    schedule = OPTIMIZERS[name].learning_rate.build()
    for run, first in (("a", 0), ("b", 3)):
        rates = list(logged(tmp_path / run, "learning_rate").values())
        np.testing.assert_allclose(rates, [schedule(first + n) for n in range(len(rates))], 1e-6)


def test_without_a_count_of_updates_no_rate_is_known():
    assert count_updates({"count": np.ones(3, np.int32), "moments": np.ones(())}) is None
    assert count_updates(({"moments": np.ones(())}, {"updates": np.int32(2)})) == 2
