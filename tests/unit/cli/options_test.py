"""Options from the fields of a model: names, types, defaults, help, forms and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner, Result

from vestige.cli.options import Form, Json, options_of
from vestige.errors import ConfigError
from vestige.privacy.options import Count, Delta, OneOf, Options, Positive


class Recipe(Options):
    """A model with one field of each kind."""

    flour: Count = Field(description="Grams of flour.")
    delta: Delta = 1e-5
    salt_share: Positive | None = Field(default=None, description="Share of salt.")
    shape: Annotated[str, OneOf(("round", "long"))] = "round"
    sizes: Positive | tuple[Positive, ...] = 1.0
    oven: Path | None = None
    crust: bool = False


def program(received: list[Any], **settings: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    @options_of(Recipe, **settings)
    def bake(
        recipe: Recipe,
        name: Annotated[str, typer.Argument()],
        as_json: Json = False,
    ) -> None:
        """Bake."""
        received.append((recipe, name, as_json))

    return app


def call(line: str, **settings: Any) -> tuple[Any, Result]:
    received: list[Any] = []
    result = CliRunner().invoke(program(received, **settings), line.split())
    return (received[0] if received else None), result


def test_every_field_is_an_option_with_its_name_type_and_default() -> None:
    given, _ = call("loaf --flour 500")
    assert given == (Recipe(flour=500), "loaf", False)
    line = "loaf --flour 500 --delta 0.1 --salt-share 2 --shape long --oven a/b --crust --json"
    given, _ = call(line, without=("sizes",))
    expected = Recipe(
        flour=500, delta=0.1, salt_share=2.0, shape="long", oven=Path("a/b"), crust=True
    )
    assert given == (expected, "loaf", True)


def test_the_help_is_that_of_the_fields() -> None:
    _, result = call("--help")
    for text in ("Grams of flour.", "Share of salt.", "The delta of (epsilon, delta).", "1e-05"):
        assert text in result.output
    assert "--no-crust" not in result.output


def test_only_and_without_choose_fields() -> None:
    _, result = call("--help", only=("flour", "crust"))
    assert "--flour" in result.output and "--crust" in result.output
    assert "--shape" not in result.output
    _, result = call("--help", without=("crust",))
    assert "--crust" not in result.output and "--shape" in result.output


def parse_sizes(text: str) -> Any:
    return tuple(float(part) for part in text.split(","))


def test_a_form_says_how_a_field_is_written() -> None:
    forms = {"sizes": Form(str, parse_sizes, name="--measures", metavar="A,B", help="In cm.")}
    given, _ = call("loaf --flour 1 --measures 1,2", forms=forms)
    assert given[0].sizes == (1.0, 2.0)
    _, result = call("--help", forms=forms)
    assert "--measures" in result.output and "A,B" in result.output and "In cm." in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("loaf --flour 0", "flour=0 must be a whole number of at least 1."),
        ("loaf --flour 1 --delta 1", "delta 1.0 is out of range: give a number strictly between"),
        ("loaf --flour 1 --shape flat", "shape 'flat' is unknown: choose one of round, long."),
    ],
)
def test_the_model_refuses_bad_values(line: str, message: str) -> None:
    _, result = call(line)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [("loaf", "Missing option '--flour'"), ("loaf --flour much", "Invalid value for '--flour'")],
)
def test_typer_refuses_what_is_missing_or_of_another_type(line: str, message: str) -> None:
    _, result = call(line)
    assert result.exit_code == 2
    assert message in result.output


def test_a_command_keeps_its_name_and_docstring() -> None:
    def bake(recipe: Recipe) -> None:
        """Bake."""

    made: Callable[..., None] = options_of(Recipe)(bake)
    assert (made.__name__, made.__doc__) == ("bake", "Bake.")
