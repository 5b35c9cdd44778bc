"""The page of a run: guarantee, settings, curves, spectrum and memory, raw numbers, commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.checks import round_up
from vestige.lab.report import wording
from vestige.lab.report.markup import Column, Html, bullets, element, pairs, prose, table
from vestige.lab.report.page import Section, card, download, figure, page
from vestige.lab.report.panels import Plot
from vestige.lab.report.run_data import Run
from vestige.methods import METHODS

if TYPE_CHECKING:
    from vestige.lab.spectrum_report import Layer

# Where the files lay is nobody's business.
_PLACES = ("folder", "data_dir")


def run_page(run: Run, plots: Sequence[Plot], layers: Sequence[Layer]) -> str:
    """The page as text."""
    made_by = f"vestige report {run.folder.absolute().parent.name}/{run.name}"
    result = run.result
    by_name = {plot.name: figure(plot, made_by) for plot in plots}
    sections = [
        Section("guarantee", "Guarantee", [_guarantee(run)]),
        Section("settings", "Settings", _settings(run)),
        Section("curves", "Result and curves", [_tiles(run), by_name["training"]]),
    ]
    memory = [by_name[name] for name in ("memory", "spectra") if name in by_name]
    memory += [_layers(layers)] if layers else []
    if memory:
        sections.append(Section("memory", "Spectrum and memory", memory))
    sections.append(Section("numbers", "Numbers and commands", _origin(run, made_by)))
    method, data = str(result["method"]), wording.dataset(Path(str(result["dataset"])).name)
    title = f"{method} on {data}"
    lead = f"{result['model']}, {_count(result['steps'], 'step')}, run folder {run.name}"
    notices = []
    if result.get("interrupted"):
        stopped = "This run was interrupted: the guarantee keeps all steps that were planned."
        notices.append(card(element("p", element("strong", stopped)), warning=True))
    return page("Vestige report: a private training run", title, lead, notices, sections)


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _tiles(run: Run) -> Html:
    result = run.result
    figures: list[tuple[str, str]] = [("held-out accuracy", f"{result['accuracy']:.2%}")]
    if "averaged_accuracy" in result:
        figures.append(("with averaged weights", f"{result['averaged_accuracy']:.2%}"))
    figures.append(("held-out loss", wording.number(result.get("loss"), ".4f")))
    items = [element("div", element("dt", k), element("dd", v)) for k, v in figures]
    return element("dl", *items, class_="tiles")


def _guarantee(run: Run) -> Html:
    result = run.result
    finite = result["epsilon"] is not None and result["guarantee"] != "none"
    if finite:
        figure_ = f"epsilon {round_up(result['epsilon'])}, delta {result['delta']:g}"
        words = [
            f"({round_up(result['epsilon'])}, {result['delta']:g})-differential privacy for "
            f"all that this run has released. Neighbouring data: {result.get('adjacency', '-')}. "
            f"Accountant: {str(result.get('accountant', '-')).upper()}."
        ]
        target = result.get("target_epsilon")
        if target is not None:
            words.append(f" The target was {target:g}.")
    else:
        figure_ = "No guarantee"
        words = ["Epsilon is infinite: the model may reveal any of its training records."]
    parts: list[Html] = [element("strong", figure_, class_="figure"), element("p", *words)]
    known: list[tuple[object, object]] = []
    noise, beta = result.get("noise_multiplier"), result.get("beta")
    if isinstance(noise, int | float):
        known.append(("noise multiplier", f"{noise:.4g}"))
        if isinstance(beta, int | float) and beta < 1:
            known.append((f"accounted at (beta {beta:g})", f"{noise / beta:.4g}"))
    if isinstance(result.get("sample_rate"), int | float):
        known.append(("sampling rate", f"{result['sample_rate']:.4g}"))
    known.append(("releases", f"{result['steps']:,}"))
    marginal = _papers_figure(run) if finite else None
    if marginal is not None:
        soft = element("span", round_up(marginal), class_="soft")
        known.append(("papers' figure (diagnostic)", soft))
    parts.append(pairs(known))
    notes = [prose(str(caveat)) for caveat in result.get("caveats") or ()]
    warning = wording.weak(result["epsilon"])
    if warning is not None:
        notes.append(prose(warning))
    if marginal is not None:
        notes.append(
            prose(
                "The papers' figure is their RDP value at sigma/beta of one clipping group alone. "
                "It is a diagnostic, not a guarantee: a reader of the model sees every group."
            )
        )
    if notes:
        parts.append(bullets(notes, class_="note"))
    return card(*parts, warning=not finite)


def _papers_figure(run: Run) -> float | None:
    """What one group alone would cost, by the papers' conversion; None where that is the whole."""
    from vestige.privacy import accounting
    from vestige.privacy.ledger import Event

    result, facts = run.result, run.memory
    groups = len(facts["groups"]) if facts else 1
    if "per_layer" not in str(result.get("clipping")) or isinstance(result.get("clip"), list):
        return None  # the groups are the memory's, or have norms of their own
    numbers = [result.get(name) for name in ("noise_multiplier", "beta", "sample_rate")]
    if groups < 2 or not all(isinstance(n, int | float) and n > 0 for n in numbers):
        return None
    noise, beta, rate = (float(n) for n in numbers if n is not None)
    own = run.config.get("group_noise_multiplier")
    # A joint multiplier s in G groups, each with its share of the norm, is s sqrt(G) in each.
    of_group = float(own) if isinstance(own, int | float) else noise * groups**0.5
    event = Event(rate, of_group / beta, int(result["steps"]))
    return accounting.epsilon([event], result["delta"], "rdp_classic")


