"""Pre-train by span corruption on C4, as in Tay et al. 2021 (table of perplexity and speed on C4).

The recipes can also train talking heads (Shazeer et al. 2020). This command trains a Random
Synthesizer:

    synthesizer-jax train papers.pretraining:c4:mesh_learned_random_base --workdir runs/r \\
        --data-dir DATA --set vocabulary.path=spiece.model

`c4` takes the name of a model of the zoo. The models of the table are ``mesh_learned_MODE_base``
(MODE is vanilla, random, dense, random_plus, dense_plus, …), ``lightweight_convolution_base``,
``dynamic_convolution_base`` and ``universal_transformer_base``. ``t5_1_1_th_base`` has talking
heads.

The recipe `small` takes the name of a system instead. On two CPU cores, the pre-training with
`small` takes an hour. The recipe `race` is for measurements of speed.
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
    vocabulary is small. Otherwise, the output projection would take a larger share of the time than
    in a base model.
    """
    experiment = pretrain.laptop()
    data = replace(experiment.data, inputs_length=512, targets_length=114, batch_size=8)
    model = laptop_model("v" if system in ("universal", "linformer") else system, 512)
    if system == "linformer":  # only an encoder can use a Linformer
        model = model.copy(encoder=laptop_model(system, 512).encoder)
    if system == "universal":
        # Repeat one block. The number of repetitions is at most twice the number of layers of the
        # other systems.
        steps = 2 * model.encoder.num_layers
        stacks = {
            name: UniversalStack((Run(stack.runs[0].block, steps),), halting_threshold=0.5)
            for name, stack in (("encoder", model.encoder), ("decoder", model.decoder))
        }
        model = model.copy(**stacks)
    return replace(experiment, model=model.copy(vocab_size=1024), data=data)
