"""Which rows have an answer, and which answers are right, by each task's own rule."""

import json

import pytest

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation import evaluation_sets
from synthesizer_jax.tasks import task_registry, translation  # noqa: F401 - its tasks
from synthesizer_jax.tasks.definitions import GLUE, SENTINEL, SUPER_GLUE
from synthesizer_jax.tasks.formats import WNLI, WSC, PronounResolution, ReCoRD, Similarity
from synthesizer_jax.tasks.importers import import_benchmark
from synthesizer_jax.tasks.postprocessors import is_labeled


def row(targets: str, **rest) -> dict:
    return {"targets_pretokenized": targets.encode(), **rest}


RIGHT = {
    "a label word": ("glue_sst2_v002", row("positive"), ["positive"], ["negative", "Positive", ""]),
    "a pair": ("super_glue_rte_v102", row("entailment"), ["entailment"], ["not_entailment"]),
    "WSC, the candidate is meant": (
        "super_glue_wsc_v102_simple_eval",
        row("the big dog", label=1),
        ["the big dog", "dog", "Dog"],
        ["Ann", ""],
    ),
    "WSC, another is meant": (
        "super_glue_wsc_v102_simple_eval",
        row("the big dog", label=0),
        ["Ann", "the cat"],
        ["the big dog", "dog", ""],
    ),
    "WSC in training": ("super_glue_wsc_v102_simple_train", row("Ann", label=1), ["Ann"], ["Sue"]),
    "WNLI as coreference": (
        "glue_wnli_v002_simple_eval",
        row("Donna", label=0),
        ["Lily"],
        ["Donna", ""],
    ),
    "WNLI": ("glue_wnli_v002", row("not_entailment"), ["not_entailment"], ["entailment"]),
    "STS-B": (
        "glue_stsb_v002",
        row("2.4", label=2.5),
        ["2.4", "2.5", "2.45"],
        ["2.6", "2.2", "nan", "two", "1e308", "-1"],
    ),
    "ReCoRD": (
        "super_glue_record_v102",
        row("Al", answers=[b"The Al", b"Bob"], **{"idx/passage": 0, "idx/query": 1}),
        ["al", "Bob.", "the Bob"],
        ["Al Bob", ""],
    ),
    "MultiRC": (
        "super_glue_multirc_v102",
        row("True", **{"idx/paragraph": 0, "idx/question": 1}),
        ["True"],
        ["False", "true", ""],
    ),
    "DPR": ("dpr_v001_simple", row("Tom"), ["Tom"], ["tom", "Bob"]),
    "translation": ("multi30k_en_de", row("Ein Mann."), ["Ein Mann."], ["Ein Mann"]),
    "SQuAD": (
        "squad_v010_allanswers",
        row("the U . S .", answers=[b"the U . S .", b"America"], context=b"x"),
        ["u s", "america"],
        ["US", ""],
    ),
    "SQuAD, one answer": (
        "squad_v010",
        row("the U . S .", answers=[b"the U . S .", b"America"], context=b"x"),
        ["u s"],
        ["America"],
    ),
    "SQuAD by position": (
        "squad_v010_allanswers_span",
        row("start: 1 end: 1", answers=[b"won", b"Ann won"], context=b"Ann won ."),
        ["start: 1 end: 1", "start: 0 end: 1"],
        ["won", "start: 0 end: 0", ""],
    ),
    "TriviaQA": ("trivia_qa_v010", row("ann lee"), ["ann lee"], ["Ann Lee"]),
    "a class of text": ("ag_news_v100", row("Sci/Tech"), ["Sci/Tech"], ["sci/tech", "World"]),
    "a sentinel": (
        "super_glue_boolq_v102_1_sentinel",
        row("True"),
        ["<extra_id_0> True", "True"],
        ["<extra_id_0> False", "<extra_id_0>"],
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_an_answer_is_right_by_the_tasks_own_rule(case):
    name, example, right, wrong = RIGHT[case]
    task = task_registry.find_task(name)
    assert [answer for answer in (*right, *wrong) if task.is_right(answer, example)] == right


@pytest.mark.parametrize("task", [*GLUE, *SUPER_GLUE, *SENTINEL], ids=lambda task: task.name)
def test_rows_without_a_label_are_told_apart(task):
    groups = {f"idx/{n}": 0 for n in ("paragraph", "question", "passage", "query")}
    hidden = {
        Similarity: row("-1.0", label=-1.0),
        ReCoRD: row("<unk>", answers=[], **groups),
        WSC: row("Ann", label=-1),
        WNLI: row("Ann", label=-1),
        PronounResolution: None,  # every row has an answer
    }.get(type(task.format), row("<unk>", **groups))
    labeled = {
        Similarity: row("0.0", label=0.0),
        ReCoRD: row("Ann", answers=[b"Ann"], **groups),
        WSC: row("Ann", label=0),
        WNLI: row("Ann", label=0),
        PronounResolution: row("Ann"),
    }.get(type(task.format), row((task.labels or ("",))[0], **groups))
    assert is_labeled(labeled)
    assert isinstance(task.is_right("Ann", labeled), bool)
    if hidden is not None:
        assert not is_labeled(hidden)
        with pytest.raises(ValueError, match=f"{task.name}: no answer is right or wrong"):
            task.is_right("Ann", hidden)


def test_imported_test_splits_are_told_apart_too(tmp_path):
    source, data = tmp_path / "files", tmp_path / "data"
    wsc = {"span1_text": "Ann", "span1_index": 0, "span2_text": "she", "span2_index": 3}
    question = {"question": "Q", "idx": 0, "answers": [{"text": "A", "idx": 0}]}
    files = {
        "glue/SST-2/subset_test.tsv": "index\tsentence\n0\tfine\n",
        "glue/STS-B/subset_test.tsv": "index\tsentence1\tsentence2\n0\tA\tB\n",
        "glue/WNLI/subset_test.tsv": "index\tsentence1\tsentence2\n0\tAnn said she won\tAnn won\n",
        "super_glue/WSC/subset_test.jsonl": {"text": "Ann said that she won", "target": wsc},
        "super_glue/MultiRC/subset_test.jsonl": {"passage": {"text": "T", "questions": [question]}},
        "super_glue/ReCoRD/subset_test.jsonl": {
            "passage": {"text": "Ann", "entities": [{"start": 0, "end": 2}]},
            "qas": [{"query": "@placeholder", "idx": 0}],
        },
    }
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        line = content if isinstance(content, str) else json.dumps(content | {"idx": 0})
        (source / name).write_text(line + "\n")
    for benchmark in ("glue", "super_glue"):
        import_benchmark(benchmark, source, data)
    found = [t.name for t in (*GLUE, *SUPER_GLUE) if "test" in task_registry.prepared_splits(t.name, data)]
    assert len(found) == 7  # WNLI twice
    for name in found:
        lengths = {"inputs": 64, "targets": 16}
        rows = evaluation_sets.load_evaluation_set(
            name, "test", Bytes().build(), data_dir=data, lengths=lengths
        )
        assert [is_labeled(example) for example in rows.examples] == [False]
