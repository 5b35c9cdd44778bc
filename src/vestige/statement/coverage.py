"""What a statement covers, what it does not, and what it takes for granted: in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vestige.plan import ADJACENCY, PrivacyPlan


def unit(plan: PrivacyPlan) -> dict[str, str]:
    """Whom the guarantee is about."""
    if plan.adjacency == ADJACENCY:
        compared = (
            "The guarantee compares the training data with the same data to which one record was "
            "added or from which one was removed: it hides whether a record was there at all, and "
            "so everything in it."
        )
    else:
        compared = (
            "The guarantee compares the training data with the same data in which one record "
            "contributes nothing (its gradient is zero) while its place stays: it hides what a "
            "record says, and not how many records there are. It is another, weaker relation than "
            "adding or removing a record, and figures under the two must not be compared."
        )
    return {
        "record": "one record: one row of the training data, input and label together",
        "adjacency": plan.adjacency,
        "compared": compared,
        "several_records": (
            "A person with several records is protected less: the loss grows with the number of "
            "records. The table gives upper bounds for several records of one person together."
        ),
    }


def covered() -> list[str]:
    """What may be published at the stated epsilon."""
    return [
        "The released model: its weights after training, and averaged weights where they are kept.",
        "Every earlier state of the weights and the public part of every checkpoint: optimizer, "
        "memory of releases, filters, ledger. Not the secrets file beside a checkpoint.",
        "Every release (noisy sum), diagnostics of the memory, and whatever else is computed from "
        "releases, weights and public settings.",
        "Figures measured on held-out data, as regards the training records. The held-out records "
        "themselves are not protected: such a figure is an exact function of them.",
    ]


def not_covered(
    plan: PrivacyPlan, run: Mapping[str, Any], repeatable: bool, repeatable_before: bool = False
) -> list[dict[str, str]]:
    """What the stated epsilon says nothing about."""
    rows = [
        ("hyper-parameter tuning", _tuning(run)),
        (
            "choice of a checkpoint",
            "Choosing a checkpoint, an epoch or one of several models by figures on private "
            "records, such as the training loss or the accuracy on a part of the data that was "
            "held back: it looks at those records without noise. A rule that was fixed before, or "
            "one that reads releases and public data alone, costs nothing.",
        ),
        (
            "preprocessing",
            "Whatever was computed from the data before training: normalisation by means or "
            "deviations of the data, vocabularies, selection of features, removal of duplicates "
            "or outliers, the choice of the data itself. Vestige's own loader scales pixels by "
            "public constants and reads nothing off the data but its shapes and, where it is not "
            "declared, the number of classes.",
        ),
        ("logged training figures", _figures(run)),
        ("seeds", _seeds(run, repeatable, repeatable_before)),
        ("number of records", _size(plan)),
        ("number of classes", _classes(run)),
        (
            "held-out data",
            "Records that figures were measured on. If they must be protected too, do not "
            "publish the figures.",
        ),
        (
            "initial weights",
            "Data that a model was trained on before this run. Weights drawn at random hold none.",
        ),
        (
            "several records of one person",
            "The stated epsilon is that of one record. What a record says about other people "
            "(relatives, friends in a photograph) is not limited to its own row.",
        ),
        (
            "other uses of the data",
            "Other models, statistics or queries on the same records, unless they are in the same "
            "ledger. Their costs add up.",
        ),
        (
            "side channels",
            "Timing (times follow the sizes of lots, so a run folder holds none; the dates of its "
            "files are times too), memory use, swap space, crash dumps, GPU memory, the sizes of "
            "lots as the machine sees them, and whoever can read the memory of the training "
            "process.",
        ),
        (
            "floating point",
            "The noise is a rounded Gaussian in floating point, as in other libraries of this "
            "kind. Attacks on such rounding are known (Mironov 2012; arXiv 2112.05307) and are "
            "not part of the figure.",
        ),
    ]
    return [{"what": what, "text": text} for what, text in rows]


def _tuning(run: Mapping[str, Any]) -> str:
    note = run.get("tuning")
    known = f"Declared: {note} " if note else "Nothing was declared about tuning. "
    return (
        f"{known}Choosing settings by trying runs on the same data reveals something that this "
        "figure does not contain. Every such run costs as well and composes with this one; on a "
        "common ledger they are added up."
    )


def _figures(run: Mapping[str, Any]) -> str:
    written = run.get("outside_guarantee") or []
    if not written:
        return (
            "Losses, accuracies or norms that are computed on training records without noise. "
            "This run has declared no such figure."
        )
    return (
        f"This run has written {', '.join(map(str, written))}: exact functions of the training "
        "records, without noise. They must not be published with the model."
    )


def _seeds(run: Mapping[str, Any], repeatable: bool, repeatable_before: bool) -> str:
    seed = run.get("seed")
    harmless = "" if seed is None else f"The seed of initial weights and splits, {seed}, is public "
    harmless += "" if seed is None else "and harmless. "
    if repeatable:
        return (
            f"{harmless}Lots, noise, and random numbers inside the model came from a seed that "
            "somebody chose (test mode): nothing is protected from whoever knows it or guesses it. "
            "The seed is not written here."
        )
    before = (
        " Those of another run in the same ledger came from a seed that somebody chose (test "
        "mode): whoever knows it sees through that part of the claim."
    )
    return (
        f"{harmless}Lots, noise, and random numbers inside the model and while data was read "
        "(dropout, augmentation) came from a key of the operating system's entropy, which is never "
        "written. Whoever had it could take the noise off. Random numbers that the training loop "
        "drew for a batch by itself, from a seed that somebody knows, are not covered."
        + (before if repeatable_before else "")
    )


def _size(plan: PrivacyPlan) -> str:
    if plan.size_declared:
        return (
            f"{plan.dataset_size} was declared as the public size of the data; the true number of "
            "records was used for nothing but drawing lots."
        )
    return (
        f"{plan.dataset_size} was read off the data and is treated as public. Where the size is "
        "itself confidential, declare one (dataset_size)."
    )


def _classes(run: Mapping[str, Any]) -> str:
    if run.get("classes_inferred"):
        count = run.get("classes")
        number = "It" if count is None else f"{count}"
        return f"{number} was read off the labels and is treated as public."
    return "Taken from a table or declared, or part of the model that was handed over: public."


def assumptions() -> list[str]:
    """What has to be true for the statement to hold, and what the software cannot check."""
    return [
        "The loss of a row depends on that row alone. Vestige's own training loop takes care of "
        "it; in another loop it is the author's duty (docs/guide.md).",
        "Noise, sampling rates and the number of steps were fixed before the first lot; everything "
        "else may have followed the releases.",
        "Training used the lots of the private loader as they came; no lot was dropped by what it "
        "held.",
        "The key of lots, noise and masks stayed inside the training process, and the operating "
        "system's entropy was good.",
        "The ledger is complete: it was not deleted, cut or replaced, and other runs on the same "
        "data are in it or are accounted for elsewhere.",
    ]
