"""Tests the check in `make lint` that finds circular imports."""

import grimp
import pytest

from tools.import_circles import import_circles


@pytest.fixture
def circles(tmp_path, monkeypatch):
    """Returns a function that makes a package with the given modules and finds its circles."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "example"
    folder.mkdir()

    def find(**modules):
        for name, text in {"__init__": "", **modules}.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
        return import_circles(
            grimp.build_graph("example", exclude_type_checking_imports=False, cache_dir=None)
        )

    return find


def test_modules_may_import_each_other_in_one_direction(circles):
    assert circles(a="from example import b, c", b="from example import c", c="") == []


@pytest.mark.parametrize(
    "hidden",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from example import a",
        "def function():\n    from example import a",
    ],
)
def test_an_import_of_a_type_checker_or_of_a_function_closes_a_circle(circles, hidden):
    found = circles(a="from example import b", b="from example import c", c=hidden)
    assert found == [("example.a", "example.b", "example.c", "example.a")]


def test_a_module_that_uses_a_name_of_its_package_closes_a_circle(circles):
    found = circles(__init__="from example.a import x", a="from example import y")
    assert found == [("example", "example.a", "example")]


def test_every_circle_is_found_once(circles):
    found = circles(
        a="from example import b, c", b="from example import a", c="from example import a", d=""
    )
    assert found == [
        ("example.a", "example.b", "example.a"),
        ("example.a", "example.c", "example.a"),
    ]
