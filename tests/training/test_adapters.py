"""Tests what adapters change, how they are trained and saved, and how a run finds its base."""

import dataclasses
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from synthesizer_jax.alignments import Mixture, Random
from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.models import (
    ZOO,
    Size,
    UniversalStack,
    alignment,
    stacks_of,
    t5,
    unroll_variables,
)
from synthesizer_jax.models.adapters import Adapted
from synthesizer_jax.models.lora import LoRA, LoRARule
from synthesizer_jax.models.updates import LowRankUpdate
from synthesizer_jax.optimizers import Adafactor, OptimizerRule
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.checkpoint_average import average_checkpoints
from synthesizer_jax.training.experiment import InitRule
from synthesizer_jax.training.first_state import initializer_of
from synthesizer_jax.training.initial_parameters import read_base, restore_run
from synthesizer_jax.training.run_directory import (
    check_same_run,
    find_base,
    load_experiment,
    save_run,
)
from synthesizer_jax.training.step import loss_sums
from synthesizer_jax.training.trainer import Trainer
from tests.layers.cases import ALIGNMENT_CASES, MIXER_CASES
from tests.layers.contract import LENGTH, D
from tests.training.tiny import LENGTH as TOKENS
from tests.training.tiny import VOCAB, ClassStream, CopyStream, close, encoder, experiment, save
from tests.training.tiny import run as train

EVERYTHING = LoRA(rank=3, alpha=6.0, targets=".*")


def scanned(model):
    return model.copy(**{k: s.copy(scan=True) for k, s in stacks_of(model).items()})


