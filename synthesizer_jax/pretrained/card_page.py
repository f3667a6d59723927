"""Writes the text of a model card in Markdown: what the model is, how to use it, and its scores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import jax

from synthesizer_jax.base.registry import JSON, replace, to_json
from synthesizer_jax.evaluation.config import RANK
from synthesizer_jax.models import Encoder, EncoderDecoder, LoRA, unroll
from synthesizer_jax.pretrained.card_facts import OURS, PEFT, Facts
from synthesizer_jax.pretrained.huggingface.card import HUB
from synthesizer_jax.pretrained.huggingface.config import T5GEMMA, T5GEMMA2
from synthesizer_jax.pretrained.huggingface.export import kind_of
from synthesizer_jax.tasks import hub_names, task_registry
from synthesizer_jax.version import __version__

_KINDS = {
    "t5": "a T5",
    "mt5": "an mT5",
    "umt5": "a umT5",
    T5GEMMA: "a T5Gemma",
    T5GEMMA2: "a T5Gemma 2",
}
"""Maps each ``model_type`` of transformers to the name of the kind of model."""

_EXAMPLE = "This is a text."
"""The text that replaces each ``…`` in the form of a task's inputs."""


def sections(facts: Facts) -> Iterator[str]:
    """Yields the paragraphs of the page."""
    yield f"# {facts.title}"
    yield _summary(facts)
    yield "## How to use it"
    yield from _usage(facts)
    if forms := _input_rows(facts):
        yield "The model was trained on inputs and answers of these forms, in which … is a text:"
        yield _table(("task", "input", "answer"), forms)
    if scores := _score_rows(facts):
        yield "## Scores"
        yield _score_text(facts)
        yield _table(("task", "split", "examples", "metric", "score"), scores)
    if facts.step:
        yield "## Training"
        yield "\n".join(_training(facts))
        yield "<details><summary>The complete recipe</summary>"
        yield _fenced(to_json(replace(facts.experiment, init_from=None)))
        yield "</details>"


def _summary(facts: Facts) -> str:
    """Returns the first paragraph, which says what the model is and from what it was trained."""
    base = f"[{facts.base}]({HUB}/{facts.base})" if facts.base else None
    adapters = facts.experiment.training.adapters
    steps = f"{facts.step:,} steps on {_trained_on(facts)}"
    model = type(facts.experiment.model).__name__
    kind = _KINDS.get(str(facts.config.get("model_type")), f"a model of the class `{model}`")

    if facts.library == PEFT:
        assert adapters is not None
        other = f"a {kind_of(unroll(facts.experiment.model)).family}"
        sentences = [
            f"These are {_kind_of_adapters(adapters)} for {base or other}.",
            f"They were trained for {steps}.",
        ]
    elif facts.step:
        sentences = [f"This is {kind}, which was trained for {steps}."]
        if base is not None:
            sentences.append(f"The training started from {base}.")
        if adapters is not None:
            sentences.append(
                f"Only {_kind_of_adapters(adapters)} were trained, and then added to the "
                "parameters of the model."
            )
    elif base is not None and not facts.source.unchanged and not facts.details.base_model:
        sentences = [f"This is {kind} that was made from {base}."]
    else:
        sentences = [f"This is {base or kind}, which was converted and not trained any further."]

    versions = f"synthesizer_jax {__version__} and jax {jax.__version__}"
    sentences.append(f"The files were written with {versions}.")
    return " ".join(sentences)


def _kind_of_adapters(lora: LoRA) -> str:
    """Returns the name of the kind of adapters that a run has trained."""
    if not _has_ranks(lora):
        return "adapters without low-rank updates"
    return "DoRA adapters" if lora.dora else "LoRA adapters"


def _has_ranks(lora: LoRA) -> bool:
    """Returns whether adapters contain low-rank updates."""
    return lora.targets is not None or lora.embeddings is not None


