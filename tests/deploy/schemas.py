"""Kubernetes's own schemas, of the package kubernetes-validate, and small ones of what operators add; all offline, all strict."""

import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

VERSIONS = ("1.29", "1.37")  # the oldest that Chart.yaml allows, and the newest that there are schemas of
_CRDS = Path(__file__).parent / "crds"


def faults(manifest: dict, version: str) -> list[str]:
    """What an API server of this version would not take: fields that it does not know, values of a wrong kind, what is missing."""
    errors = validator(manifest["apiVersion"], manifest["kind"], version).iter_errors(manifest)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in errors]


@cache
def validator(api_version: str, kind: str, version: str) -> Draft202012Validator:
    """Of one kind; a kind that nobody has a schema of fails the test."""
    group = api_version.partition("/")[0]
    own = _CRDS / f"{kind.lower()}.json"
    if "." in group and own.is_file():
        return Draft202012Validator(json.loads(own.read_text()), registry=_definitions(version))
    name = (
        f"{kind.lower()}-{group.split('.')[0]}{'-' + api_version.partition('/')[2] if '/' in api_version else ''}.json"
    )
    schema = json.loads(_folder(version).joinpath(name).read_text())
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(version))


@cache
def _definitions(version: str) -> Registry:
    return Resource.from_contents(json.loads(_folder(version).joinpath("_definitions.json").read_text())) @ Registry()


def _folder(version: str):
    return files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
