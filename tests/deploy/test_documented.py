"""What docs/kubernetes.md tells to write is what the chart takes."""

import re

import yaml

from tests.deploy.render import CHART, ROOT, render
from tests.deploy.schemas import VERSIONS, faults

TEXT = (ROOT / "docs" / "kubernetes.md").read_text()
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_example_is_a_release():
    (example,) = re.findall(r"```yaml\n(.+?)```", TEXT, re.S)
    (one,) = render(yaml.safe_load(example))
    assert one.refusal == ""
    assert not [found for manifest in one.manifests for found in faults(manifest, VERSIONS[-1])]
    assert one.one("Deployment", "prefill")["spec"]["replicas"] == 4


def there(path: str) -> bool:
    """Whether the chart has this value; of a pool's the pool is left out."""
    for begin in (VALUES, VALUES["decode"]):
        value = begin
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return True
    return False


def test_values_that_it_names_are_there():
    roots = VALUES.keys() | VALUES["decode"].keys()
    named = {n for n in re.findall(r"`([a-z][A-Za-z]+(?:\.[A-Za-z]+)*)(?::[^`]*)?`", TEXT) if n.split(".")[0] in roots}
    files = {"tls.crt", "tls.key"}  # of a secret
    assert len(named) > 20
    assert [name for name in named - files if not there(name)] == []


def test_defaults_that_it_tells_are_so():
    scaling = VALUES["autoscaling"]
    told = re.findall(r"^\| (prefill|decode) \| .+? \| ([\d.,]+)( s| ms)? \|", TEXT, re.M)
    numbers = [float(number.replace(",", "")) / (1000 if unit == " ms" else 1) for _, number, unit in told]
    assert numbers == [*list(scaling["prefill"].values())[2:], *list(scaling["decode"].values())[2:]]
    assert f"`scaleDownSeconds` ({scaling['scaleDownSeconds']})" in TEXT
    assert f"user {VALUES['runAs']['user']}" in TEXT and VALUES["tls"]["serverName"] in TEXT
    assert all(version in TEXT for version in VERSIONS)
