"""The sections of a page about how static a model's attention is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from markupsafe import Markup

from synthesizer_jax.inspection.static_attention import (
    BIAS,
    TABLE,
    UNIFORM,
    Head,
    StaticAttention,
)
from synthesizer_jax.reports.attention_figures import number_grid, tiles
from synthesizer_jax.reports.figures import Section, line_chart

OVERFITTED = 0.05
"""Share of the divergence from equal weights by which a fitted table may be worse than another form."""

COSTS = (
    *("heads replaced", "loss, nats / token", "least static first"),
    *("parameters", "kFLOPs / token", "cache B / position"),
)


def static_sections(found: StaticAttention) -> list[Section]:
    """Returns what static forms miss, the loss with tables in the place of heads, and all heads."""
    points, names = found.points, _form_names(found.heads)
    replaced = [point.replaced for point in points]
    ends = (replaced[0], replaced[-1])
    loss_chart = line_chart(
        {
            "most static first": (replaced, [point.loss for point in points]),
            "least static first": (replaced, [point.reversed_loss for point in points]),
            f"tolerance {found.tolerance:.1%}": (ends, [found.highest_loss] * 2),
            "equal weights in all heads": (ends, [found.uniform_loss] * 2),
        },
        x_label="heads replaced",
        y_label="loss, nats per token (not from 0)",
        logarithmic=False,
    )
    costs = [
        (
            *(str(p.replaced), f"{p.loss:.4f}", f"{p.reversed_loss:.4f}"),
            *(f"{p.costs.parameters:,}", f"{p.costs.flops_per_token / 1000:,.0f}"),
            f"{p.costs.cache_bytes_per_token:,}",
        )
        for p in points
    ]
    heads = [
        (
            head.name,
            *(f"{head.divergences.get(name, math.nan):.3f}" for name in names),
            "can read a table" if i < found.replaceable.replaced else "must read tokens",
        )
        for i, head in enumerate(found.heads)
    ]
    return [
        Section(
            "What static forms miss",
            f"{' '.join(sentences_about(found))} Each form, which reads no tokens, was fitted to each head "
            f"on {found.fitted} training examples, beside the position bias of the model, and measured on "
            f"{found.held_out} held-out examples. The numbers are mean Kullback–Leibler divergences of a "
            "query’s weights from the form, in nats: 0 is a head that reads no tokens. First the encoder, "
            "then the decoder.",
            charts=tiles(_form_charts(found.heads)),
        ),
        Section(
            "Heads replaced by their tables",
            "The loss of the whole model, without further training, when heads read their fitted tables "
            "in the place of their own logits. Another line replaces the least static heads first. Costs "
            "are those of a model with tables for the inputs and targets of the run.",
            charts=[loss_chart],
            headings=COSTS,
            rows=costs,
        ),
        Section(
            "All heads and static forms",
            "The divergences of each head, the most static first. Heads are named by stack, layer and "
            "head, counted from 1.",
            headings=("head", *names, "within the tolerance"),
            rows=heads,
            folded=True,
        ),
    ]


def _form_names(heads: Sequence[Head]) -> list[str]:
    return list(dict.fromkeys(name for head in heads for name in head.divergences))


def sentences_about(found: StaticAttention) -> list[str]:
    """Returns how many heads can be replaced and what that saves, and what speaks against conclusions."""
    first, best, total = found.points[0], found.replaceable, len(found.heads)
    tolerance = f"{100 * found.tolerance:g}%"
    names = {
        "parameters": "parameters",
        "flops_per_token": "FLOPs per token",
        "cache_bytes_per_token": "decoding cache",
    }
    saved = ", ".join(
        f"{1.0 - getattr(best.costs, field) / getattr(first.costs, field):.1%} of the {name}"
        for field, name in names.items()
    )
    said = [
        f"Of {total} heads, the {best.replaced} most static can read a fitted table instead of the tokens, "
        f"and the loss changes by {best.loss / first.loss - 1.0:+.1%} without further training "
        f"({first.loss:.4f} to {best.loss:.4f} nats per token, tolerance {tolerance}). "
        f"That saves {saved}."
    ]
    if not best.replaced:
        said = [
            f"None of {total} heads can read a fitted table instead of the tokens unless the loss may rise "
            f"by more than {tolerance}."
        ]
    if found.uniform_loss <= found.highest_loss:
        said.append(
            f"With equal weights in all heads the loss is {found.uniform_loss:.4f} nats per token, within "
            "the tolerance too: this model does not use its attention; train it longer before you conclude "
            "anything."
        )
    # A table can be any other form, so one that is much worse on held-out examples is overfitted.
    worse = 0
    for head in found.heads:
        others = [kl for name, kl in head.divergences.items() if name not in (TABLE, BIAS)]
        highest = min(others) + OVERFITTED * head.divergences[UNIFORM]
        worse += highest < head.divergences[TABLE]
    if worse:
        said.append(
            f"Equal weights or another form describe {worse} of {total} heads better than the table: "
            f"{found.fitted:,} examples are too few to fit it; give more with --examples."
        )
    return said


def _form_charts(heads: Sequence[Head]) -> Iterator[Markup]:
    """Yields what forms miss, in nats, a figure for each stack, with layers down and heads across."""
    for stack in ("encoder", "decoder"):
        own = [head for head in heads if head.stack == stack]
        panels = {}
        for name in _form_names(own):
            shape = 1 + max(head.layer for head in own), 1 + max(head.head for head in own)
            panels[name] = np.full(shape, np.nan)
            for head in own:
                panels[name][head.layer, head.head] = head.divergences[name]
        for name, values in panels.items():
            title = f"{stack}: {name}, nats"
            yield number_grid(title, values, x_label="head", y_label="layer", percent=False)
