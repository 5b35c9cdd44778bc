"""The command line: `vestige train`, `budget`, `calibrate`, `plan` and more; others in cli_*.py.

Thin: it parses, calls and prints. Bad input gets one line on stderr and exit code 2; results go to
stdout and progress to stderr, so that `--json` leaves the JSON alone on stdout.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from vestige import __version__
from vestige.audit.plot_files import check_plot
from vestige.checks import check_count, round_up
from vestige.cli import (
    audit as cli_audit,
)
from vestige.cli import (
    experiments as cli_experiments,
)
from vestige.cli import (
    planning_report,
)
from vestige.cli import (
    runs as cli_runs,
)
from vestige.cli import (
    statement as cli_statement,
)
from vestige.cli import (
    verify as cli_verify,
)
from vestige.cli.display import Display, methods_table, pairs, print_json
from vestige.errors import ConfigError, StorageError, VestigeError
from vestige.lab import spectrum_report
from vestige.memory.spectrum import ESTIMATORS
from vestige.methods import METHODS, planning
from vestige.privacy import accounting
from vestige.statement.escaping import one_line
from vestige.train import config as settings
from vestige.train import training
from vestige.train.config import TrainConfig

# typer has carried a click of its own since 0.26: this is UsageError, wherever it lives.
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])


class _Program(TyperGroup):
    """The command group, with every expected error on one line."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run the command and exit: 0, 2 for bad input, 1 for a full disk, 130 after Ctrl-C."""
        try:
            code = super().main(*args, **options | {"standalone_mode": False})
        except _UsageError as error:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "vestige"
            message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
            _fail(f"{message}; see '{command} --help'", 2)
        except StorageError as error:
            _fail(str(error), 1)
        except VestigeError as error:
            _fail(str(error), 2)
        except OSError as error:
            _fail(str(error), 1)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; Ctrl-C outside the training loop ends here."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("vestige: interrupted", err=True)
            raise typer.Exit(cli_runs.INTERRUPTED) from None


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"vestige: error: {one_line(message)}", err=True)
    sys.exit(code)