def test_a_kernel_is_split_where_its_layer_sums():
    """A kernel is split into two factors along the axes over which its layer sums.

    The test covers all alignments, mixers and models.
    """
    cases = {**ALIGNMENT_CASES, **MIXER_CASES}
    tokens = jax.ShapeDtypeStruct((2, LENGTH, D), np.float32)
    modules = [
        (name, case.layer, (tokens, tokens) if case.layer.reads_memory else (tokens,))
        for name, case in cases.items()
        if "full" in case.modes
    ]
    stack = UniversalStack(encoder().encoder.runs)
    models = [
        ZOO["t5_1_1_tiny"](),
        encoder(),
        encoder(masked_lm=True),
        encoder().copy(encoder=stack),
    ]
    modules += [(str(i), model, model.example(8, 8)) for i, model in enumerate(models)]
    for name, module, arguments in modules:
        summed = {}

        def record(call, args, kwargs, context, summed=summed):
            if isinstance(context.module, nn.DenseGeneral | nn.Dense):
                axes = getattr(context.module, "axis", -1)
                summed[*context.module.path, "kernel"] = 1 if isinstance(axes, int) else len(axes)
            return call(*args, **kwargs)

        with nn.intercept_methods(record):
            jax.make_jaxpr(module.init)(jax.random.key(0), *arguments)
        if not summed:
            continue
        shapes, axes = Adapted(module, arguments, EVERYTHING).abstract()
        adapters = traverse_util.flatten_dict(shapes["params"])
        names = traverse_util.flatten_dict(axes["params"])
        found = {
            keys[:-1]: len(x.shape) - 1 for keys, x in adapters.items() if keys[-1] == "lora_a"
        }
        found.pop(("logits_kernel",), None)
        assert found == summed, name
        for keys, x in adapters.items():
            assert len(names[keys]) == len(x.shape)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The directory of a run with untrained parameters, and its experiment."""
    directory = tmp_path_factory.mktemp("source")
    model = t5(
        Size(8, 2, 16, 2, 4), encoder=alignment("rv", head_dim=4, max_length=8), vocab_size=VOCAB
    )
    recipe = experiment(model, seed=3)
    save(directory, recipe)
    return directory, recipe


def adapting(recipe, directory, lora=EVERYTHING, **changes):
    """Returns an experiment that trains adapters for the model of a run."""
    training = {k: changes.pop(k) for k in tuple(changes) if hasattr(recipe.training, k)}
    training = replace(recipe.training, adapters=lora, **training)
    return find_base(replace(recipe, training=training, init_from=str(directory), **changes))


def merged(params, adapters, scale, tokens=()):
    """Merges adapters into the parameters of looped layers, in NumPy and float64.

    The argument `scale` is the scale of the low-rank updates, or a function from the path of a
    parameter to the scale.
    """
    kernels, flat = (
        traverse_util.flatten_dict(jax.tree.map(np.float64, x)) for x in (params, adapters)
    )
    for keys in {k[:-1] for k in flat if k[-1] in ("lora_a", "token_entries")}:
        kernel = kernels[keys]
        if (*keys, "token_entries") in flat:
            columns = keys == ("logits_kernel",)
            (kernel.T if columns else kernel)[list(tokens)] = (
                flat[*keys, "token_entries"].T if columns else flat[*keys, "token_entries"]
            )
            continue
        a, b = flat[*keys, "lora_a"], flat[*keys, "lora_b"]
        update = a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)
        factor = scale("/".join(keys)) if callable(scale) else scale
        kernel += factor * update.reshape(kernel.shape)
        if (*keys, "lora_magnitude") in flat:
            matrix = kernel.reshape(update.shape)
            matrix *= flat[*keys, "lora_magnitude"].reshape(-1) / np.linalg.norm(matrix, axis=0)
    complete = {keys: x for keys, x in flat.items() if keys in kernels}
    return traverse_util.unflatten_dict(kernels | complete)


@pytest.mark.parametrize(("scan", "mesh"), [(False, MeshShape(2, 2, 2)), (True, MeshShape())])
def test_only_the_adapters_are_trained(source, tmp_path, scan, mesh):
    directory, recipe = source
    model = scanned(recipe.model) if scan else recipe.model
    rules = (OptimizerRule(".*/encoder_decoder_attention/.*/lora_a", frozen=True),)
    recipe = adapting(
        recipe, directory, model=model, mesh=mesh, rules=rules, ema=0.9, micro_batches=2
    )
    trainer = Trainer(recipe, jax.devices()[: 8 if mesh.tensor > 1 else 1])
    stream = CopyStream()
    trainer.read_base(lambda _: None)
    before = jax.device_get(trainer.base)
    state = trainer.init()
    jax.tree.map(np.testing.assert_array_equal, trainer.averaged_variables(state), before)
    for _ in range(2):
        state, _ = trainer.step(state, trainer.shard_batch(next(stream)))
    jax.tree.map(np.testing.assert_array_equal, trainer.base, before)
    names = {
        k.key
        for path, _ in jax.tree.leaves_with_path((state.params, state.opt_state, state.ema))
        for k in path[-1:]
        if hasattr(k, "key")
    }
    assert names == {"lora_a", "lora_b"}
    save(tmp_path, recipe, dataclasses.replace(state, ema={}))
    _, found = restore_run(tmp_path)

    def looped(params):
        """Returns parameters in the layout of looped layers."""
        return unroll_variables(model, {"params": params})["params"]

    expected = merged(looped(before["params"]), looped(jax.device_get(state.params)), 2.0)
    close(looped(found["params"]), expected, atol=1e-6)
    # The loss of the next step must equal the loss of a plain model with the merged parameters.
    batch = next(stream)
    plain = jax.jit(lambda v, batch: loss_sums(model, v, batch, z_loss=0.0, label_smoothing=0.0))
    sums = plain(jax.device_get(found), batch)
    _, metrics = trainer.step(state, trainer.shard_batch(batch))
    np.testing.assert_allclose(metrics["loss"], sums.loss / sums.weight, rtol=2e-5)


DORA = LoRA(3, 6.0, ".*", dora=True, embeddings="embedding")
TOKENS_ONLY = LoRA(targets=None, tokens=(7, 2))
RULES = LoRA(
    3,
    6.0,
    "(en|de)coder/.*",
    rules=(LoRARule(".*/query/kernel", 2), LoRARule("decoder/.*/(query|wo)/kernel", alpha=1.0)),
    rank_stabilized=True,
    whole="encoder/.*/scale|.*/table",
)


def scale_of_rules(path):
    """Returns the scale of a kernel's update with `RULES`."""
    if path.endswith("/query/kernel"):
        return 6.0 / 2**0.5
    return (1.0 if path.startswith("decoder") and path.endswith("/wo/kernel") else 6.0) / 3**0.5


