"""What `tpu_scripts/launch` checks before anything costs money: slices, command lines, work directories."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from synthesizer_jax.cli.main import app
from synthesizer_jax.costs import chips
from tests.tpu_scripts.world import LAUNCH, ROOT, SCRIPTS, World
from tools import tpu_commands

PLACE = ("--name", "pod", "--zone", "here")
SPOT = (*PLACE, "--type", "v6e-16", "--bucket", "runs")
IMAGE = ("--name", "pod", "--image", "i", "--type", "v6e:4x4")
WORKDIR = ("--workdir", "bucket/runs/rv")


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def refused(world, *words):
    """The sentence that ends a launch which called nothing."""
    done = world.launch(*words)
    assert (done.returncode, done.stdout, world.calls()) == (2, "", []), done.stdout
    (line,) = done.stderr.splitlines()
    return line.removeprefix("error: ")


NEAR = "near it are v6e:4x4 (v6e-16) and v6e:4x8 (v6e-32)"


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize("asked", ["v6e-17", "v6e:5x5"])
def test_a_slice_that_does_not_exist_is_refused_with_those_near_it(world, asked, dry):
    place = (*PLACE, "--type", asked)
    for words in (("create",), ("train", *WORDS), ("babysit", "--bucket", "runs", *WORDS)):
        action, *rest = words
        said = refused(world, action, *dry, *place, *rest)
        assert said == f"v6e has no slice '{asked}'; {NEAR}"
    planned = CliRunner().invoke(app, ["plan", "quickstart", "--topology", asked])
    assert isinstance(planned.exception, ValueError)
    assert str(planned.exception) == said


WORDS = ("--", "quickstart", *WORKDIR)


@pytest.mark.parametrize("asked", ["v6e-16", "v6e:4x4"])
def test_types_and_topologies_ask_for_the_same_machines(world, asked):
    done = world.launch("create", *PLACE, "--type", asked)
    assert done.returncode == 0, done.stderr
    assert "--accelerator-type=v6e-16" in world.calls()[0]


def test_a_shape_that_no_type_means_is_asked_for_by_its_shape(world):
    world.launch("create", *PLACE, "--type", "v5p:4x8x16")
    (call,) = world.calls()
    assert {"--type=v5p", "--topology=4x8x16"} < set(call)
    assert not [word for word in call if word.startswith("--accelerator-type")]
    world.launch("xpk", *PLACE, *IMAGE[2:4], "--cluster", "c", "--type", "v5p:4x8x16", *GS)
    assert "v5p-4x8x16" in world.calls()[1]


GS = ("--", "quickstart", "--workdir", "gs://runs/rv")
RECIPES = (
    "classify, cotrain_glue_super_glue, finetune, language_model, pretrain, quickstart, replace_attention, "
    "synthesize, translate"
)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            ("nosuchrecipe", *WORKDIR),
            f"there is no recipe nosuchrecipe; those of the program are {RECIPES}",
        ),
        (("quickstart:nosuch", *WORKDIR), "quickstart has no recipe nosuch"),
        (("mine.py", *WORKDIR), "there is no mine.py among what is committed in "),
        (
            ("quickstart", "--wrokdir", "bucket/rv"),
            "synthesizer-jax train takes no --wrokdir; it takes --data-dir, ",
        ),
        (("quickstart", *WORKDIR, "--quiet=yes"), "synthesizer-jax train takes no --quiet=yes; "),
        (("quickstart", *WORKDIR, "--set"), "--set needs a value"),
        (("quickstart",), "train needs --workdir"),
        (WORKDIR, "train needs a recipe after --"),
        (("quickstart", "rv", *WORKDIR), "train takes 1 arguments besides its options, not 2"),
        (("quickstart", "--workdir", "runs/rv"), "--workdir runs/rv is on disks that go away with"),
        (("quickstart", "--workdir=/runs/rv"), "--workdir /runs/rv is on disks that go away with"),
        (("quickstart", "--workdir=bucket"), "--workdir bucket is on disks that go away with"),
        (("quickstart", "--workdir", "bucket/../rv"), "--workdir bucket/../rv leads elsewhere"),
        (("quickstart", *WORKDIR, "--data-dir=data"), "--data-dir data is on disks that go away"),
        (
            ("quickstart", *WORKDIR, "--set", "vocabulary.path=spiece.model"),
            "vocabulary.path spiece.model is on disks that go away with",
        ),
    ],
)
def test_a_wrong_command_line_is_refused_before_it_costs_money(world, run, message, dry):
    for place in (("train", *PLACE), ("babysit", *SPOT), ("jobset", *IMAGE, "--bucket", "runs")):
        if place[0] == "jobset" and "mine.py" in run:
            continue  # lies in the image
        assert refused(world, *place, *dry, "--", *run).startswith(message)


def test_the_fields_of_a_recipe_are_checked_where_the_program_is_installed(world):
    run = (
        "train",
        *PLACE,
        "--",
        "quickstart:random_vanilla",
        *WORKDIR,
        "--set",
        "training.stepz=3",
    )
    program = world.folder / "bin" / "synthesizer-jax"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m synthesizer_jax "$@"\n')
    assert "Training has no field 'stepz', did you mean 'steps'?" in refused(world, *run)
    program.unlink()
    done = world.run(LAUNCH, *run, PATH=f"{program.parent}:/usr/bin:/bin")
    assert done.returncode == 0
    assert "are not checked: synthesizer-jax is not installed" in done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ("--zone", "us-east5"),
            "--zone is us-east5, a region; give one of its zones, such as us-east5-b",
        ),
        (("--bucket", "b"), "3 to 63 characters"),
        (("--bucket", "a" * 64 + ".b"), "3 to 63 characters"),
        (("--bucket", "-runs"), "begins and ends with a small letter or a digit"),
        (("--bucket", "10.0.0.1"), "is no IP address"),
        (("--bucket", "my-google-runs"), "nor holds google"),
    ],
)
def test_names_that_google_does_not_have_are_refused(world, option, message):
    assert message in refused(world, "setup", *PLACE, *option)


def test_what_is_right_or_unchecked_is_let_through(world):
    right = [
        ("train", *PLACE, "--", "quickstart:random_vanilla", "--workdir", "./bucket/rv", "--quiet"),
        ("train", *PLACE, "--", "tests/training/tiny.py:experiment", *WORKDIR, "--set", "--x"),
        ("train", *PLACE, *GS),
        ("train", *PLACE, *GS, "--data-dir", "bucket/data", "--set", "vocabulary.path=README.md"),
        ("babysit", *PLACE, "--type", "v6e-16", *GS),
        ("jobset", *IMAGE, "--", "/recipes/mine.py", *GS[2:], "--data-dir", "/data"),
        ("train", *PLACE, "--unchecked", "--", "mine", "--wrokdir", "rv"),
    ]
    for action, *words in right:
        done = world.launch(action, "--dry-run", *words)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_container_keeps_only_what_is_mounted(world):
    place = ("xpk", *PLACE, *IMAGE[2:], "--cluster", "c", "--")
    assert refused(world, *place, "quickstart", "--workdir", "rv").startswith(
        "--workdir rv is inside the container and lost with it"
    )
    assert world.launch(*place, "quickstart", "--workdir", "/bucket/rv").returncode == 0


def test_any_command_runs_on_the_machines(world):
    start = "--command=synthesizer_jax/tpu_scripts/host run none -- "
    for run in ("eval --workdir bucket/runs/rv --all", "data list --data-dir bucket/data"):
        assert world.launch("run", *PLACE, "--", *run.split()).returncode == 0
        assert world.calls()[-1][-1] == start + run
    assert refused(World(world.folder / "new"), "run", *PLACE).startswith("run needs a command of")
    distill = ("replace_attention:alr", "--teacher", "bucket/t", *WORKDIR)
    world.launch("babysit", *SPOT, "--command", "distill", "--poll", "0", "--", *distill)
    world.answers("status", "run a idle", "run a 0")
    done = world.launch("babysit", "--dry-run", *SPOT, "--command", "distill", "--", *distill)
    assert "host\\ run\\ v6e\\ --\\ distill\\ replace_attention:alr" in done.stdout


def test_an_unknown_command_is_refused(world):
    said = refused(world, "run", *PLACE, "--", "evla", *WORKDIR)
    assert said.startswith(
        "synthesizer-jax has no command evla; it has: analyze, average, convert, data cache, data "
    )
    said = refused(world, "babysit", *SPOT, "--command", "evla", *WORDS)
    assert said.startswith(
        "synthesizer-jax has no command evla; it has: analyze, average, convert, data cache, data "
    )


def test_the_launcher_knows_the_programs_options():
    text = (SCRIPTS / "commands.txt").read_text()
    assert text == tpu_commands.format_commands(), (
        "python -m tools.tpu_commands tpu_scripts/commands.txt"
    )


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=lambda chip: chip.name)
def test_every_slice_has_one_type_and_a_size_one_usual_shape(chip):
    usual = [place for shape in chip.shapes if (place := chips.Topology(chip, shape)).usual]
    assert {place.chips for place in usual} == {chips.Topology(chip, s).chips for s in chip.shapes}
    assert len({place.type for place in usual}) == len(usual)
    for place in usual:
        assert chips.parse_topology(place.type) == chips.parse_topology(place.name) == place


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v2-8", (2, 2)),
        ("v3-32", (4, 4)),
        ("v4-32", (2, 2, 4)),
        ("v4-4096", (8, 16, 16)),
        ("v5litepod-16", (4, 4)),
        ("v5p-8", (2, 2, 1)),
        ("v5p-1024", (8, 8, 8)),
        ("v5p-12288", (16, 16, 24)),
        ("v6e-8", (2, 4)),
    ],
)
def test_published_types_are_known(name, shape):
    assert chips.parse_topology(name).shape == shape


REACH = [
    (("--tunnel-through-iap",), {"--tunnel-through-iap"}),
    (("--internal-ips",), {"--internal-ip"}),
    (("--internal-ips", "--tunnel-through-iap"), {"--tunnel-through-iap"}),
    ((), set()),
]


@pytest.mark.parametrize(("options", "expected"), REACH)
def test_every_ssh_and_scp_takes_the_way_to_the_hosts(world, options, expected):
    place = (*PLACE, *options)
    for words in (
        ("setup", *place),
        ("train", *place, *WORDS),
        ("run", *place, "--", "eval", *WORKDIR),
        ("status", *place),
        ("logs", *place),
        ("stop", *place),
        ("babysit", *SPOT, *options, "--poll", "0", *WORDS),
    ):
        assert world.launch(*words).returncode == 0
    reached = [call for call in world.calls() if call[4] in ("ssh", "scp")]
    assert len(reached) > 8
    known = {"--tunnel-through-iap", "--internal-ip"}
    assert all(known & set(call) == expected for call in reached)


NETWORK = [
    *(
        "--network=vpc",
        "--subnetwork=west",
        "--service-account=me@p.iam",
        "--labels=team=nlp,cost=1",
    ),
    "--internal-ips",
]


@pytest.mark.parametrize("action", ["create", "babysit"])
def test_networks_accounts_and_labels_reach_the_request(world, action):
    rest = ("--bucket", "runs", "--poll", "0", *WORDS) if action == "babysit" else ()
    world.answers("describe", "NOT_FOUND", "ACTIVE")
    assert world.launch(action, *PLACE, "--type", "v6e-16", *NETWORK, *rest).returncode == 0
    (call,) = (call for call in world.calls() if "create" in call)
    assert [word for word in call if word in NETWORK] == NETWORK


def test_a_reservation_is_named(world):
    place = (*PLACE, "--type", "v6e-16", "--reservation", "mine")
    assert world.launch("create", *place).returncode == 0
    (call,) = world.calls()
    assert call[:3] == ["gcloud", "alpha", "compute"] and call[-1] == "--reservation=mine"
    other = World(world.folder / "other")
    assert refused(other, "create", *place, "--spot").startswith("take one of --spot, --reserved,")


def repository(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder))
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "begin")):
        subprocess.run([*git, *words], check=True)
    return folder


def copied(world):
    """What is sent from where to where, and how it is installed."""
    *sent, install = [call for call in world.calls() if call[4] in ("scp", "ssh")]
    return [call[6] for call in sent], install[-1]


def test_another_repository_lies_where_the_checkout_would(world, tmp_path):
    code = repository(tmp_path / "mine", recipe="def long():\n    ...\n")
    assert world.launch("setup", *PLACE, "--code", str(code)).returncode == 0
    sent, install = copied(world)
    assert sent == [
        "pod:synthesizer_jax.tar.gz",
        "pod:synthesizer_jax_.program.tar.gz",
        "pod:synthesizer_jax_tpu_scripts.tar.gz",
    ]
    assert install.endswith("synthesizer_jax/tpu_scripts/host setup --code")
    place = ("train", *PLACE, "--code", str(code), "--")
    assert world.launch(*place, "recipe.py:long", *WORKDIR).returncode == 0
    new = World(tmp_path / "new")
    assert refused(new, *place, "recipe.py:short", *WORKDIR) == "recipe.py has no recipe short"
    (code / "later.py").write_text("")
    assert refused(new, *place, "later.py", *WORKDIR) == (
        f"there is no later.py among what is committed in {code}, which is what the machines get"
    )
    said = refused(new, "setup", *PLACE, "--code", str(tmp_path / "bin"))
    assert said.startswith(f"--code {tmp_path / 'bin'} is no git repository with a commit")


def test_a_release_needs_the_scripts_alone(world):
    assert world.launch("setup", *PLACE, "--release", "0.4.0").returncode == 0
    sent, install = copied(world)
    assert sent == ["pod:synthesizer_jax_tpu_scripts.tar.gz"]
    assert install.endswith("synthesizer_jax/tpu_scripts/host setup --release 0.4.0")
    new = World(world.folder / "new")
    assert refused(new, "setup", *PLACE, "--release", "latest").startswith("--release is latest;")


def test_plan_and_launch_read_one_table():
    done = subprocess.run(
        ["python3", "-I", ROOT / "synthesizer_jax/costs/chips.py", "v5p-1024"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "v5p v5p-1024 8x8x8 512 usual\n"