app = typer.Typer(
    cls=_Program,
    add_completion=False,
    # A pretty traceback would print local variables, and those can be training examples.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point of the `vestige` program."""
    app(prog_name="vestige")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"vestige {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Differentially private PyTorch training that remembers only what it has released."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


_Delta = Annotated[float, typer.Option(help="The delta of (epsilon, delta).")]
_Rate = Annotated[float, typer.Option(help="A record's chance to be in a lot: lot / records.")]
_Steps = Annotated[int, typer.Option(help="Number of releases (lots).")]
_Beta = Annotated[float, typer.Option(help="Weight of the lot's own sum in a release, (0, 1].")]
_Groups = Annotated[int, typer.Option(help="Number of clipping groups.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
_Accountant = Annotated[
    str, typer.Option(help=f"Accountant of epsilon: {', '.join(accounting.ACCOUNTANTS)}.")
]


@app.command()
def train(
    dataset: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(settings.DATASETS)}, or the path of an .npz file with x_train, "
            "y_train, x_test, y_test."
        ),
    ] = TrainConfig.dataset,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(settings.MODELS)}. Default: mlp for digits and .npz files, cnn for "
            "the others."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help=f"The private training method: {', '.join(METHODS)}.")
    ] = TrainConfig.method,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the method, such as beta=0.9 or interval=2,6; repeatable.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Solve for the noise that reaches this epsilon.")
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Noise standard deviation over the sensitivity. Default: "
            f"{training.DEFAULT_NOISE}, unless --epsilon is given."
        ),
    ] = None,
    delta: _Delta = TrainConfig.delta,
    accountant: _Accountant = TrainConfig.accountant,
    lot: Annotated[
        int | None,
        typer.Option(help="Expected lot size. Default: 64, and 512 for the benchmark sets."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Length of the run. Default: 30.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length in lots, instead of epochs.")] = None,
    clip: Annotated[
        str, typer.Option(help="Clipping norm: a number, or one per group with commas.")
    ] = str(TrainConfig.clip),
    clipping: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(settings.CLIPPINGS)}. Default: the method's own."),
    ] = None,
    history_dtype: Annotated[
        str | None,
        typer.Option(
            help="What past releases are kept in: float32, or bfloat16 for half the memory."
        ),
    ] = None,
    averaging: Annotated[
        str | None,
        typer.Option(
            help=f"Average the weights too: {', '.join(settings.AVERAGES)}. Costs no privacy."
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate. Default: 0.5, and 0.01 or 0.001 for the Adam family."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of initial weights and splits; harmless to publish.")
    ] = TrainConfig.seed,
    noise_seed: Annotated[
        int | None,
        typer.Option(
            help="Test mode: repeatable lots and noise, not private towards anyone who knows the "
            "seed. Never written down."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto (a GPU where there is one), cpu, cuda or cuda:N.")
    ] = TrainConfig.device,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with NAME.npz. Default: VESTIGE_DATA, or else a download."),
    ] = None,
    train_size: Annotated[
        int | None, typer.Option(help="Use the first N training records only.")
    ] = None,
    test_size: Annotated[
        int | None, typer.Option(help="Use the first N held-out records only.")
    ] = None,
    train_loss: Annotated[
        bool,
        typer.Option("--train-loss", help="Record the training loss too: outside the guarantee."),
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write TensorBoard scalars too: public numbers only."),
    ] = False,
    max_epsilon: Annotated[
        float | None, typer.Option(help="Stop before the step that would exceed this epsilon.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Lots between two checkpoints. Default: an epoch.")
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="A ledger file that runs on the same data share: their spending composes. "
            "Default: the run folder's own."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder, new or empty. Default: a new one in runs/.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Train a model privately and write a run folder with the weights and the result."""
    config = TrainConfig(
        dataset=dataset,
        model=model,
        method=method,
        settings=_settings(settings or ()),
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        accountant=accountant,
        lot=lot,
        epochs=epochs,
        steps=steps,
        clip=_clip(clip),
        clipping=clipping,
        history_dtype=history_dtype,
        averaging=averaging,
        lr=lr,
        seed=seed,
        noise_seed=noise_seed,
        device=device,
        data_dir=data_dir,
        train_size=train_size,
        test_size=test_size,
        train_loss=train_loss,
        max_epsilon=max_epsilon,
        checkpoint_every=checkpoint_every,
        ledger=ledger,
        out=out,
    )
    _silence_downloads(config)
    # Read when torch is loaded. Threads that spin while they wait make a step up to a hundred
    # times slower on a machine that has other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with _listeners(tensorboard) as listeners, Display(quiet=as_json) as display:

        def tell(progress: training.Progress) -> None:
            display(progress)
            for listener in listeners:
                listener(progress)

        result = training.train(config, progress=tell)
    cli_runs.finish(result, as_json, ledger)


@app.command()
def budget(
    sample_rate: _Rate,
    steps: _Steps,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="The joint multiplier, as make_private takes it.")
    ] = None,
    delta: _Delta = TrainConfig.delta,
    beta: _Beta = 1.0,
    group_noise_multiplier: Annotated[
        float | None,
        typer.Option(help="The papers' form instead: the multiplier inside each of --groups."),
    ] = None,
    groups: _Groups = 1,
    as_json: _Json = False,
) -> None:
    """What a run costs: epsilon of that many releases under every accountant."""
    report = accounting.budget(
        sample_rate=sample_rate,
        steps=check_count("steps", steps),
        delta=delta,
        noise_multiplier=noise_multiplier,
        beta=beta,
        group_noise_multiplier=group_noise_multiplier,
        groups=groups,
    )
    if as_json:
        print_json(report)
        return
    marginal = report["marginal_epsilon"]
    table = Table("accountant", "epsilon", title=f"epsilon at delta {report['delta']:g}")
    if marginal:
        table.add_column(f"one group alone\n({report['marginal_note']})")
    for name, value in report["epsilon"].items():
        row = [name, round_up(value, 4)]
        table.add_row(*row, *([round_up(marginal[name], 4)] if marginal else []))
    console = Console()
    console.print(table)
    console.print(f"sigma_eff {report['sigma_eff']:.6g}; guarantee: {report['guarantee']}")


@app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(help="The epsilon to stay within.")],
    sample_rate: _Rate,
    steps: _Steps,
    delta: _Delta = TrainConfig.delta,
    beta: _Beta = 1.0,
    groups: _Groups = 1,
    accountant: _Accountant = TrainConfig.accountant,
    as_json: _Json = False,
) -> None:
    """The noise multiplier that keeps a run within epsilon."""
    report = accounting.calibration_report(
        epsilon=epsilon,
        delta=delta,
        sample_rate=sample_rate,
        steps=check_count("steps", steps),
        beta=beta,
        groups=groups,
        accountant=accountant,
    )
    if as_json:
        print_json(report)
        return
    table = pairs()
    table.add_row(
        "noise multiplier", f"{round_up(report['noise_multiplier'], 6)}  (joint: for train)"
    )
    if report["groups"] > 1:
        per_group = round_up(report["group_noise_multiplier"], 6)
        table.add_row("in each group", f"{per_group}  ({report['groups']} groups)")
    reached = f"{round_up(report['epsilon'], 4)} at delta {report['delta']:g}"
    table.add_row("epsilon reached", f"{reached}  ({report['accountant']})")
    Console().print(table)


@app.command()
def plan(
    dataset_size: Annotated[int, typer.Option(help="Number of training records.")],
    lot: Annotated[int, typer.Option(help="Expected lot size.")],
    epochs: Annotated[int, typer.Option(help="Length of the training.")],
    epsilon: Annotated[float, typer.Option(help="The epsilon that every row reaches.")],
    delta: _Delta = TrainConfig.delta,
    accountant: _Accountant = TrainConfig.accountant,
    max_memory: Annotated[
        int | None,
        typer.Option(help="Most vectors of the model's size that the noise may keep."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where to plot bands and orders (.png, .pdf, .svg).")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Which noise accumulates least at an epsilon, what it gains and what it costs in memory."""
    request = planning.Request(dataset_size, lot, epochs, epsilon, delta, accountant, max_memory)
    if plot is not None:
        check_plot(plot)
    with Console(stderr=True).status("calibrating the noise") as status:
        comparison = planning.compare(request, status.update)
    if as_json:
        print_json(comparison.as_dict())
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 200  # as for `spectrum`
        console.print(planning_report.table(comparison))
        for line in planning_report.words(comparison):
            console.print(f"\n{line}", markup=False)
    if plot is not None:
        planning_report.draw(comparison, plot)
        if not as_json:
            typer.echo(f"\nplot  {plot}")


@app.command()
def spectrum(
    target: Annotated[
        str,
        typer.Argument(
            help="A run folder, a checkpoint file (a state_dict, or a dict that holds one), or a "
            f"built-in model with random weights, made for CIFAR-10: {', '.join(settings.MODELS)}."
        ),
    ],
    estimator: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(ESTIMATORS)}: a fixed tail of the eigenvalues, the tail that fits "
            "best, or what weightwatcher 0.7.7 computes."
        ),
    ] = ESTIMATORS[0],
    tail: Annotated[
        float | None,
        typer.Option(help="The share of the eigenvalues that hill fits, (0, 1]. Default: 0.5."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Where to plot the fits (.png, .pdf, .svg). Default: spectrum.png, in the run "
            "folder if TARGET is one, else in the current folder; with --json no plot."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of a built-in model's weights. Default: 0.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """How heavy-tailed the layers are: a table of power-law exponents, and a log-log plot."""
    request = spectrum_report.Request(target, estimator, tail, seed, plot)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for `train`
    report = spectrum_report.examine(request)
    if as_json:
        print_json(report.as_dict())
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 200  # a file or a pipe: nothing needs to be folded
        console.print(spectrum_report.table(report))
    if plot is not None or not as_json:
        spectrum_report.draw(report, request.chosen_plot)
    if not as_json:
        typer.echo(f"plot  {request.chosen_plot}")


@app.command()
def methods(as_json: _Json = False) -> None:
    """Every private training method: its guarantee, its cost and its paper."""
    rows = [
        {
            "name": name,
            "summary": method.summary,
            "guarantee": method.guarantee,
            "touches": method.touches,
            "extra_memory": method.extra_memory,
            "clipping": str(method.load().clipping),
            "settings": method.load()().settings(),
            "paper": method.paper,
        }
        for name, method in METHODS.items()
    ]
    if as_json:
        print_json({"methods": rows})
        return
    Console().print(methods_table(rows))


@contextlib.contextmanager
def _listeners(tensorboard: bool) -> Iterator[list[Callable[[training.Progress], None]]]:
    """Who else is told how a run goes."""
    if not tensorboard:
        yield []
        return
    from vestige.lab.report.tensorboard import Scalars

    with Scalars() as scalars:
        yield [scalars]


def _settings(pairs: Iterable[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = (part.strip() for part in pair.partition("="))
        if not key or not sign or not text:
            raise ConfigError(f"--set {pair!r} is not of the form KEY=VALUE.")
        if key in settings:
            raise ConfigError(f"--set {key} is given twice: give it once.")
        settings[key] = _value(text)
    return settings


def _value(text: str) -> Any:
    """A setting's value: true, false, none, a number, several of these with commas, or text."""
    if "," in text:
        return tuple(_value(part.strip()) for part in text.split(","))
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False}.get(text.lower())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _clip(text: str) -> float | tuple[float, ...]:
    try:
        bounds = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--clip {text!r} is not a number, nor several with commas: for example 1.0 or 1,0.5."
        ) from None
    return bounds if len(bounds) > 1 else bounds[0]


cli_experiments.register(app)
cli_runs.register(app)
cli_statement.register(app)
cli_audit.register(app)
cli_verify.register(app)


def _silence_downloads(config: TrainConfig) -> None:
    """pooch announces every download on stderr, in the middle of the progress bar."""
    if config.dataset in settings.DATASETS and config.dataset != "digits":
        import pooch

        pooch.get_logger().setLevel("ERROR")