@pytest.mark.parametrize(
    ("lora", "scale", "trained", "scan"),
    [
        (DORA, 2.0, {"lora_a", "lora_b", "lora_magnitude"}, True),
        (TOKENS_ONLY, 0.0, {"token_entries"}, False),
        (RULES, scale_of_rules, {"lora_a", "lora_b", "scale", "table"}, False),
    ],
    ids=["dora", "tokens", "rules"],
)
def test_all_kinds_of_updates_are_trained_saved_and_continued(
    source, tmp_path, lora, scale, trained, scan
):
    directory, recipe = source
    model = scanned(recipe.model) if scan else recipe.model
    recipe = adapting(recipe, directory, lora, model=model, steps=4, save_every=2, keep_latest=9)
    trainer = Trainer(recipe, jax.devices()[:1])
    trainer.read_base(lambda _: None)
    before = jax.device_get(trainer.base)
    close(trainer.averaged_variables(trainer.init()), before, atol=1e-6)

    end = train(tmp_path / "whole", recipe)
    save_run(recipe, tmp_path / "whole")
    flat = traverse_util.flatten_dict(jax.device_get(end.params))
    assert {keys[-1] for keys in flat} == trained
    began = traverse_util.flatten_dict(jax.device_get(trainer.init().params))
    assert all((x != began[keys]).any() for keys, x in flat.items())
    # A run that stops in between must end with the same parameters.
    train(tmp_path / "parts", replace(recipe, training=replace(recipe.training, steps=2)))
    save_run(recipe, tmp_path / "parts")
    jax.tree.map(
        np.testing.assert_array_equal, train(tmp_path / "parts", recipe).params, end.params
    )

    def looped(params):
        """Returns parameters in the layout of looped layers."""
        return unroll_variables(model, {"params": params})["params"]

    params = looped(jax.device_get(end.params))
    expected = merged(looped(before["params"]), params, scale, lora.tokens)
    _, found = restore_run(tmp_path / "whole")
    close(looped(found["params"]), expected, atol=2e-6)


def test_tokens_can_be_new_rows_of_a_resized_embedding(source):
    """If `init_rules` first extend the arrays, the entries of new tokens can be trained."""
    directory, recipe = source
    rules = (InitRule("embedding|logits_kernel", "resize"),)
    model = recipe.model.copy(vocab_size=VOCAB + 2)
    lora = LoRA(targets=None, tokens=(5, VOCAB))  # only 5 occurs in the batches
    recipe = adapting(recipe, directory, lora, model=model, init_rules=rules)
    trainer = Trainer(recipe, jax.devices()[:1])
    state = trainer.init()
    params = [trainer.averaged_variables(state)["params"]]
    stream = CopyStream()
    for _ in range(2):
        state, _ = trainer.step(state, trainer.shard_batch(next(stream)))
    params.append(trainer.averaged_variables(state)["params"])
    before, after = (traverse_util.flatten_dict(jax.device_get(x), sep="/") for x in params)
    changed = {path: x != after[path] for path, x in before.items() if (x != after[path]).any()}
    assert changed.keys() == {"embedding", "logits_kernel"}
    assert changed["embedding"].shape[0] == changed["logits_kernel"].shape[1] == VOCAB + 2
    assert {*np.nonzero(changed["embedding"].any(axis=1))[0]} == {5}
    assert {*np.nonzero(changed["logits_kernel"].any(axis=0))[0]} == {5, VOCAB}


