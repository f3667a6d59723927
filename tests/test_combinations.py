"""Tests that random combinations have valid settings, and depend only on their number."""

import re
import sys

from synthesizer_jax.cli.recipes import load_with_code
from synthesizer_jax.training.experiment import Experiment
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import combinations_drawing as drawing

REFUSED = r"data\.pack|optax\.|parameter_scale|data\.buckets|evaluation\.method|targets_length"
"""Settings that an experiment refuses when it is made. Others are refused when a step is traced."""


def test_the_settings_that_are_drawn_exist():
    refusals = []
    made = 0
    for number in range(25):
        drawn = drawing.draw_combination(5, number)
        assert drawn == drawing.draw_combination(5, number)
        recipe = f"{drawing.RECIPE}:default:{drawn.recipe}"
        try:
            load_with_code(recipe, [*drawn.settings, *drawn.twin_settings], kinds=(Experiment,))
            made += 1
        except ValueError as error:
            refusals.append(str(error))
    assert made > 12
    assert not [text for text in refusals if not re.search(REFUSED, text)]
