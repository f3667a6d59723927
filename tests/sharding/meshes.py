"""Lowers attention and its gradients for TPU and GPU meshes that do not divide its sizes.

`EVERY` contains all combinations of settings, which `make test-tpu` and `make test-gpu` lower.
`PAIRWISE` is a selection for the normal test suite. In this selection, every pair of values of two
settings occurs in at least one combination.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import synthesizer_jax as sj

LENGTH, WIDTH = 256, 32

LAYERS = {
    "Attention": lambda heads: sj.Attention(heads, WIDTH, sj.DotProduct()),
    "Random": lambda heads: sj.Attention(heads, WIDTH, sj.Random(LENGTH)),
    "MultiHeadAttention": lambda heads: sj.MultiHeadAttention(heads),
    "attention_fn": lambda heads: nn.MultiHeadAttention(heads, attention_fn=sj.attention_fn),
}

RULES = {
    "batch and heads": (("batch", "data"), ("heads", "tensor")),
    "batch": (("batch", "data"),),
    "none": (),
}


CHIPS = {"tpu": None, "cuda": AbstractDevice("NVIDIA H100", None, "gpu")}
"""The devices of the meshes. From jax 0.12 on, Pallas asks for the kind of GPU."""


class Case(NamedTuple):
    """A call of a layer on a mesh with the axes ``data`` and ``tensor``, of two devices each.

    Attributes:
      layer: one of `LAYERS`.
      kind: the type of the mesh axes.
      is_set: whether `jax.set_mesh` sets the mesh. The shardings of the arguments contain the mesh
        in any case.
      rules: logical axis rules, one of `RULES`.
      extra: whether the mesh has a third axis, which no rule names.
      batch: the number of examples. Two devices can shard 4 examples evenly, but not 3.
      heads: the number of heads, likewise.
    """

    layer: str
    kind: AxisType
    is_set: bool
    rules: str
    extra: bool
    batch: int
    heads: int

    def __str__(self) -> str:
        mesh = self.kind.name
        if not self.is_set:
            mesh += ", not set"
        if self.extra:
            mesh += ", extra axis"
        return (
            f"{self.layer}; {mesh}; rules: {self.rules}; {self.batch} examples, {self.heads} heads"
        )

    @property
    def is_unknown(self) -> bool:
        """Whether the layer has no way to know the mesh."""
        return self.kind == AxisType.Auto and not self.is_set

    def lower(self, platform: str) -> str:
        """Returns the program of the gradients, lowered for a platform."""
        axes = ("data", "tensor", "expert") if self.extra else ("data", "tensor")
        chip = CHIPS[platform]
        mesh = AbstractMesh((2,) * len(axes), axes, (self.kind,) * len(axes), abstract_device=chip)
        no_mesh = AbstractMesh((), (), abstract_device=chip)
        layer = LAYERS[self.layer](self.heads)
        features = WIDTH * self.heads
        x = jax.ShapeDtypeStruct((self.batch, LENGTH, features), jnp.float32)
        variables = jax.eval_shape(layer.init, jax.random.key(0), x)

        def place(tree, spec):
            sharding = NamedSharding(mesh, spec)
            return jax.tree.map(
                lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree
            )

        def loss(variables, x):
            # Use different lengths, because only then the static route has a kernel on GPUs.
            mask = sj.Mask(key_lengths=jnp.arange(self.batch) + 2)
            return jnp.sum(layer.apply(variables, x, mask=mask) ** 2)

        examples = P("data") if self.batch % 2 == 0 else P()
        current = jax.sharding.use_abstract_mesh(mesh if self.is_set else no_mesh)
        with current, nn.logical_axis_rules(RULES[self.rules]):
            traced = jax.jit(jax.grad(loss, (0, 1))).trace(
                place(variables, P()), place(x, examples)
            )
            return traced.lower(lowering_platforms=(platform,)).as_text()


def check_lowers(case: Case, platform: str) -> None:
    """Checks that a case runs the kernels of the platform, or raises a helpful error."""
    if case.is_unknown and platform == "tpu":
        with pytest.raises(
            ValueError, match=r"no mesh is set.*Call the function under jax.set_mesh\(mesh\)"
        ):
            case.lower(platform)
        return
    call = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}[platform]
    assert call in case.lower(platform)


SETTINGS = {
    "layer": tuple(LAYERS),
    "kind": (AxisType.Auto, AxisType.Explicit),
    "is_set": (True, False),
    "rules": tuple(RULES),
    "extra": (True, False),
    "batch": (4, 3),
    "heads": (4, 3),
}

EVERY = [Case(*values) for values in itertools.product(*SETTINGS.values())]


def _select_pairwise() -> list[Case]:
    """Selects cases greedily: each case covers the most pairs of values that are still missing."""

    def pairs(case: Case) -> set[tuple]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, EVERY))
    selected = []
    while missing:
        best = max(EVERY, key=lambda case: len(pairs(case) & missing))
        selected.append(best)
        missing -= pairs(best)
    return selected


PAIRWISE = _select_pairwise()