@pytest.mark.parametrize(
    ("shape", "axes", "split"),
    [
        ((5, 4), ("embed", "mlp"), 1),
        ((5, 2, 3), ("embed", "heads", "kv"), 1),
        ((2, 3, 5), ("heads", "kv", "embed"), 2),
        ((2, 5, 2, 3), ("layers", "embed", "heads", "kv"), 2),
        ((2, 2, 3, 5), ("layers", "heads", "kv", "embed"), 3),
    ],
)
def test_gradients_of_dora_treat_the_norm_as_a_constant(shape, axes, split):
    """The gradients are those of Liu et al. (2024), section 4.3, for every kind of kernel."""
    kernel = jax.ShapeDtypeStruct(shape, np.float32)
    update = LowRankUpdate(kernel, axes, rank=2, scale=1.5, has_magnitude=True)
    rng = np.random.default_rng(0)
    w, g = (rng.normal(size=shape).astype("f") for _ in range(2))
    arrays = {
        leaf: rng.normal(size=x.shape).astype("f") for leaf, (x, _) in update.abstract().items()
    }
    found = jax.grad(lambda arrays: (update.apply(w, arrays) * g).sum())(arrays)

    first = int(axes[0] == "layers")
    layers = range(shape[0]) if first else [...]
    inputs = int(np.prod(shape[first:split]))
    for layer in layers:
        a = arrays["lora_a"][layer].reshape(inputs, 2).astype(np.float64)
        b = arrays["lora_b"][layer].reshape(2, -1).astype(np.float64)
        m = arrays["lora_magnitude"][layer].reshape(-1)
        v = w[layer].reshape(inputs, -1) + 1.5 * a @ b
        gradient = g[layer].reshape(inputs, -1)
        norm = np.sqrt((v**2).sum(axis=0))
        expected = {
            "lora_a": 1.5 * (gradient * m / norm) @ b.T,
            "lora_b": 1.5 * a.T @ (gradient * m / norm),
            "lora_magnitude": (gradient * v).sum(axis=0) / norm,
        }
        for leaf, x in expected.items():
            np.testing.assert_allclose(found[leaf][layer].reshape(x.shape), x, rtol=1e-4, atol=1e-4)


def test_an_output_without_weights_stays_zero():
    kernel = jax.ShapeDtypeStruct((3, 2), np.float32)
    update = LowRankUpdate(kernel, ("embed", "mlp"), rank=1, scale=1.0, has_magnitude=True)
    w = np.array([[1, 0], [2, 0], [3, 0]], "f")
    arrays = update.init(dict.fromkeys(update.leaves, jax.random.key(0)), w)
    np.testing.assert_allclose(update.apply(w, arrays), w, rtol=1e-6)


def test_new_parameters_are_trained_whole_and_saved(source, tmp_path):
    """Parameters that the base model lacks are trained and saved as a whole.

    The test uses a classifier, new rows of the embedding and a fixed table, in scanned layers.
    """
    directory, recipe = source
    dot_product = recipe.model.encoder.runs[0].block.self_mixer.alignment.parts[1]
    kind = Mixture((Random(TOKENS, trainable=False), dot_product))
    model = t5(Size(8, 2, 16, 2, 4), encoder=kind, vocab_size=VOCAB + 4).encoder
    model = scanned(encoder().copy(encoder=model, vocab_size=VOCAB + 4))
    rules = (
        InitRule("embedding", "resize", fill="fresh"),
        InitRule("output_dense/.*|.*/part_0/.*", "fresh"),
    )
    data = replace(recipe.data, classes=experiment(model).data.classes, targets_length=1)
    recipe = adapting(recipe, directory, model=model, data=data, init_rules=rules, ema=0.5)
    trainer = Trainer(recipe, jax.devices()[:1])
    stream = ClassStream()
    state = trainer.init()  # reads the complete base
    start = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, trainer.averaged_variables(state), trainer.base)
    assert start.params["embedding"].shape == (VOCAB + 4, 8)
    _, saved = restore_variables(directory / "checkpoints")
    np.testing.assert_array_equal(start.params["embedding"][:VOCAB], saved["params"]["embedding"])
    for _ in range(2):
        state, _ = trainer.step(state, trainer.shard_batch(next(stream)))

    before, after = (traverse_util.flatten_dict(x.params) for x in (start, state))
    changed = {keys for keys, x in before.items() if (x != after[keys]).any()}
    assert {("embedding",), ("output_dense", "kernel"), ("output_dense", "bias")} <= changed
    assert all(keys[-1] in ("lora_a", "lora_b") for keys in changed if keys[0] == "encoder")
    jax.tree.map(np.testing.assert_array_equal, state.constants, start.constants)
    assert {x.shape for x in jax.tree.leaves(state.constants)} == {(2, 2, TOKENS, TOKENS)}
    # Fixed tables must be saved, because other settings of JAX would draw other random numbers.
    save(tmp_path / "run", recipe, state)
    with jax.default_prng_impl("rbg"):
        _, found = restore_run(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, found, trainer.averaged_variables(state))
    # Earlier versions of the package saved only the low-rank updates.
    updates = {"encoder": state.params["encoder"]}
    save(tmp_path / "old", recipe, dataclasses.replace(state, params=updates, ema={}))
    with pytest.raises(
        ValueError,
        match="old does not contain embedding, for which the run's init_rules drew new values",
    ):
        restore_run(tmp_path / "old")