def _trained_on(facts: Facts) -> str:
    """Returns the data sets on which the model was trained, as part of a sentence."""
    name = facts.experiment.data.mixture
    kind = "mixture" if name in task_registry.mixture_names() else "task"
    mixture = f"the {kind} `{name}`"
    configs: dict[str, list[str]] = {}
    for task in facts.tasks:
        data = hub_names.data_of(task)
        if data is None:
            return mixture
        configs.setdefault(data.name, []).append(data.config or "")
    if not configs:
        return mixture

    parts = []
    for data_set, found in configs.items():
        names = ", ".join(dict.fromkeys(filter(None, found)))
        link = f"[{data_set}]({HUB}/datasets/{data_set})"
        parts.append(f"{link} ({names})" if names else link)
    return " and ".join(parts)


def _usage(facts: Facts) -> Iterator[str]:
    """Yields code that loads the model, with the sentences before it."""
    text = _quoted(_example_input(facts))
    if facts.library == OURS:
        yield from _usage_of_programs(facts, text)
        return

    length = facts.experiment.data.targets_length if facts.step else 64
    name = f"name = {_quoted(facts.details.name or facts.title)}"
    if facts.details.name is None:
        name += "  # the path of this folder, or its OWNER/NAME on the hub"
    knows_base = facts.library != PEFT or facts.base is not None
    if not knows_base:
        yield (
            "In the following code, replace BASE by the path or the name of the model with which "
            "the adapters were trained."
        )
    yield "With PEFT and transformers:" if facts.library == PEFT else "With transformers:"
    options = f"max_new_tokens={length}"
    if _differ_in_depth(facts):
        options += ", use_cache=False"
    yield _code(
        "python",
        *_loading(facts, name),
        f'inputs = tokenizer({text}, return_tensors="pt")',
        f"ids = model.generate(**inputs, {options})[0]",
        "print(tokenizer.decode(ids, skip_special_tokens=True))",
    )
    if knows_base:
        yield "With synthesizer_jax and, for a name on the hub, huggingface_hub:"
        yield _code(
            "python",
            "import synthesizer_jax as sj",
            "",
            name,
            "loaded = sj.load(name)",
            f"print(sj.generate(loaded, [{text}], max_length={length})[0])",
        )


def _usage_of_programs(facts: Facts, text: str) -> Iterator[str]:
    """Yields code that runs StableHLO programs on a text, with the sentence before it.

    The argument `text` is a string of Python, with its quotation marks.
    """
    yield (
        "The folder contains StableHLO programs and a loader. The loader needs jax and NumPy. It "
        "also needs the package sentencepiece if the folder contains vocabulary.model, and the "
        "package tokenizers if the folder contains tokenizer.json. Run this in the folder:"
    )
    if isinstance(facts.experiment.model, Encoder):
        yield _code(
            "python",
            "import pathlib",
            "",
            "from load import Model",
            "",
            'model = Model(pathlib.Path("."))',
            f"inputs = model.tokens([{text}])",
            'print(model.programs["encode"](model.parameters, inputs))',
        )
    else:
        yield _code("bash", f"python load.py {text}")


def _loading(facts: Facts, name: str) -> list[str]:
    """Returns the lines of code that load a model with transformers, and adapters with PEFT.

    The argument `name` is the line of code that defines the variable ``name``.
    """
    if facts.library != PEFT:
        return [
            "import transformers",
            "",
            name,
            f"tokenizer = transformers.{facts.tokenizer}.from_pretrained(name)",
            "model = transformers.AutoModelForSeq2SeqLM.from_pretrained(name)",
        ]
    return [
        "import peft",
        "import transformers",
        "",
        name,
        f"base = {_quoted(facts.base or 'BASE')}",
        "tokenizer = transformers.AutoTokenizer.from_pretrained(base)",
        "model = transformers.AutoModelForSeq2SeqLM.from_pretrained(base)",
        "model = peft.PeftModel.from_pretrained(model, name)",
    ]


