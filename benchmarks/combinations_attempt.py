"""Trains the run of a combination, kills it, continues it, uses it, and checks the results.

Combinations with the same number of devices share the processes that `attempt_group` starts. If
every combination had its own processes, starting them would take most of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import io
import json
import os
import pathlib
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from combinations_checks import (
    WrongError,
    check_refusal,
    compare_average,
    compare_records,
    compare_results,
    compare_rows,
    compare_trees,
    files_of,
    is_sentence,
    last_line,
    to_host,
)
from combinations_drawing import RECIPE, Combination, draw_combination
from combinations_processes import captured_errors, command, in_child, print_to

from synthesizer_jax.cli import main as program
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.training import run as training
from synthesizer_jax.training.step import TrainState
from synthesizer_jax.training.trainer import Trainer

KILL_AT = 4
"""A run is killed before the step with this number."""

TEXTS = ["review: nice film 3", "reverse: a b c", "the"]
"""The inputs for which texts are generated."""

BEGINNINGS = ["a b c", "the", "a"]
"""The beginnings of texts that models without inputs continue."""


class Attempt:
    """An attempt at one combination, which has its own directory.

    Attributes:
      combination: the combination.
      root: the directory of all combinations, which also contains the data and the base models.
      place: the directory of this attempt.
      notes: facts to add to the results, such as the error message of a run that refused its
        settings.
      end: ``complete``, ``refused`` or ``wrong``.
      reason: a description of what went wrong.
    """

    def __init__(self, combination: Combination, root: pathlib.Path, place: pathlib.Path):
        self.combination = combination
        self.root = root
        self.place = place
        self.notes = dict[str, Any]()
        self.end = "refused"
        self.reason = ""

    @property
    def texts(self) -> list[str]:
        """The inputs for which texts are generated."""
        return BEGINNINGS if self.combination.kind == "text_lm" else TEXTS

    @property
    def has_twin_on_one_device(self) -> bool:
        """Whether the second run uses only one device and therefore needs a process of its own."""
        return self.combination.twin == "one device"

    def arguments(self, workdir: str, extra: Sequence[str] = ()) -> list[str]:
        """Returns the arguments of the `train` command, with extra settings."""
        bases = str(self.root / "bases")
        arguments = ["train", f"{RECIPE}:default:{self.combination.recipe}"]
        arguments += ["--workdir", str(self.place / workdir)]
        arguments += ["--data-dir", str(self.root / "data"), "--quiet"]
        for setting in (*self.combination.settings, *extra):
            arguments += ["--set", setting.replace("{}", bases)]
        return arguments

    def call(self, name: str, function: Callable[[], int]) -> None:
        """Calls a function in this process, and writes its output and its exit code to files.

        The parent process reads these files in `check`.
        """
        print_to(self.place / f"{name}.log")
        try:
            code = function()
        except Exception:
            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        sys.stderr.flush()
        (self.place / f"{name}.code").write_text(str(code))

    def check(self, name: str, ended: int) -> None:
        """Raises a `WrongError` unless `call` was successful.

        Args:
          name: the name that was passed to `call`.
          ended: the exit code of the process that executed `call`.
        """
        log, code = self.place / f"{name}.log", self.place / f"{name}.code"
        if not code.exists():
            raise WrongError(
                f"{name} did not run, because its process ended with {ended}; see {log}"
            )
        if code.read_text() != "0":
            raise WrongError(f"{name} ended with {code.read_text()}: {last_line(log)}")
        if "Traceback" in log.read_text(errors="replace"):
            raise WrongError(f"{name} printed a traceback; see {log}")

    def check_killed(self, ended: int) -> bool:
        """Checks the run that was killed.

        Args:
          ended: the exit code of the process that trained the run.

        Returns:
          Whether the run can be continued. A run that has refused its settings cannot be continued.
        """
        log, code = self.place / "killed.log", self.place / "killed.code"
        if ended != -signal.SIGKILL:
            raise WrongError(f"the process to be killed ended with {ended}; see {log}")
        if not code.exists():
            return True
        if code.read_text() == "0" and self.combination.get("evaluation.patience"):
            return True  # the run stopped early, before it was killed
        check_refusal(int(code.read_text()), log)
        written = files_of(self.place) - {log, code}
        if written:
            names = sorted(map(str, written))[:3]
            raise WrongError(
                f"The command refused the settings, but it wrote the files {names}: "
                f"{last_line(log)}"
            )
        self.notes["refusal"] = last_line(log)
        return False

    def wait_until_saved(self) -> None:
        """Waits for the newest checkpoint, if the combination's field `saved` is true."""
        every = int(self.combination.get("training.save_every"))
        newest = (KILL_AT - 1) // every * every
        path = self.place / "killed" / "checkpoints" / str(newest)
        end = time.monotonic() + 20
        while self.combination.saved and not path.is_dir() and time.monotonic() < end:
            time.sleep(0.01)

    def train_twin(self) -> int:
        """Trains the second run without interruption, and returns its exit code.

        The method checks that the loss of the first batch does not change when the batch's examples
        are arranged in different rows. The averages of the parameters are checked, too. To save
        time, the second run is evaluated only if evaluations decide when training stops.
        """
        states: list[Any] = []
        step = Trainer.step

        def watching_step(trainer: Trainer, state: TrainState, batch: Any) -> Any:
            """Makes a training step and checks its result."""
            if not states:
                if self.combination.compares_rows:
                    compare_rows(trainer, state, batch)
                states.append(to_host(state.params))
            state, metrics = step(trainer, state, batch)
            states.append(to_host(state.params))
            if state.ema:
                compare_average(states, to_host(state.ema), trainer.experiment.training.ema)
            return state, metrics

        with (
            mock.patch.object(Trainer, "step", watching_step),
            mock.patch.dict(os.environ, {program.TRACEBACK: "1"}),
            contextlib.ExitStack() as stack,
        ):
            if not self.combination.get("evaluation.patience"):
                stack.enter_context(
                    mock.patch.object(training, "evaluate_state", return_value={"score": 0.0})
                )
            return command(self.arguments("twin", self.combination.twin_settings))

    def compare_with_twin(self) -> None:
        """Compares the log of the killed run with the log of the second run."""
        self.notes["difference"] = compare_records(
            self.records("killed"),
            self.records("twin"),
            self.combination.twin,
            is_bfloat16=self.combination.get("model.dtype") == "bfloat16",
        )

    def records(self, workdir: str) -> list[dict[str, Any]]:
        """Returns the records of training steps in a run's log."""
        records = read_metrics(self.place / workdir / METRICS_FILE)
        return [record for record in records if record["kind"] == "train"]

    def results(self, workdir: str) -> Any:
        """Returns the results of the last evaluation of a run."""
        files = (self.place / workdir / "evaluation").glob("*/results.json")
        newest = max(files, key=lambda path: int(path.parent.name))
        return json.loads(newest.read_text())

    def continue_and_use(self) -> int:
        """Continues the run, evaluates it, generates texts with its model and exports the model.

        The exit code and the last line of every command are written to ``codes.jsonl``, which
        `check_codes` reads.
        """
        results = []
        for name, arguments in self.commands().items():
            errors = io.StringIO()
            with captured_errors(errors):
                code = command(arguments)
            text = errors.getvalue()
            print(text, flush=True)
            lines = [line for line in text.splitlines() if line]
            last = lines[-1] if lines else ""
            with (self.place / "codes.jsonl").open("a") as file:
                file.write(json.dumps([name, code, last, "Traceback" in text]) + "\n")
            if name in ("train", "eval"):
                if code:
                    return 0
                results.append(self.results("killed"))

        of_training, of_eval = results
        compare_results(of_eval, of_training, "eval")
        if (self.place / "exported").exists():
            self.check_export(self.place / "exported")
        return 0

    def commands(self) -> dict[str, list[str]]:
        """Returns the arguments of the commands that continue and use the run, by command name."""
        run = str(self.place / "killed")
        commands = {
            "train": self.arguments("killed"),
            "eval": ["eval", "--workdir", run, "--data-dir", str(self.root / "data")],
        }
        if self.combination.generate is not None:
            generate = ["generate", "--workdir", run, *self.combination.generate, *self.texts]
            for size in self.combination.batch_sizes:
                output = ["--batch-size", str(size), "--output", str(self.place / f"texts-{size}")]
                commands[f"generate in batches of {size}"] = [*generate, *output]
        exported = str(self.place / "exported")
        commands["export"] = ["export", run, exported, *self.combination.export]
        return commands

    def check_codes(self) -> None:
        """Raises a `WrongError` if a command crashed, or if texts depend on the batch size.

        A command may also refuse to do something that the model does not support.
        """
        for line in (self.place / "codes.jsonl").read_text().splitlines():
            name, code, last, has_traceback = json.loads(line)
            refused = code == 2 and is_sentence(last) and name not in ("train", "eval")
            if has_traceback or not (code == 0 or refused):
                raise WrongError(f"{name} ended with {code}: {last}")
            if refused:
                self.notes[f"{name.split()[0]} refused"] = last
        written = [self.place / f"texts-{size}" for size in self.combination.batch_sizes]
        texts = {path.read_text() for path in written if path.exists()}
        if len(texts) > 1:
            raise WrongError(
                f"generate {self.combination.generate} gives other texts in batches of another "
                f"size: {sorted(texts)}"
            )

    def check_export(self, exported: pathlib.Path) -> None:
        """Checks that the exported files agree with the run."""
        kind = self.combination.export[1]
        if kind == "stablehlo":
            self.check_program(exported)
        elif kind != "peft":
            self.check_folder(exported, kind)

    def check_folder(self, exported: pathlib.Path, kind: str) -> None:
        """Converts an exported folder back, and checks that the parameters are unchanged."""
        import synthesizer_jax as sj
        from synthesizer_jax.models import unroll_variables

        ours = sj.load(str(self.place / "killed"))
        options = ["--vocabulary", "bytes"] if kind.startswith("t5x") else []
        converted = self.place / "converted"
        if command(["convert", str(exported), str(converted), *options]):
            raise WrongError("what was exported cannot be converted back")
        theirs = sj.load(str(converted))
        compare_trees(
            unroll_variables(theirs.model, theirs.variables)["params"],
            unroll_variables(ours.model, ours.variables)["params"],
            0.0,
            "exported parameters",
        )

    def check_program(self, exported: pathlib.Path) -> None:
        """Checks that an exported program generates the same texts as the `generate` command."""
        if self.combination.generate != []:
            return
        from synthesizer_jax.serving.load import Model

        found = [" ".join(text.splitlines()) for text in Model(exported).generate(self.texts)]
        written = (self.place / f"texts-{self.combination.batch_sizes[0]}").read_text().splitlines()
        # For a language model without inputs, the command `generate` stops when a text has as many
        # tokens as a training row. An exported program may generate a longer text.
        continues = self.combination.kind == "text_lm"
        for ours, theirs in zip(found, written, strict=True):
            if not (ours.startswith(theirs) if continues else ours == theirs):
                raise WrongError(f"the exported program generates {found}, not {written}")


