"""What a package needs beside its code is named in pyproject, so that it is in a wheel too: the dashboard's page, and the licence
of the library that draws it.
"""

import tomllib
from fnmatch import fnmatch
from pathlib import PurePosixPath

from tree import ROOT

from dashboard.files import NAMES

SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
PAGE = ROOT / "dashboard" / "page"


def in_wheel(package: str, path: PurePosixPath) -> bool:
    """Globs are as setuptools takes them: * is of one folder."""
    return any(
        len(PurePosixPath(glob).parts) == len(path.parts) and fnmatch(str(path), glob)
        for glob in SETUP["package-data"][package]
    )


def test_the_page_and_its_librarys_licence_are_in_a_wheel():
    files = {PurePosixPath(path.relative_to(PAGE.parent).as_posix()) for path in PAGE.rglob("*") if path.is_file()}
    needed = {PurePosixPath("page", name) for name in (*NAMES, "uplot/LICENSE", "uplot/VERSION")}
    assert files == needed
    assert not [path for path in needed if not in_wheel("dashboard", path)]


def test_every_package_is_in_a_wheel():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == {name.removesuffix("*") for name in SETUP["packages"]["find"]["include"]}
