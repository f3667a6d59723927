"""The synthetic co-training mixture: eight generated tasks in T5's formats, no file, no network.

Importing it makes its tasks and its mixture known to `task_registry`.
"""

from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.synthetic.definitions import DEFINITIONS, MIXTURE, RATES
from synthesizer_jax.tasks.synthetic.rows import examples
from synthesizer_jax.tasks.synthetic.storage import VOCAB_SIZE, is_written, vocabulary, write

__all__ = [
    "DEFINITIONS",
    "MIXTURE",
    "RATES",
    "VOCAB_SIZE",
    "examples",
    "is_written",
    "vocabulary",
    "write",
]

task_registry.add(DEFINITIONS, {MIXTURE: RATES})
