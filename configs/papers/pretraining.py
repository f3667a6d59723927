"""Pre-train by span corruption on C4, as Tay et al. 2021 do to compare perplexity and speed.

The recipes can also train talking heads (Shazeer et al. 2020). This command trains a Random
Synthesizer:

    synthesizer-jax train papers.pretraining:c4:mesh_learned_random_base --workdir runs/r \\
        --data-dir DATA --set vocabulary.path=spiece.model

The argument of the recipe `c4` is the name of a model in the zoo. The models in the paper's table
are ``mesh_learned_MODE_base`` (MODE is vanilla, random, dense, random_plus, dense_plus, …),
``lightweight_convolution_base``, ``dynamic_convolution_base`` and ``universal_transformer_base``.
``t5_1_1_th_base`` has talking heads.

The argument of the recipe `small` is the name of a system. Pre-training with `small` takes an hour
on two CPU cores. The recipe `race` is for measuring speed.
"""

from __future__ import annotations

from synthesizer_jax.recipes import pretrain
from synthesizer_jax.recipes.papers import laptop_model

from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.registry import replace
from synthesizer_jax.models import ZOO, EncoderDecoder, Run, UniversalStack
from synthesizer_jax.training.experiment import Experiment


def default() -> Experiment:
    """Pre-trains the Random Synthesizer of Tay et al. 2021 on C4."""
    return c4("mesh_learned_random_base")


def c4(model: str) -> Experiment:
    """Pre-trains a model of the zoo on C4 for 524,288 steps, as T5 is pre-trained."""
    experiment = pretrain.t5_1_0_base()
    if model not in ZOO:
        hint = did_you_mean(model, ZOO) or "."
        raise ValueError(
            f"There is no model {model!r}{hint} 'synthesizer-jax models' lists all models."
        )
    chosen = ZOO[model]()
    assert isinstance(chosen, EncoderDecoder)
    return replace(experiment, model=chosen.copy(dtype="auto"))


def small(system: str) -> Experiment:
    """Pre-trains a model with 2 + 2 layers and d_model 256 by span corruption on WikiText-2."""
    experiment = pretrain.laptop()
    model = laptop_model(system, experiment.data.inputs_length)
    return replace(experiment, model=model)


def race(system: str) -> Experiment:
    """Trains a model with 2 + 2 layers and d_model 256 on long rows, to measure its speed.

    Rows have 512 + 114 tokens. The system ``universal`` is the Universal Transformer. The
    vocabulary is small. With a larger vocabulary, the output projection would take a larger share
    of the time than in a base model.
    """
    experiment = pretrain.laptop()
    data = replace(experiment.data, inputs_length=512, targets_length=114, batch_size=8)
    model = laptop_model("v" if system in ("universal", "linformer") else system, 512)
    if system == "linformer":  # Linformer works only in an encoder
        model = model.copy(encoder=laptop_model(system, 512).encoder)
    if system == "universal":
        # Repeat one block at most twice as often as the other systems have layers. Halting may end
        # the repetitions earlier.
        steps = 2 * model.encoder.num_layers
        stacks = {
            name: UniversalStack((Run(stack.runs[0].block, steps),), halting_threshold=0.5)
            for name, stack in (("encoder", model.encoder), ("decoder", model.decoder))
        }
        model = model.copy(**stacks)
    return replace(experiment, model=model.copy(vocab_size=1024), data=data)