def kill_all(attempts: Sequence[Attempt]) -> int:
    """Trains all runs in this process, and kills the process before any of the runs has ended.

    The runs are nested. When a run reaches step `KILL_AT`, it does not make this step. Instead, the
    next run starts, and after the last run the process is killed. All runs share one process,
    because starting a process for every run would take most of the time.
    """
    step = Trainer.step

    def start(index: int) -> None:
        """Starts all runs from the given index on, and then kills this process."""
        for number in range(index, len(attempts)):
            one = attempts[number]
            made: list[None] = []  # one element for each step that was started

            def killing_step(
                trainer: Trainer,
                state: Any,
                batch: Any,
                number: int = number,
                one: Attempt = one,
                made: list[None] = made,
            ) -> Any:
                """Makes a training step. At step `KILL_AT`, starts the next run instead."""
                made.append(None)
                if len(made) == KILL_AT:
                    one.wait_until_saved()
                    start(number + 1)
                return step(trainer, state, batch)

            Trainer.step = killing_step  # type: ignore[method-assign]
            # This call returns only if the training run refuses its settings or stops early.
            one.call("killed", functools.partial(command, one.arguments("killed")))
        os.kill(os.getpid(), signal.SIGKILL)

    start(0)
    return 1


def continue_all(attempts: Sequence[Attempt]) -> int:
    """Continues the runs that were killed, uses them, and trains the second runs."""
    for one in attempts:
        one.call("resumed", one.continue_and_use)
        if not one.has_twin_on_one_device:
            one.call("twin", one.train_twin)
        gc.collect()
    return 0


