"""A SavedModel in a process that has TensorFlow and no JAX."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.inference import decode, score_targets
from synthesizer_jax.serving.programs import Limits
from synthesizer_jax.serving.saved_model import write_saved_model
from tests.serving.test_programs import close, encoder_decoder, random_tokens, variables_of

WITHOUT_JAX = """
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("synthesizer_jax", "flax", "jax", "jaxlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(".")
results = []
for inputs, targets in json.load(sys.stdin):
    inputs, targets = np.array(inputs, np.int32), np.array(targets, np.int32)
    generated = model.generate(inputs)
    score = model.signatures["score"](inputs=tf.constant(inputs), targets=tf.constant(targets))
    first = model.start(inputs)
    tokens = tf.argmax(first["logits"], -1, output_type=tf.int32)
    second = model.decode_step(tokens, first["cache"])["logits"]
    results.append([generated["tokens"].numpy().tolist(), score["scores"].numpy().tolist(),
                    tokens.numpy().tolist(), tf.argmax(second, -1).numpy().tolist()])
print(json.dumps(results))
"""


@pytest.mark.slow
def test_tensorflow_alone_runs_it_at_every_batch_and_length(tmp_path):
    pytest.importorskip("tensorflow")
    model = encoder_decoder("rv")
    variables = variables_of(model)
    (tmp_path / "saved").mkdir()
    write_saved_model(tmp_path / "saved", model, variables, Bytes().build(), limits=Limits(12, 5))
    assert json.loads((tmp_path / "saved" / "assets.extra" / "model.json").read_text())["programs"]
    batches = [(random_tokens(b, n), random_tokens(b, t)) for b, n, t in ((1, 3, 2), (3, 12, 5))]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX],
        input=json.dumps([[x.tolist(), y.tolist()] for x, y in batches]),
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        cwd=tmp_path / "saved",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for (inputs, targets), result in zip(batches, json.loads(run.stdout), strict=True):
        tokens, scores, first, second = result
        expected = np.asarray(decode(variables, inputs, model=model, max_length=5).tokens)
        np.testing.assert_array_equal(tokens, expected)
        close(scores, score_targets(variables, inputs, targets=targets, model=model))
        np.testing.assert_array_equal(first, expected[:, 0])
        alive = expected[:, 0] != 1
        np.testing.assert_array_equal(np.array(second)[alive], expected[alive, 1])
