"""Compares tasks, metrics and mixtures with T5's own code (t5 0.9.4), if it is installed.

T5's preprocessors and ours get the same rows. The rows are generated in the schema of TFDS. If the
machine has the original files, real rows are compared, too. Known differences are explained where
they are tested.
"""

import importlib
import itertools
import json
import math
import pathlib
import shutil
import sys
import types

import numpy as np
import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from synthesizer_jax.data.vocabularies import SentencePiece, train_sentencepiece
from synthesizer_jax.preparation.importers.corpora import import_archive
from synthesizer_jax.preparation.rows import encode, to_batches
from synthesizer_jax.tasks import metrics, task_registry
from synthesizer_jax.tasks.mixtures import MIXTURES, ExamplesRate
from synthesizer_jax.tasks.postprocessors import is_labeled, to_text
from synthesizer_jax.tasks.preprocessors import takes_batches
from synthesizer_jax.tasks.seqio_tasks import seqio_vocabulary

T5_NAMES = json.loads(pathlib.Path(__file__).with_name("t5_names.json").read_text())
"""The tasks and mixtures that T5 0.9.4 registers in SeqIO, but that this package does not have."""
TEXTS = (
    "Ann's dog isn't here . It barks, though!",
    "Straße – “quoted” text; it costs 3 €.",
    "U.S. troops left (again) .  Two  spaces",
    "the cat sat on the mat . a dog ran . ",
    "x",
)
WSC = "Ann told Sue that she won the race ."
PASSAGE = 'One.\n@highlight\nTwo "x"\n@highlight\nThree\n@highlight\nFour'
CONTEXT = "In 1912, Ann Lee (a Briton) won the U.S. Open; Ann Lee's prize was $5,000."

LONG = "words that fill\na line , " * 20 + "here lee won , " + "and more words " * 20

SPECIAL = {
    "super_glue/wsc.fixed": [
        {
            "text": WSC,
            "span1_index": 0,
            "span1_text": "Ann",
            "span2_index": 4,
            "span2_text": "she",
            "label": label,
            "idx": i,
        }
        for i, label in enumerate((0, 1, 1, 0, -1))
    ],
    "glue/wnli": [
        {
            "sentence1": "The fish ate the worm. It was tasty.",
            "sentence2": "The worm was tasty.",
            "label": 1,
            "idx": 0,
        },
        {
            "sentence1": "Ann gave Sue her book, then they left.",
            "sentence2": "Ann gave Sue Sue's book",
            "label": 0,
            "idx": 1,
        },
        {
            "sentence1": "He met Mr. Smith's son. He waved.",
            "sentence2": "Mr. Smith's son waved.",
            "label": -1,
            "idx": 2,
        },
    ],
    "definite_pronoun_resolution": [
        {
            "sentence": "The bee landed on the flower because it had pollen, so it left it.",
            "pronoun": "it",
            "candidates": ["The bee", "The flower"],
            "label": label,
        }
        for label in (0, 1)
    ],
    "super_glue/multirc": [
        {
            "paragraph": "<b>Sent 1: </b>A.<br>B.",
            "question": f"Q{q}?",
            "answer": TEXTS[a],
            "label": (q + a) % 2,
            "idx": {"paragraph": q // 2, "question": q, "answer": a},
        }
        for q in range(4)
        for a in range(3)
    ],
    "super_glue/record": [
        {
            "passage": PASSAGE,
            "query": f"Who is @placeholder {q}?",
            "entities": ["A", "The B"],
            "answers": ["A", "The B"][:q],
            "idx": {"passage": q, "query": q + 7},
        }
        for q in range(3)
    ],
    "squad/v1.1": [
        {
            "id": str(i),
            "title": "T",
            "context": CONTEXT,
            "question": f"Who {TEXTS[i]}?",
            "answers": {"text": answers, "answer_start": [0] * len(answers)},
        }
        for i, answers in enumerate(
            (
                ["Ann Lee", "Lee"],
                ["U.S. Open"],
                ["$5,000"],
                ["1912"],
                ["prize was $5,000."],
            )
        )
    ],
}


def made(dataset: str, data_dir: pathlib.Path) -> tf.data.Dataset:
    """Generates rows in the schema of a TFDS data set, whose data is not needed."""
    features = tfds.builder(dataset, data_dir=data_dir).info.features
    rows = SPECIAL.get(dataset) or [
        {name: _value(feature, i + j) for j, (name, feature) in enumerate(features.items())}
        for i in range(12)
    ]
    signature = features.get_tensor_spec()
    return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=signature)


