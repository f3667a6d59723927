"""The embedded co-training mixture: eight generated tasks in T5's formats, no file, no network.

Importing it makes its tasks and its mixture known to `data.tasks`.
"""

from synthesizer_jax.data import tasks
from synthesizer_jax.data.embedded.baselines import bag_of_words, majority
from synthesizer_jax.data.embedded.definitions import DEFINITIONS, MIXTURE, RATES
from synthesizer_jax.data.embedded.rows import examples
from synthesizer_jax.data.embedded.storage import VOCAB_SIZE, Prepared, prepare

__all__ = [
    "DEFINITIONS",
    "MIXTURE",
    "RATES",
    "VOCAB_SIZE",
    "Prepared",
    "bag_of_words",
    "examples",
    "majority",
    "prepare",
]

tasks.add(DEFINITIONS, {MIXTURE: RATES})
