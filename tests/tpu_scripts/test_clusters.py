"""`tpu_scripts/launch` for clusters: JobSets on GKE, xpk and SLURM."""

import re
import shlex

import pytest
import yaml

from tests.tpu_scripts.world import ROOT, SCRIPTS, World

VARIABLES = {"JOBSET_NAME", "JOBSET_JOB", "JOBSET_SLICES", "JOBSET_SLICE"}


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def jobset(world, *words):
    done = world.launch("jobset", "--name", "pod", "--image", "registry/image:1", *words)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load((world.folder / "applied").read_text())


WORDS = ("--workdir", 'gs://my/runs "rv"\\', "--set", "x='$(JOBSET_NAME) @IMAGE@ & #'")
RUN = ("--", "quickstart", "--workdir", "gs://runs/rv")
START = ("--", "train", "quickstart", *WORDS)


def test_the_manifest_is_one_job_per_slice_and_a_pod_per_host(world):
    manifest = jobset(
        world, "--type", "v6e-16", "--topology", "4x4", "--slices", "2", "--", "quickstart", *WORDS
    )
    assert world.calls() == [["kubectl", "apply", "--filename=-"]]
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("JobSet", "pod")
    (jobs,) = manifest["spec"]["replicatedJobs"]
    assert jobs["replicas"] == 2
    job = jobs["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy demands it
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    (container,) = pod["containers"]
    assert container["image"] == "registry/image:1"
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert container["command"] == ["tpu_scripts/start"]
    escaped = [word.replace("$(", "$$(") for word in WORDS]  # Kubernetes makes $( of $$(
    assert container["args"] == ["v6e", "--slices", "2", "--", "train", "quickstart", *escaped]
    fields = {
        entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in container["env"]
    }
    assert fields.keys() == VARIABLES
    assert fields["JOBSET_SLICE"] == "metadata.annotations['jobset.sigs.k8s.io/job-index']"


def test_preemption_restarts_without_end_and_failures_do_not(world):
    manifest = jobset(world, "--type", "v6e", "--topology", "4x4", "--max-restarts", "3", *RUN)
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3
    assert policy["rules"] == [
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    saved, taken = job["podFailurePolicy"]["rules"]
    assert saved["action"] == taken["action"] == "FailJob"
    assert saved["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [75]}
    assert taken["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_spot_bucket_and_account_are_there_when_asked_for(world):
    plain = ("--type", "tpu7x", "--topology", "2x2x4")
    manifest = jobset(world, *plain, *RUN)
    template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert "metadata" not in template
    assert not {"tolerations", "volumes", "serviceAccountName"} & template["spec"].keys()
    assert "volumeMounts" not in template["spec"]["containers"][0]

    manifest = jobset(world, *plain, "--spot", "--bucket", "runs", "--service-account", "me", *RUN)
    template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    spec = template["spec"]
    assert template["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    assert spec["serviceAccountName"] == "me"
    assert spec["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu7x"
    assert spec["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert spec["tolerations"][0]["value"] == "true"
    assert spec["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "runs"
    mount = spec["containers"][0]["volumeMounts"][0]
    workdir = re.search(r"^WORKDIR (\S+)$", (ROOT / "Dockerfile").read_text(), flags=re.M)[1]
    assert mount == {"name": "bucket", "mountPath": f"{workdir}/bucket"}


@pytest.mark.parametrize(
    ("words", "hosts", "chips"),
    [
        (("v5e", "2x2"), 1, 4),
        (("v5e", "1x1"), 1, 1),
        (("v6e", "2x4", "--chips-per-host", "8"), 1, 8),
        (("v4", "2x2x4"), 4, 4),
        (("v5p", "4x4x4"), 16, 4),
        (("v5p-1024", "4x8x16"), 128, 4),
        (("v6e:4x4",), 4, 4),
        (("v5litepod-8",), 2, 4),
    ],
)
def test_the_topology_gives_hosts_and_chips(world, words, hosts, chips):
    chip, *more = words
    if more:
        more.insert(0, "--topology")
    manifest = jobset(world, "--type", chip, *more, *RUN)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    limits = job["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (job["parallelism"], limits["google.com/tpu"]) == (hosts, chips)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("v6e", "4x4x4"), "v6e has no slice 'v6e:4x4x4'; near it are v6e:8x8 (v6e-64)"),
        (("v5p", "4x4"), "v5p has no slice 'v5p:4x4'; near it are v5p:2x2x4 (v5p-32)"),
        (("v6e-16", "8x8"), "v6e-16 is not a slice of 8x8, which has 64 chips"),
        (("v3-32", "4x4"), "GKE has no v3"),
        (
            ("v6e", "2x4", "--chips-per-host", "3"),
            "--topology 2x4 has 8 chips, which --chips-per-host 3",
        ),
        (
            ("v6e", "2x2", "--bucket", "a\nb"),
            "--bucket is $'a\\nb'; the name of a bucket has small letters",
        ),
        (("v6e", "2x2", "--service-account", "a\nb"), "the argument $'a\\nb' holds a control"),
    ],
)
def test_mistakes_in_a_jobset_are_one_line(world, words, message):
    chip, topology, *more = words
    place = ("--name", "pod", "--image", "i", "--type", chip, "--topology", topology)
    done = world.launch("jobset", *place, *more, *RUN)
    assert (done.returncode, world.calls()) == (2, [])
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_the_dry_run_of_a_jobset_is_a_command_for_the_shell(world):
    words = (
        "--name",
        "pod",
        "--type",
        "v6e",
        "--topology",
        "4x4",
        "--image",
        "i",
        "--",
        "quickstart",
        *WORDS,
    )
    text = world.launch("jobset", "--dry-run", *words).stdout
    assert world.calls() == []
    assert world.run("bash", "-c", text).returncode == 0
    dry = (world.folder / "applied").read_text()
    world.launch("jobset", *words)
    assert (world.folder / "applied").read_text() == dry
    assert world.calls()[0] == world.calls()[1]


def test_xpk_restarts_on_75_too(world):
    place = ("--name", "pod", "--zone", "z", "--cluster", "c", "--image", "i", "--project", "p")
    words = ("--type", "v6e-16", "--slices", "2", "--", "quickstart", *WORDS)
    assert world.launch("xpk", *place, *words).returncode == 0
    (call,) = world.calls()
    assert call[:3] == ["xpk", "workload", "create"]
    settings = dict(zip(call[3::2], call[4::2], strict=True))
    command = settings.pop("--command")
    assert shlex.split(command)[:5] == ["tpu_scripts/start", "v6e", "--slices", "2", "--"]
    assert shlex.split(command)[5:] == ["train", "quickstart", *WORDS]
    assert settings == {
        "--workload": "pod",
        "--cluster": "c",
        "--zone": "z",
        "--project": "p",
        "--tpu-type": "v6e-16",
        "--num-slices": "2",
        "--docker-image": "i",
        "--max-restarts": "100",
        "--restart-on-exit-codes": "75",
        "--termination-grace-period-seconds": "300",
    }


def test_slurm_gets_one_process_per_gpu(world):
    words = (
        "--nodes",
        "4",
        "--gpus-per-node",
        "2",
        "--flags",
        "gpu-hopper",
        "--",
        "quickstart",
        *WORDS,
    )
    assert world.launch("slurm", "--name", "rv", *words).returncode == 0
    (call,) = world.calls()
    assert call[:6] == [
        "sbatch",
        f"--chdir={ROOT}",
        "--job-name=rv",
        "--nodes=4",
        "--gpus-per-node=2",
        "--ntasks-per-node=2",
    ]
    assert call[6:] == [
        str(SCRIPTS / "slurm.sbatch"),
        "gpu-hopper",
        "--",
        "train",
        "quickstart",
        *WORDS,
    ]
    settings = re.findall(r"^#SBATCH (\S+)$", (SCRIPTS / "slurm.sbatch").read_text(), flags=re.M)
    assert {"--requeue", "--signal=TERM@300", "--exclusive", "--mem=0"} <= set(settings)


@pytest.mark.parametrize(("code", "queued"), [(0, False), (75, True), (1, False)])
def test_slurm_queues_a_saved_run_again(world, code, queued):
    world.answers("srun", str(code))
    done = world.run("bash", SCRIPTS / "slurm.sbatch", "none", *START, SLURM_JOB_ID="7")
    assert done.returncode == code
    task, *rest = world.calls()
    assert task == ["srun", "--kill-on-bad-exit=0", "tpu_scripts/start", "none", *START]
    assert rest == ([["scontrol", "requeue", "7"]] if queued else [])