def _value(feature: tfds.features.FeatureConnector, i: int) -> str | int | float:
    if isinstance(feature, tfds.features.ClassLabel):
        return i % (feature.num_classes + 1) - 1
    if feature.np_dtype == np.float32:
        return (i * 7) % 26 / 5 + 0.1 * (i % 2)
    return i if np.issubdtype(feature.np_dtype, np.integer) else TEXTS[i % len(TEXTS)]


KNOWN = [name for name in T5_NAMES["tasks"] if name in task_registry.TASKS]
OURS = [name for name in KNOWN if task_registry.TASKS[name].objective is None]
WHOLE = (
    *("glue_mrpc_v002", "wmt16_enro_v003"),
    *("super_glue_boolq_v102_1_sentinel", "super_glue_record_v102_1_sentinel"),
)
"""Tasks whose tokens are compared, not only their texts.

There is one for each kind of steps after tokenization.
"""

LENGTHS = {"inputs": 48, "targets": 12}
SIDES = ("inputs", "targets")

METRICS_UNLIKE_T5 = {
    **{
        f"super_glue_{name}_v102{sentinel}": "T5 computes none"
        for name in ("axb", "axg")
        for sentinel in ("", "_1_sentinel")
    },
    "cnn_dailymail_v002": "T5 takes the median of random resamples; see the test of ROUGE",
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "small.model"
    train_sentencepiece([*TEXTS, CONTEXT] * 20, path, vocab_size=60)
    return SentencePiece(str(path), extra_ids=100).build()


@pytest.fixture(scope="module")
def t5(vocabulary):
    """T5's tasks and mixtures by name, and T5's modules.

    SeqIO's registries are restored afterwards.
    """
    reason = "t5 is not installed; `make install` installs it"
    pytest.importorskip("t5", reason=reason, exc_type=ImportError)
    utils = importlib.import_module("t5.data.utils")
    utils.DEFAULT_SPM_PATH, utils.DEFAULT_EXTRA_IDS = vocabulary.path, vocabulary.extra_ids
    registries = (seqio.TaskRegistry, seqio.MixtureRegistry)
    kept = [dict(registry._REGISTRY) for registry in registries]
    try:
        for registry in registries:
            registry.reset()
        for name in ("t5.data.tasks", "t5.data.mixtures"):  # other registries were used before
            sys.modules.pop(name, None)
        importlib.import_module("t5.data.mixtures")
        found = [dict(registry._REGISTRY) for registry in registries]
    finally:
        for registry, content in zip(registries, kept, strict=True):
            registry._REGISTRY = content
    evaluation = importlib.import_module("t5.evaluation.metrics")
    return types.SimpleNamespace(tasks=found[0], mixtures=found[1], metrics=evaluation)


def rows_of_t5(task, dataset, vocabulary, *, whole):
    """Returns the rows that T5's code makes from raw rows, as strings or tokenized."""
    steps = task.preprocessors
    if not whole:
        for step in itertools.takewhile(lambda s: s is not seqio.preprocessors.tokenize, steps):
            dataset = step(dataset)
        rows = dataset.as_numpy_iterator()
        return [{f"{s}_pretokenized": row.pop(s) for s in SIDES} | row for row in rows]
    feature = seqio.Feature(seqio_vocabulary(vocabulary), add_eos=True)
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: dataset, ["train"])
    features = dict.fromkeys(SIDES, feature)
    task = seqio.Task("compared", source=source, preprocessors=steps, output_features=features)
    rows = task.get_dataset(LENGTHS, "train", shuffle=False, seed=3)
    return list(rows.as_numpy_iterator())


