"""Span corruption on C4: Tay et al. 2021, table of C4 (perplexity and speed); Shazeer et al. 2020.

    synthesizer-jax train papers.pretraining:c4:mesh_learned_random_base --workdir runs/r --data-dir DATA \\
        --set vocabulary.path=spiece.model

The model is one of the zoo's; those of the table are ``mesh_learned_MODE_base`` (vanilla, random, dense,
random_plus, dense_plus, …), ``lightweight_convolution_base``, ``dynamic_convolution_base``,
``universal_transformer_base``, and ``t5_1_1_th_base`` for talking heads. `small` takes a system instead,
and is pre-trained in an hour on two CPU cores. `race` is for measurements of speed.
"""

from __future__ import annotations

from synthesizer_jax.recipes import pretrain
from synthesizer_jax.recipes.papers import laptop_model

from synthesizer_jax.base.registry import replace
from synthesizer_jax.models import ZOO, EncoderDecoder, Run, UniversalStack
from synthesizer_jax.training.experiment import Experiment


def default() -> Experiment:
    """The paper's Random."""
    return c4("mesh_learned_random_base")


def c4(model: str) -> Experiment:
    """C4 as T5 is pre-trained, 524,288 steps."""
    experiment = pretrain.t5_1_0_base()
    if model not in ZOO:
        raise ValueError(f"there is no model {model!r}; 'synthesizer-jax models' lists all")
    chosen = ZOO[model]()
    assert isinstance(chosen, EncoderDecoder)
    return replace(experiment, model=chosen.copy(dtype="auto"))


def small(system: str) -> Experiment:
    """WikiText-2 by span corruption, 2 + 2 layers of d 256."""
    experiment = pretrain.laptop()
    model = laptop_model(system, experiment.data.inputs_length)
    return replace(experiment, model=model)


def race(system: str) -> Experiment:
    """Rows of 512 + 114 tokens, 2 + 2 layers of d 256; ``universal`` is the Universal Transformer.

    The vocabulary is small, so that the output projection has no larger share than in a base model.
    """
    experiment = pretrain.laptop()
    data = replace(experiment.data, inputs_length=512, targets_length=114, batch_size=8)
    model = laptop_model("v" if system in ("universal", "linformer") else system, 512)
    if system == "linformer":  # for encoders
        model = model.copy(encoder=laptop_model(system, 512).encoder)
    if system == "universal":
        steps = 2 * model.encoder.num_layers
        stacks = {
            name: UniversalStack((Run(stack.runs[0].block, steps),), halting_threshold=0.5)
            for name, stack in (("encoder", model.encoder), ("decoder", model.decoder))
        }
        model = model.copy(**stacks)
    return replace(experiment, model=model.copy(vocab_size=1024), data=data)