def _settings(run: Run) -> list[Html]:
    result = run.result
    method = METHODS.get(str(result["method"]))
    shown: list[Html] = []
    if method is not None:
        summary = f"{method.summary[:1].upper()}{method.summary[1:]}"
        shown.append(element("p", prose(f"{summary}. {method.paper}".strip())))
    names = {
        "model": "model",
        "parameters": "parameters",
        "records": "training records",
        "lot": "expected lot",
        "epochs": "epochs",
        "optimizer": "optimizer",
        "lr": "learning rate",
        "clip": "clipping norm",
        "clipping": "clipping",
        "device": "device",
    }
    known: list[tuple[object, object]] = [
        ("data", wording.dataset(Path(str(result["dataset"])).name)),
        ("method", result["method"]),
    ]
    known += [(label, wording.value(result[n])) for n, label in names.items() if n in result]
    known.append(("seed", str(result.get("seed", wording.NONE))))
    for name in ("averaging", "history_dtype", "train_size", "test_size"):
        if run.config.get(name) is not None:
            known.append((name.replace("_", " "), wording.value(run.config[name])))
    shown.append(pairs(known))
    settings = result.get("settings") or {}
    if settings:
        shown.append(element("h3", "The method's own settings"))
        shown.append(pairs((name, wording.value(value)) for name, value in settings.items()))
    return shown


def _layers(layers: Sequence[Layer]) -> Html:
    columns = [
        Column("layer", number=False),
        Column("shape", number=False),
        Column("eigenvalues"),
        Column("tail"),
        Column("exponent"),
        Column("interval", number=False),
        Column("tempering"),
    ]
    body = []
    for layer in layers:
        fit = layer.fit
        body.append(
            [
                layer.name.removesuffix(".weight"),
                " \N{MULTIPLICATION SIGN} ".join(map(str, layer.shape)),
                wording.NONE if fit is None else f"{len(fit.eigenvalues):,}",
                wording.NONE if fit is None else f"{fit.tail_size:,}",
                wording.number(layer.exponent, ".3f"),
                layer.place or wording.NONE,
                f"{layer.tempering:.3f}",
            ]
        )
    return table("Power-law exponents of the trained weights", columns, body)


def _origin(run: Run, made_by: str) -> list[Html]:
    files = [
        download(
            "metrics.jsonl: one line for each epoch",
            "metrics.jsonl",
            "".join(f"{json.dumps(line)}\n" for line in run.lines).encode(),
            packed=False,
        ),
        download("result.json", "result.json", _json(run.result)),
        download("config.json", "config.json", _json(run.config)),
    ]
    shown: list[Html] = [bullets(files, class_="downloads")]
    command = train_command(run)
    if command is not None:
        shown.append(element("p", "A run with these settings, and this page of its folder:"))
        shown.append(element("pre", f"{command}\n{made_by}"))
    else:
        shown.append(element("p", "This page, from the run folder:"))
        shown.append(element("pre", made_by))
    versions = run.result.get("versions") or {}
    shown.append(pairs((name, value) for name, value in versions.items()))
    return shown


def _json(values: dict[str, Any]) -> bytes:
    kept = {name: value for name, value in values.items() if name not in _PLACES}
    return f"{json.dumps(kept, indent=2)}\n".encode()


def train_command(run: Run) -> str | None:
    """The command line for a run with these settings; None for settings that it cannot say."""
    config, result = run.config, run.result
    if "group_noise_multiplier" in config or "planned_steps" not in config:
        return None
    method = METHODS.get(str(config.get("method")))
    defaults = method.load()().settings() if method else {}
    words = ["vestige train"]

    def say(option: str, value: Any) -> None:
        if value is not None:
            words.append(f"--{option} {shlex.quote(_word(value))}")

    say("dataset", Path(str(config.get("dataset"))).name)
    say("model", config.get("model"))
    say("method", config.get("method"))
    for name, value in (config.get("settings") or {}).items():
        if _word(defaults.get(name)) != _word(value):
            say("set", f"{name}={_word(value)}")
    if config.get("target_epsilon") is not None:
        say("epsilon", config["target_epsilon"])
    else:
        say("noise-multiplier", config.get("noise_multiplier"))
    for name in ("delta", "accountant", "lot"):
        say(name, config.get(name))
    say("steps", config["planned_steps"])
    for name in ("clip", "clipping", "lr", "seed", "averaging", "history_dtype"):
        say(name.replace("_", "-"), config.get(name))
    for name in ("train_size", "test_size"):
        say(name.replace("_", "-"), config.get(name))
    if "train_loss_outside_guarantee" in result:
        words.append("--train-loss")
    return " ".join(words)


def _word(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list | tuple):
        return ",".join(_word(item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
