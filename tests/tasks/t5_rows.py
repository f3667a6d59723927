"""Made rows in the schema of TFDS, for the comparison with T5."""

import pathlib

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

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
        {"text": WSC, "span1_index": 0, "span1_text": "Ann", "span2_index": 4, "span2_text": "she",
         "label": label, "idx": i}
        for i, label in enumerate((0, 1, 1, 0, -1))
    ],
    "glue/wnli": [
        {"sentence1": "The fish ate the worm. It was tasty.", "sentence2": "The worm was tasty.",
         "label": 1, "idx": 0},
        {"sentence1": "Ann gave Sue her book, then they left.", "sentence2": "Ann gave Sue Sue's book",
         "label": 0, "idx": 1},
        {"sentence1": "He met Mr. Smith's son. He waved.", "sentence2": "Mr. Smith's son waved.",
         "label": -1, "idx": 2},
    ],
    "definite_pronoun_resolution": [
        {"sentence": "The bee landed on the flower because it had pollen, so it left it.",
         "pronoun": "it", "candidates": ["The bee", "The flower"], "label": label}
        for label in (0, 1)
    ],
    "super_glue/multirc": [
        {"paragraph": "<b>Sent 1: </b>A.<br>B.", "question": f"Q{q}?", "answer": TEXTS[a],
         "label": (q + a) % 2, "idx": {"paragraph": q // 2, "question": q, "answer": a}}
        for q in range(4) for a in range(3)
    ],
    "super_glue/record": [
        {"passage": PASSAGE, "query": f"Who is @placeholder {q}?", "entities": ["A", "The B"],
         "answers": ["A", "The B"][:q], "idx": {"passage": q, "query": q + 7}}
        for q in range(3)
    ],
    "squad/v1.1": [
        {"id": str(i), "title": "T", "context": CONTEXT, "question": f"Who {TEXTS[i]}?",
         "answers": {"text": answers, "answer_start": [0] * len(answers)}}
        for i, answers in enumerate((
            ["Ann Lee", "Lee"], ["U.S. Open"], ["$5,000"], ["1912"], ["prize was $5,000."],
        ))
    ],
    "trivia_qa/rc": [
        {"question": "Who won?", "question_id": "1", "question_source": "x",
         "answer": {"aliases": ["Ann"], "normalized_aliases": ["ann lee", "lee", "nobody", "u s"],
                    "matched_wiki_entity_name": "", "normalized_matched_wiki_entity_name": "",
                    "normalized_value": "", "type": "", "value": ""},
         "entity_pages": {"doc_source": ["a"], "filename": ["b"], "title": ["c"],
                          "wiki_context": [CONTEXT]},
         "search_results": {"description": ["d", "d"], "filename": ["f", "f"], "rank": [0, 1],
                            "search_context": [LONG, (CONTEXT + " ") * 9],
                            "title": ["t", "t"], "url": ["u", "u"]}},
    ],
}  # fmt: skip


def made(dataset: str, data_dir: pathlib.Path) -> tf.data.Dataset:
    """Rows in the schema of a data set of TFDS, without its data."""
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
