"""The synthetic co-training mixture: eight generated tasks in T5's formats, no file, no network.

Importing it makes its tasks and its mixture known to `data.tasks`.
"""

from synthesizer_jax.data import tasks
from synthesizer_jax.data.synthetic.definitions import DEFINITIONS, MIXTURE, RATES
from synthesizer_jax.data.synthetic.rows import examples
from synthesizer_jax.data.synthetic.storage import VOCAB_SIZE, Prepared, prepare

__all__ = [
    "DEFINITIONS",
    "MIXTURE",
    "RATES",
    "VOCAB_SIZE",
    "Prepared",
    "examples",
    "prepare",
]

tasks.add(DEFINITIONS, {MIXTURE: RATES})
