"""The words of a statement: its sentences (words.j2), and its page for people (statement.md.j2).

What a template shows goes through `finalize`, so that no value can be forgotten: in a sentence it
stays on its line, on the page it is text and never markup. Epsilons are rounded up and lower bounds
down, so that no printed figure claims more than the JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from vestige.checks import NO_GUARANTEE, digits_up, one_line, round_down, round_up
from vestige.statement.escaping import in_markdown

_MOST_VALUES = 8  # of a list in a cell of the page


class _Fit(str):
    """Text that was made here, a number or a dash, and is fit for Markdown as it is."""


def sentence(name: str, claim: Any, **more: Any) -> str:
    """The sentence of that name about a claim (claim.Claim)."""
    written = getattr(_SENTENCES.get_template("words.j2").module, name)(claim, **more)
    return one_line(written)


def sentences(name: str, claim: Any) -> list[str]:
    """The list of that name about a claim."""
    written = getattr(_SENTENCES.get_template("words.j2").module, name)(claim)
    return [one_line(entry) for entry in re.split(r"\n\s*\n", written) if entry.strip()]


def markdown(statement: Mapping[str, Any]) -> str:
    """The statement as Markdown.

    Guarantee: nothing in the statement is obeyed: no HTML, no link, no heading or table of its own.
    """
    return _page("statement.md.j2", statement)


def nist_map(statement: Mapping[str, Any]) -> str:
    """A map from the levels of NIST SP 800-226 to what a statement says, as Markdown."""
    claim, noisy = statement["guarantee"], statement["run"].get("held_out_release")
    figure = next((f"{n} {noisy[n]:.4g}" for n in ("accuracy", "mae") if noisy and n in noisy), "")
    return _page(
        "nist.md.j2",
        statement,
        answer=f"epsilon {_epsilon(claim['epsilon'])} at delta {claim['delta']:g}",
        counts=", ".join(str(group["records"]) for group in statement["unit"]["groups"]),
        utility=f"held-out {figure}, with noise" if figure else "no figure was released",
        aside={row["what"]: row["text"] for row in statement["not_covered"]},
    )


def model_card(statement: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """The card of a model for the Hugging Face hub, with the guarantee in its front matter.

    `model` is what model.json holds. Guarantee: the card is a function of both, so exact held-out
    figures, which are in neither, are not in it.
    """
    run = {"held_out_release": None, "weights_sha256": ""} | statement["run"]
    # What names code is not believed: whoever loads the model has to name it, too.
    names = (model.get("features"), model["model"])
    code = next((name for name in names if name is not None and ":" in name), None)
    return _page("card.md.j2", dict(statement) | {"run": run}, model=model, code=code)


def yaml_number(value: float | None) -> str:
    """A number as YAML 1.1 reads it, where 1e-05 would be text."""
    return re.sub(r"^(\d+)e", r"\1.0e", "null" if value is None else repr(float(value)))


def _page(template: str, statement: Mapping[str, Any], **more: Any) -> str:
    page = _PAGE.get_template(template).render(statement, **more)
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def strength(epsilon: float) -> str:
    """What a guide for practitioners (arXiv 2303.00654) calls an epsilon by itself."""
    return "strong" if epsilon <= 1 else "reasonable" if epsilon <= 10 else "weak"


def _between(values: float | Sequence[float], digits: int = 6) -> str:
    return _extent(values, digits, "between {} and {}")


def _range(bounds: Mapping[str, float] | None, digits: int = 6) -> str:
    return _Fit("-" if bounds is None else _extent([*bounds.values()], digits, "{} to {}"))


def _extent(values: float | Sequence[float], digits: int, words: str) -> str:
    many = values if isinstance(values, list | tuple) else (values,)
    low, high = f"{min(many):.{digits}g}", f"{max(many):.{digits}g}"
    return low if low == high else words.format(low, high)


def _epsilon(value: float | None, without: str = NO_GUARANTEE) -> str:
    if value is not None and value >= 1e6:
        return _Fit(f"{digits_up(value, 4):g}")
    return _Fit(round_up(value, 3, without))


def _value(value: Any) -> str:
    """Any JSON value in a cell of the page."""
    if value is None:
        return _Fit("-")
    if isinstance(value, bool):
        return _Fit("yes" if value else "no")
    if isinstance(value, int | float):
        return _Fit(value if isinstance(value, int) else f"{value:g}")
    if isinstance(value, list):
        listed = ", ".join(_value(item) for item in value[:_MOST_VALUES])
        more = f", ... ({len(value)} values)" if len(value) > _MOST_VALUES else ""
        return _Fit(listed + more)
    if isinstance(value, dict):
        return _Fit(", ".join(f"{in_markdown(key)} {_value(item)}" for key, item in value.items()))
    return _Fit(in_markdown(value))


def _environment(finalize: Callable[[Any], str], **filters: Callable[..., Any]) -> Environment:
    environment = Environment(
        loader=PackageLoader("vestige", "statement"),
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    environment.tests["finite"] = math.isfinite
    return environment


_SENTENCES = _environment(
    one_line,
    up=partial(round_up, places=3),
    between=_between,
    strength=strength,
    number=lambda value: f"{value:g}",
    exp=math.exp,
)
_PAGE = _environment(
    lambda value: value if isinstance(value, _Fit) else in_markdown(value),
    epsilon=_epsilon,
    value=_value,
    range=_range,
    down=partial(round_down, places=4),
    sentence=lambda text: f"{text[:1].upper()}{text[1:]}.",
    one_line=one_line,
    number=lambda value: _Fit(yaml_number(None if value is None else digits_up(value, 6))),
    tojson=lambda value: _Fit(json.dumps(one_line(value))),
)
