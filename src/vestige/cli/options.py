"""Options of a command from the fields of a pydantic model, so that each is declared once.

    @options_of(TrainConfig, without=("group_noise_multiplier",))
    def train(config: TrainConfig, as_json: Json = False) -> None:
        ...

The name, the type, the default and the help of an option are those of its field, and the model
checks the values. pydantic-settings reads a model from a command line too, but not beside arguments
and options of typer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from vestige.privacy import options

Command = Callable[..., None]


def help_of(declared: Any) -> str | None:
    """The help of a type that is declared with its range, such as `Delta`."""
    return FieldInfo.from_annotation(declared).description


# Options that several commands have. Their ranges are the accounting's, which says more about them.
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
OwnModel = Annotated[str | None, typer.Option(help="The MODULE:factory of a model of your own.")]
Delta = Annotated[
    float,
    typer.Option(help=help_of(options.Delta)),
    Field(description=help_of(options.Delta)),
]
Rate = Annotated[float, Field(description=help_of(options.SampleRate))]
Steps = Annotated[int, Field(ge=1, description="Number of releases (lots).")]
Beta = Annotated[float, Field(description="Weight of the lot's own sum in a release, (0, 1].")]
Groups = Annotated[int, Field(description="Number of clipping groups.")]


@dataclass(frozen=True)
class Form:
    """How a field is written on the command line where that differs from the field itself.

    `parse` makes the field's value from what typer has read as `kind`. None leaves what the field
    says. An `argument` has no name; several names of an option stand in one text.
    """

    kind: Any = None
    parse: Callable[[Any], Any] | None = None
    name: str | None = None
    metavar: str | None = None
    help: str | None = None
    argument: bool = False


def options_of(
    model: type[BaseModel],
    *,
    only: Iterable[str] | None = None,
    without: Iterable[str] = (),
    forms: Mapping[str, Form] | None = None,
) -> Callable[[Command], Command]:
    """A decorator: the parameter of a command that is a `model` becomes one option for each field.

    The fields are all, or `only` some, `without` others. They stand where the parameter stood.
    """
    left_out, chosen = set(without), set(model.model_fields if only is None else only)
    names = [name for name in model.model_fields if name in chosen - left_out]
    written = {name: (forms or {}).get(name, Form()) for name in names}
    derived = [_parameter(name, model.model_fields[name], written[name]) for name in names]

    def decorate(command: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        place = ""
        for one in inspect.signature(command, eval_str=True).parameters.values():
            if one.annotation is model:
                place = one.name
                parameters += derived
            else:
                parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {}
            for name, form in written.items():
                value = values.pop(name)
                given[name] = form.parse(value) if form.parse else value
            command(**{place: model(**given)}, **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _parameter(name: str, field: FieldInfo, form: Form) -> inspect.Parameter:
    """The parameter that typer makes an option of."""
    kind = _typed(field.annotation) if form.kind is None else form.kind
    told: dict[str, Any] = {"help": form.help or field.description, "metavar": form.metavar}
    # A flag has no opposite: the default is what it would say.
    spelled = form.name or f"--{name.replace('_', '-')}"
    info = typer.Argument(**told) if form.argument else typer.Option(*spelled.split(), **told)
    default: Any = inspect.Parameter.empty
    if not field.is_required():
        default = field.get_default(call_default_factory=True)
    if form.kind is not None:
        default = str(default) if form.kind is str else None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _typed(annotation: Any) -> Any:
    """The plain type that typer reads: without ranges, and text where there are choices."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _typed(arguments[0])
    if origin is Literal:
        return str
    if origin in (Union, UnionType):
        kinds = [_typed(argument) for argument in arguments if argument is not NoneType]
        return kinds[0] | None if NoneType in arguments else kinds[0]
    return annotation