def our_rows(task, dataset, vocabulary):
    """Returns the rows that our preparation makes from raw rows, truncated as in training."""
    if takes_batches(task.preprocess):
        batches = task.preprocess(dataset.batch(5))
    else:
        batches = task.preprocess(dataset).ragged_batch(5)
    kept = dict.fromkeys(SIDES, 1 + task.sentinel)
    return [
        dict(zip(SIDES, tokens.truncate(LENGTHS, keep_last=kept)[i], strict=True)) | row
        for tokens, rows in to_batches(encode(batches, task, vocabulary))
        for i, row in enumerate(rows)
    ]


def plain(value):
    """Returns a postprocessed value without its group, which T5 represents differently."""
    if isinstance(value, dict) and "context" not in value:
        return plain(value.get("value", value.get("answers")))
    return value.item() if isinstance(value, np.generic) else value


def check(t5, name, dataset, vocabulary):
    """Compares our rows, postprocessed answers and postprocessed targets with T5's."""
    # T5 would treat a hidden label as true. Training rows have no hidden labels.
    if name.endswith("_train"):
        dataset = dataset.filter(lambda row: row["label"] >= 0)
    task = task_registry.find_task(name)
    t5_task = t5.tasks[name]
    theirs = rows_of_t5(t5_task, dataset, vocabulary, whole=name in WHOLE)
    ours = our_rows(task, dataset, vocabulary)
    assert len(theirs) == len(ours) > 0
    for row, expected in zip(ours, theirs, strict=True):
        for feature in expected.keys() & {*SIDES, *(f"{side}_pretokenized" for side in SIDES)}:
            np.testing.assert_array_equal(row[feature], expected[feature], feature)
    # T5 does not postprocess answers of tasks without metrics.
    if name.endswith("_train"):
        return
    words = [to_text(row["targets_pretokenized"]) for row in ours]
    for word, row, t5_row in zip(words, ours, theirs, strict=True):
        others = ("", "no label", word.upper(), f"{word} ", f"<extra_id_0> {word}", "7.5")
        for answer in (word, *others):
            expected = t5_task.postprocess_fn(answer, example=t5_row, is_target=False)
            assert plain(task.postprocess(answer, example=row)) == plain(expected), answer
        expected = t5_task.postprocess_fn(word, example=t5_row, is_target=True)
        assert plain(task.postprocess(word, example=row, is_target=True)) == plain(expected)
    if task.name not in METRICS_UNLIKE_T5:
        check_metrics(t5_task, task, theirs, ours)


def check_metrics(t5_task, task, theirs, ours):
    """Compares our metrics with T5's metrics.

    A third of the answers is right, and some answers are not labels.
    """
    labeled = [i for i, row in enumerate(ours) if is_labeled(row)]
    words = [to_text(ours[i]["targets_pretokenized"]) for i in labeled]
    shifted = words[1:] + words[:1]
    answers = [
        (right, wrong, f"{wrong} and more", "no label")[i % 4]
        for i, (right, wrong) in enumerate(zip(words, shifted, strict=True))
    ]
    values = []
    for postprocess, rows in ((t5_task.postprocess_fn, theirs), (task.postprocess, ours)):
        found = [
            (
                postprocess(word, example=rows[i], is_target=True),
                postprocess(answer, example=rows[i], is_target=False),
            )
            for i, word, answer in zip(labeled, words, answers, strict=True)
        ]
        values.append(tuple(map(list, zip(*found, strict=True))) if found else ([], []))
    assert len(task.metrics) == len(t5_task.metric_fns)
    for expected, metric in zip(t5_task.metric_fns, task.metrics, strict=True):
        assert metric(*values[1]) == pytest.approx(expected(*values[0]), rel=1e-9), metric


def test_the_table_of_names_is_t5s(t5):
    assert set(t5.tasks) == set(T5_NAMES["tasks"])
    assert set(t5.mixtures) == set(T5_NAMES["mixtures"])
    ours = {*task_registry.TASKS, *MIXTURES}
    missing = [
        name for kind in ("tasks", "mixtures") for name in T5_NAMES[kind] if name not in ours
    ]
    assert missing == T5_NAMES["missing"]


