"""What collectives a training step needs, from shardings alone: the oracle of what compilers say."""

import math

import jax
import jax.numpy as jnp

from synthesizer_jax.costs.chips import Topology
from synthesizer_jax.models import stacks_of
from synthesizer_jax.training import plan
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.state import make_layout


def collective_bytes(experiment: Experiment, topology: Topology) -> dict[str, float]:
    """Bytes that one device's collectives make in a step, by what they are for.

    ``gathers``: every parameter that ``fsdp`` shares, for the forward and again for the backward pass;
    embedding and output projection once. ``gradients``: summed whole over ``fsdp``, shards over ``data``;
    an encoder-decoder's embedding has two. ``activations``: with ``tensor``, the rows' sums after every
    sub-layer and before it, over the encoder's output for keys and for values, and where embedding and
    output projection meet the vocabulary. Remat makes some of them again.
    """
    planned = plan.make_plan(experiment, topology)
    mesh = plan._abstract_mesh(experiment.mesh, topology)
    model, data, training = experiment.model, experiment.data, experiment.training
    _, layout = make_layout(model, training.optimizer, tokens=experiment.example, mesh=mesh)
    size = jnp.dtype(model.dtype).itemsize
    gathers = gradients = 0.0
    for path, x in jax.tree.leaves_with_path(layout.abstract.params):
        shared = mesh.shape["fsdp"] > 1 and "fsdp" in x.sharding.spec
        own = math.prod(x.sharding.shard_shape(x.shape)) * size
        whole = own * (mesh.shape["fsdp"] if shared else 1)
        name = path[0].key
        times = 2 if name == "embedding" and len(stacks_of(model)) > 1 else 1
        if shared:
            gathers += whole * (1 if name in ("embedding", "logits_kernel") else 2)
            gradients += whole * times
        if mesh.shape["data"] > 1:
            gradients += own * times
    found = {"gathers": gathers, "gradients": gradients, "activations": 0.0}
    if mesh.shape["tensor"] > 1:
        row = planned.rows * model.d_model * size
        sums = {"encoder": data.inputs_length * row, "decoder": data.targets_length * row}
        for name, stack in stacks_of(model).items():
            for run in stack.runs:
                layers, block = run.repeats, run.block
                parts = 1 + (block.feed_forward is not None) + (block.cross_mixer is not None)
                found["activations"] += layers * 2 * parts * sums[name]
                if block.cross_mixer is not None:
                    found["activations"] += layers * 2 * sums["encoder"]
            found["activations"] += sums[name]
        found["activations"] += sums["decoder"]
    return {name: value * training.micro_batches for name, value in found.items()}