def train_twins(attempts: Sequence[Attempt]) -> int:
    """Trains all second runs that use one device."""
    for one in attempts:
        one.call("twin", one.train_twin)
    return 0


def passing(attempts: Sequence[Attempt], check: Callable[[Attempt], bool]) -> list[Attempt]:
    """Returns the attempts that pass a check, and marks attempts as wrong if the check fails.

    Args:
      attempts: the attempts to check.
      check: a function that returns whether to go on with an attempt. If it raises a `WrongError`,
        the attempt is wrong.
    """
    passed = []
    for one in attempts:
        try:
            if check(one):
                passed.append(one)
        except WrongError as error:
            one.end, one.reason = "wrong", str(error)
    return passed


def attempt_group(numbers: Sequence[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Attempts several combinations that use the same number of devices.

    Returns:
      The result of each combination, as it is written to the file of results.
    """
    attempts = []
    for number in numbers:
        place = args.directory / f"{args.seed}-{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        attempts.append(Attempt(draw_combination(args.seed, number), args.directory, place))
    devices = attempts[0].combination.devices
    log = args.directory / f"{args.seed}-{numbers[0]}.log"
    began = time.monotonic()

    ended = in_child(functools.partial(kill_all, attempts), log, devices)
    left = passing(attempts, lambda one: one.check_killed(ended))
    if left:
        left = continue_group(left, log, devices)
    for one in left:
        one.end = "complete"

    seconds = round((time.monotonic() - began) / len(numbers), 1)
    results = []
    for number, one in zip(numbers, attempts, strict=True):
        if one.end != "wrong" and not args.keep:
            shutil.rmtree(one.place)
        found = {"number": number, "end": one.end, "reason": one.reason, "seconds": seconds}
        results.append({**found, **one.notes, **dataclasses.asdict(one.combination)})
    log.unlink()
    return results


def continue_group(attempts: Sequence[Attempt], log: pathlib.Path, devices: int) -> list[Attempt]:
    """Continues and uses the killed runs of attempts, trains the second runs, and checks both.

    Returns:
      The attempts that are not wrong.
    """
    ended = in_child(functools.partial(continue_all, attempts), log, devices)

    def check_used(one: Attempt) -> bool:
        """Checks whether an attempt was continued and used correctly."""
        one.check("resumed", ended)
        one.check_codes()
        return True

    def check_twin(one: Attempt) -> bool:
        """Checks the second run of an attempt."""
        one.check("twin", ended_alone if one.has_twin_on_one_device else ended)
        one.compare_with_twin()
        return True

    left = passing(attempts, check_used)
    alone = [one for one in left if one.has_twin_on_one_device]
    ended_alone = in_child(functools.partial(train_twins, alone), log, 1) if alone else ended
    return passing(left, check_twin)
