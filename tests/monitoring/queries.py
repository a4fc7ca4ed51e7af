"""What deploy/grafana and deploy/prometheus ask, and of which series. Reads files, asks nobody."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

DASHBOARDS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards").glob("*.json"))
_SELECTOR = re.compile(r"((?:diptych[_:]|vllm:|process_)[\w:]+|\bup\b)\s*(\{[^}]*\})?\s*(\[[^\]]*\])?")
_COMPARED = re.compile(r"(==|!=|>=|<=|>|<)")
_HIDDEN = re.compile(r"\{[^}]*\}|\"[^\"]*\"|\[[^\]]*\]")
# What asks whether a series is new, or takes for its increase what it came with: a counter's own value is no mean there.
_NEW = re.compile(r"\((\w+) unless \1 offset \w+\)|clamp_min\((\w+) - \2 offset [$\w]+, 0\) or \2")


@dataclass(frozen=True)
class Query:
    """One query and where it is: dashboard, panel (or variable, annotation, rule), legend."""

    place: str
    expr: str


@dataclass(frozen=True)
class Selector:
    """Series that a query takes, and over which range ("" for none)."""

    name: str
    matchers: str
    span: str


def panels(dashboard: Path) -> list[dict]:
    """Of one dashboard; those of collapsed rows too."""
    out = []
    for panel in json.loads(dashboard.read_text())["panels"]:
        out += [panel, *panel.get("panels", [])]
    return out


def queries(dashboard: Path) -> list[Query]:
    """Every query of its panels and annotations, variables not yet filled in."""
    out = [
        Query(f"{dashboard.stem} / {panel['title']} / {target['legendFormat']}", target["expr"])
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
    ]
    notes = json.loads(dashboard.read_text())["annotations"]["list"]
    return out + [Query(f"{dashboard.stem} / annotation / {note['name']}", note["expr"]) for note in notes]


def variables(dashboard: Path) -> list[Query]:
    """What fills its variables, as a query for the series whose label is taken."""
    found = []
    for variable in json.loads(dashboard.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            taken = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert taken, variable
            place = f"{dashboard.stem} / variable / {variable['name']}"
            found.append(Query(place, f"count by ({taken[2]}) ({taken[1]})"))
    return found


def filled(expr: str, rate_interval: str = "4s") -> str:
    """With All chosen for each variable, as Grafana sends it."""
    expr = expr.replace("$__rate_interval", rate_interval)
    expr = re.sub(r"\$(model|router|worker|process)\b", ".*", expr)
    assert "$" not in expr, expr
    return expr


def selectors(expr: str) -> list[Selector]:
    """All series that it takes."""
    return [Selector(name, matchers, span) for name, matchers, span in _SELECTOR.findall(expr)]


def summed_over_lifetimes(expr: str, counted: set[str]) -> list[str]:
    """Names of what only counts up, of which it takes the value since its process began instead of a rate."""
    asked = selectors(_NEW.sub("", expr))
    return [selector.name for selector in asked if selector.name in counted and not selector.span]


def uncompared(expr: str) -> str:
    """The same, but where an alert leaves out series that are well it has 0: whether there is anything to compare."""
    hidden: list[str] = []

    def hide(found: re.Match) -> str:
        hidden.append(found[0])
        return f"§{len(hidden) - 1}§"

    shown = _COMPARED.sub(r"\1 bool", _HIDDEN.sub(hide, expr))
    return re.sub(r"§(\d+)§", lambda found: hidden[int(found[1])], shown)