def test_a_run_continues_and_is_used_with_its_base(source, tmp_path):
    directory, recipe = source
    rules = (InitRule("logits_kernel|decoder/final_norm/.*", "fresh"),)
    recipe = adapting(
        recipe, directory, LoRA(), keep_latest=9, steps=4, save_every=2, init_rules=rules
    )
    assert recipe.init_from == str(directory / "checkpoints" / "0")
    whole, parts, last = tmp_path / "whole", tmp_path / "parts", tmp_path / "last"
    end = train(whole, recipe)
    save_run(recipe, whole)
    train(parts, replace(recipe, training=replace(recipe.training, steps=2)))
    save_run(recipe, parts)
    check_same_run(recipe, parts)
    jax.tree.map(np.testing.assert_array_equal, train(parts, recipe).params, end.params)
    # A run that starts from a run with adapters starts from the merged parameters. If this run also
    # trains adapters, both low-rank updates are added.
    _, found = restore_run(whole)
    assert initializer_of(recipe, report=print) is Trainer.init
    second = find_base(load_experiment(whole).starting_from(str(whole)))
    jax.tree.map(np.testing.assert_array_equal, read_base(second, None), found)
    save(last, second)
    jax.tree.map(np.testing.assert_array_equal, restore_run(last)[1], found)
    average_checkpoints(whole, tmp_path / "mean", last=2)
    assert load_experiment(tmp_path / "mean").training.adapters is None
    means = [restore_run(whole, step=step)[1]["params"] for step in (2, 4)]
    mean = restore_variables(tmp_path / "mean" / "checkpoints")[1]["params"]
    jax.tree.map(
        lambda m, x, y: np.testing.assert_allclose(m, (x + y) / 2, atol=1e-6), mean, *means
    )


def test_a_missing_or_different_base_is_named(source, tmp_path):
    directory, recipe = source
    save(tmp_path / "run", adapting(recipe, directory))
    path = tmp_path / "run" / "experiment.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"init_from": str(tmp_path / "gone")}))
    with pytest.raises(
        ValueError,
        match=r"base of the adapters is .*gone, but this is not a checkpoint of a run\. Put",
    ):
        restore_run(tmp_path / "run")
    save(tmp_path / "other", replace(recipe, training=replace(recipe.training, seed=4)))
    path.write_text(json.dumps(saved | {"init_from": str(tmp_path / "other")}))
    with pytest.raises(
        ValueError, match="checkpoints/0 is not the base with which the adapters were"
    ):
        restore_run(tmp_path / "run")
    unnamed = replace(recipe, training=replace(recipe.training, adapters=EVERYTHING))
    for use in (lambda: initializer_of(unnamed, report=print), Trainer(unnamed).read_base):
        with pytest.raises(
            ValueError, match=r"adapters need a checkpoint .*, but init_from is not set"
        ):
            use()
    with pytest.raises(
        ValueError, match="init_optimizer continues with the optimizer of all parameters"
    ):
        initializer_of(adapting(recipe, directory, init_optimizer=True), report=print)
    with pytest.raises(
        ValueError, match=r"begin at zero.*Set training\.optimizer\.parameter_scale=false"
    ):
        adapting(recipe, directory, optimizer=Adafactor())


