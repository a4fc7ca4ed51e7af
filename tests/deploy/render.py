"""Helm's own engine renders deploy/helm/diptych; run as a program it answers for many sets of values at once.

Helm is a Go library, in a process of its own: its runtime handles signals and threads as it likes.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "diptych"
RELEASE, NAMESPACE = "demo", "llm"
_PACKAGE = "--package"  # in place of a release's name, which cannot be so
Manifest = dict  # of Kubernetes


@dataclass(frozen=True)
class Rendered:
    """What Helm made of one set of values, or why it refused."""

    manifests: tuple[Manifest, ...]
    refusal: str = ""

    def one(self, kind: str, name: str) -> Manifest:
        """The object of this kind, `name` without the release's."""
        (found,) = [m for m in self.of(kind) if m["metadata"]["name"] == f"demo-diptych-{name}"]
        return found

    def of(self, kind: str) -> list[Manifest]:
        """All objects of this kind."""
        return [m for m in self.manifests if m["kind"] == kind]


def render(*sets: dict, chart: Path = CHART, release: str = RELEASE) -> list[Rendered]:
    """What Helm makes of each set of values. Skipped with a reason where there is no Helm for this machine."""
    return list(_render(json.dumps(sets), chart, release))


def package(folder: Path) -> Path:
    """The chart's archive, made by Helm in this folder."""
    return Path(_asked(_PACKAGE, str(folder), ""))


@cache
def _render(sets: str, chart: Path, release: str) -> tuple[Rendered, ...]:
    answers = json.loads(_asked(release, str(chart), sets))
    return tuple(Rendered(_manifests(one["files"]), one["refusal"]) for one in answers)


def _asked(release: str, where: str, said: str) -> str:
    if find_spec("helm_python") is None:
        if os.environ.get("CI") == "true":  # noqa: TID251
            pytest.fail("helm-python-sdk is not installed; CI's machines have wheels of it")
        pytest.skip("helm-python-sdk has no wheel for this machine")
    command = [sys.executable, __file__, release, where]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _manifests(files: dict[str, str]) -> tuple[Manifest, ...]:
    texts = [text for path, text in sorted(files.items()) if not path.endswith("NOTES.txt")]
    return tuple(m for text in texts for m in yaml.load_all(text, yaml.CSafeLoader) if m)


def main(release: str, where: str) -> None:
    """Package the chart, or render one: sets of values come in at stdin as JSON, what was rendered goes out at stdout."""
    import helm_python

    if release == _PACKAGE:
        sys.stdout.write(helm_python.package(str(CHART), destination=where))
        return
    answers = []
    with helm_python.Chart.load(where) as loaded:
        for values in json.load(sys.stdin):
            try:
                files = loaded.render(values, name=release, namespace=NAMESPACE)
                answers.append({"files": files, "refusal": ""})
            except helm_python.HelmError as error:
                answers.append({"files": {}, "refusal": str(error)})
    report = helm_python.lint(where, strict=True, kube_version="v1.29.0")
    wrong = [m for m in report["messages"] if m["severity"] > 1]
    if report["errors"] or wrong:
        sys.exit(f"helm lint: {report['errors']} {wrong}")
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
