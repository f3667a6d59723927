"""What the host and the limits of containers leave."""

import pathlib

import pytest

from synthesizer_jax.costs import host_memory


@pytest.fixture
def system(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Writes what the system says; without it, it says nothing."""
    places = {"MEMORY": "meminfo", "OWN_GROUPS": "cgroup", "GROUPS": "groups"}
    for name, place in places.items():
        monkeypatch.setattr(host_memory, name, tmp_path / place)

    def put(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return put


@pytest.mark.parametrize(
    ("text", "free"),
    [
        (
            "MemTotal:  900 kB\nMemAvailable:  300 kB\n\nHugePages_Total: 0\nSwapFree: 20 kB\n",
            320 * 1024,
        ),
        ("MemAvailable:  300 kB\n", 300 * 1024),
        ("MemTotal:  900 kB\nMemFree:  300 kB\n", None),
        (None, None),
    ],
)
def test_what_the_host_has(system, text: str | None, free: int | None) -> None:
    if text is not None:
        system(meminfo=text)
    assert host_memory.free_memory() == free


def group(name: str, limit: str, used: int, kept: int) -> dict[str, str]:
    place = "groups" + "".join(f"/{part}" for part in name.split("/") if part)
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": f"anon 5\ninactive_file {kept}\nactive_file 9\n",
    }


def test_the_narrowest_limit_counts(system) -> None:
    system(meminfo="MemAvailable:  300 kB\n", cgroup="0::/pod/container\n")
    system(**group("/pod/container", "max", 10, 1), **group("/pod", "100000", 70000, 4000))
    assert host_memory.free_memory() == 34_000
    system(**group("/pod/container", "50000", 49000, 0))
    assert host_memory.free_memory() == 1000


def test_a_container_sees_its_own_limit_at_the_root(system) -> None:
    system(cgroup="0::/not/seen/here\n", **group("", "4000", 1000, 0))
    assert host_memory.free_memory() == 3000


def test_the_first_version_of_groups(system) -> None:
    system(cgroup="5:devices:/\n4:memory,hugetlb:/job\n0::/\n")
    for place, limit in (("/job", "5000"), ("", str(2**63 - 4096))):
        system(
            **{
                f"groups/memory{place}/memory.limit_in_bytes": limit,
                f"groups/memory{place}/memory.usage_in_bytes": "3000",
                f"groups/memory{place}/memory.stat": "inactive_file 7\ntotal_inactive_file 500\n",
            }
        )
    assert host_memory.free_memory() == 2500