@pytest.mark.parametrize("dataset", sorted({task_registry.TASKS[name].dataset for name in OURS}))
def test_made_rows_become_what_t5_makes_of_them(t5, dataset, vocabulary, tmp_path):
    rows = made(dataset, tmp_path)
    for name in OURS:
        is_one = task_registry.TASKS[name].dataset == dataset
        if is_one and ("sentinel" not in name or name in WHOLE):
            check(t5, name, rows, vocabulary)


def test_real_rows_become_what_t5_makes_of_them(t5, vocabulary, real_data, tmp_path):
    """Real rows are converted in the same way as by T5.

    The test uses all rows of WSC, WNLI and MRPC, and some rows of MultiRC.
    """
    for folder in ("glue/WNLI", "glue/MRPC", "super_glue/WSC", "super_glue/MultiRC"):
        shutil.copytree(real_data / folder, tmp_path / folder)
    for benchmark, splits in (("glue", 6), ("super_glue", 6)):
        reports = import_archive(benchmark, tmp_path, tmp_path)
        assert (
            sum(report.rows > 0 and report.rows == report.published for report in reports) == splits
        )
    for dataset, names, count in (
        ("glue/wnli", ["glue_wnli_v002_simple_eval"], 852),
        ("super_glue/wsc.fixed", [n for n in OURS if "wsc" in n and "sentinel" not in n], 804),
        ("super_glue/multirc", ["super_glue_multirc_v102"], 60),
        ("glue/mrpc", ["glue_mrpc_v002"], 60),
    ):
        builder = tfds.builder(dataset, data_dir=tmp_path)
        first, *others = (builder.as_dataset(split) for split in sorted(builder.info.splits)[::-1])
        for other in others:
            first = first.concatenate(other)
        for name in names:
            check(t5, name, first.take(count), vocabulary)


# Metrics.
# -------------------------------------------------------------------------------------------

TARGETS = ["The U.S. won . It was close .", "a “quoted” word", "ann lee's prize", "", "x y z"]
PREDICTIONS = ["the US won . It was not .", "a quoted word", "Lee’s prize", "x", "x y"]


def test_rouge_is_the_mean_of_t5s_over_examples(t5):
    apart = [t5.metrics.rouge([t], [p]) for t, p in zip(TARGETS, PREDICTIONS, strict=True)]
    expected = {kind: np.mean([scores[kind] for scores in apart]) for kind in apart[0]}
    assert metrics.rouge(TARGETS, PREDICTIONS) == pytest.approx(expected)


def test_other_metrics_are_t5s(t5):
    answers = [[target, other] for target, other in zip(TARGETS, TARGETS[::-1], strict=True)]
    expected = t5.metrics.squad(answers, PREDICTIONS)
    assert metrics.squad(answers, PREDICTIONS) == pytest.approx(expected)
    expected = t5.metrics.bleu(TARGETS, PREDICTIONS)
    assert metrics.bleu(TARGETS, PREDICTIONS) == pytest.approx(expected)
    expected = t5.metrics.bleu(TARGETS, PREDICTIONS, tokenizer="13a")["bleu"]
    assert metrics.bleu_13a(TARGETS, PREDICTIONS) == {"bleu_13a": pytest.approx(expected)}
    task = "glue_stsb_v002"  # T5 differs for nonfinite numbers
    assert math.isnan(t5.tasks[task].postprocess_fn("nan", example={}, is_target=False))
    assert task_registry.find_task(task).postprocess("nan", example={}) == -1


# Mixtures.
# ------------------------------------------------------------------------------------------


def counted(count):
    """Returns an object with the attributes of a task that SeqIO's rate functions read."""
    return types.SimpleNamespace(name="x", cache_dir=None, num_input_examples=lambda split: count)


def test_rates_are_t5s(t5):
    for name in sorted({*T5_NAMES["mixtures"]} & {*MIXTURES}):
        expected = t5.mixtures[name]._task_to_rate
        assert set(MIXTURES[name]) == set(expected)
        for task, rate in MIXTURES[name].items():
            for count in (100, 1_000_000):
                theirs = expected[task]
                theirs = theirs(counted(count)) if callable(theirs) else theirs
                assert (rate(count) if isinstance(rate, ExamplesRate) else rate) == theirs, task