def _differ_in_depth(facts: Facts) -> bool:
    """Returns whether the encoder and the decoder have different numbers of layers.

    The cache of transformers expects stacks of the same depth.
    """
    model = facts.experiment.model
    return (
        isinstance(model, EncoderDecoder) and model.encoder.num_layers != model.decoder.num_layers
    )


def _example_input(facts: Facts) -> str:
    """Returns a text in the form of the inputs of the first task whose form is known."""
    forms = (hub_names.input_form(task) for task in facts.tasks)
    form = next((form for form in forms if form is not None), "…")
    return form.replace("…", _EXAMPLE)


def _input_rows(facts: Facts) -> list[tuple[str, ...]]:
    """Returns the form of the inputs and answers of each task, as rows of a table."""
    rows: list[tuple[str, ...]] = []
    for task in facts.tasks:
        form = hub_names.input_form(task)
        if form is not None:
            words = [f"`{word}`" for word in task.label_words or ()]
            if len(words) > 6:  # the scores of STS-B
                words = [*words[:2], "…", words[-1]]
            rows.append((f"`{task.name}`", f"`{form}`", ", ".join(words) or "a text"))
    return rows


def _score_rows(facts: Facts) -> list[tuple[str, ...]]:
    """Returns the scores of the evaluation as rows of a table."""
    return [
        (f"`{result['task']}`", result["split"], f"{result['labeled']:,}", name, f"{value:.2f}")
        for result in facts.evaluated
        for name, value in result["metrics"].items()
        if value is not None
    ]


def _score_text(facts: Facts) -> str:
    """Returns a paragraph that says how the scores were computed."""
    evaluation = facts.experiment.evaluation
    text = (
        "The metrics of T5's tasks are in percent here. In the fields of this card, a score has "
        "the scale of the hub's metric, for example 0 to 1 for accuracy."
    )
    if evaluation.method == RANK:
        text += (
            " If a task has a fixed set of answers, the most probable of these answers was scored. "
            "An answer that is generated freely can differ from it."
        )
    if evaluation.max_examples is not None:
        text += f" At most about {evaluation.max_examples:,} examples of a task were evaluated."
    return text


def _training(facts: Facts) -> Iterator[str]:
    """Yields a list of the most important settings of the training."""
    data, training = facts.experiment.data, facts.experiment.training
    yield f"- steps: {facts.step:,}"
    lengths = f"up to {data.targets_length:,} tokens"
    if data.inputs_length:
        lengths = (
            f"up to {data.inputs_length:,} input tokens and {data.targets_length:,} target tokens"
        )
    packed = ", each with one or more examples" if data.pack else ""
    yield f"- batch: {data.batch_size:,} rows of {lengths}{packed}"
    yield f"- optimizer: {type(training.optimizer).__name__}"
    lora = training.adapters
    if lora is not None and _has_ranks(lora):
        ranks = f"rank {lora.rank} with alpha {lora.alpha:g}"
        if lora.rules:
            ranks += ", and the exceptions in the recipe"
        yield f"- {_kind_of_adapters(lora)}: {ranks}"
    yield f"- dtype of the computation: {facts.experiment.model.dtype}"
    yield f"- seeds: {training.seed} for the parameters and dropout, {data.seed} for the data"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Returns a table in Markdown. The characters that separate cells are escaped."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(x.replace('|', chr(92) + '|') for x in row)} |" for row in lines
    )


def _code(language: str, *lines: str) -> str:
    """Returns lines of code as a block of Markdown."""
    return "\n".join((f"```{language}", *lines, "```"))


def _quoted(text: str) -> str:
    """Returns a text as a string of Python."""
    return json.dumps(text, ensure_ascii=False)


def _fenced(data: JSON) -> str:
    """Returns JSON as a block of Markdown.

    Backticks in the JSON are escaped, because a backtick could end the code block.
    """
    return _code("json", json.dumps(data, indent=1).replace("`", "\\u0060"))