def test_a_run_that_continues_keeps_its_first_base(tmp_path):
    """A run with adapters that continues keeps the checkpoint of its base.

    Training the base further does not matter, unless the checkpoint of the base is deleted.
    """
    base, directory = tmp_path / "base", tmp_path / "run"
    recipe = experiment(encoder(), seed=3)
    state = Trainer(recipe, jax.devices()[:1]).init()
    save(base, recipe, dataclasses.replace(state, step=jnp.int32(2)))
    began = adapting(recipe, base)
    save(directory, began)
    save(base, recipe, dataclasses.replace(state, step=jnp.int32(4)))
    given = replace(
        began, training=replace(began.training, adapters=EVERYTHING), init_from=str(base)
    )
    assert find_base(given, directory) == began
    assert find_base(given).init_from == str(base / "checkpoints" / "4"), "a run that begins"
    shutil.rmtree(base / "checkpoints" / "2")
    with pytest.raises(
        ValueError,
        match=r"base of the adapters is .*base/checkpoints/2, but this is not a checkpoint",
    ):
        find_base(given, directory)


def test_targets_that_fit_nothing_are_named():
    recipe = experiment(layers=2)
    scan = scanned(recipe.model)
    misspelt = "encoder/layers_0/attention/valu/kernel"
    for model, targets, message in (
        (recipe.model, misspelt, "no kernel, did you mean 'encoder/layers_0/at"),
        (scan, "encoder/layers_0/.*", "matches layers of a scanned stack, but not 'encoder/l"),
    ):
        training = replace(recipe.training, adapters=LoRA(targets=targets))
        with pytest.raises(ValueError, match=message):
            Trainer(replace(recipe, model=model, training=training))
    rank_of_a_layer = (LoRARule("encoder/layers_0/.*", 2),)
    for model, lora, message in (
        (
            recipe.model,
            LoRA(embeddings="embeding"),
            "embeddings: 'embeding' matches no embedding, ",
        ),
        (recipe.model, LoRA(whole=".*/bias"), r"whole: '\.\*/bias' matches no parameter"),
        (
            recipe.model,
            LoRA(tokens=(3,), token_arrays="x"),
            "token_arrays: 'x' matches no embedding",
        ),
        (
            recipe.model,
            LoRA(tokens=(3, VOCAB)),
            f"contains {VOCAB}, but embedding has only the tok",
        ),
        (recipe.model, LoRA(targets=".*", tokens=(3,)), "logits_kernel would have both a low-rank"),
        (recipe.model, LoRA(rules=(LoRARule(".*/wi/.*"),)), "rules: .* matches no parameter"),
        (recipe.model, LoRA(targets=None), "trains nothing. Set targets, embeddings, tokens or"),
        (
            recipe.model,
            LoRA(whole=".*"),
            "targets: .* matches no kernel, because the model has none, or all of them are trained",
        ),
        (
            recipe.model,
            LoRA(targets=None, tokens=(3,), rules=rank_of_a_layer),
            "rules have no effect, because there are no low-rank updates",
        ),
        (scan, LoRA(rules=rank_of_a_layer), "encoder/layers_1/.* different ranks or scales, but"),
    ):
        training = replace(recipe.training, adapters=lora)
        with pytest.raises(ValueError, match=message):
            Trainer(replace(recipe, model=model, training=training))
    rules = (InitRule("encoder/layers_0/.*", "fresh"),)
    training = replace(recipe.training, adapters=LoRA())
    with pytest.raises(
        ValueError, match="init_rules match layers of a scanned stack, but not 'encoder/l"
    ):
        Trainer(replace(recipe, model=scan, training=training, init_rules=rules))
    with pytest.raises(
        ValueError, match=r"training\.adapters\.targets: '\(' is not a valid regular expression"
    ):
        LoRA(targets="(")
    with pytest.raises(ValueError, match=r"tokens contains 4 twice\. Give every token id once"):
        LoRA(tokens=(4, 5, 4))
