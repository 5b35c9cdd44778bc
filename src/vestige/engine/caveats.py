"""What the reader of an epsilon must know, in sentences: nothing for a plain run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vestige.methods import METHODS
from vestige.plan import ADJACENCY

if TYPE_CHECKING:  # a command line that is refused is not kept waiting for torch
    from vestige.engine.lineage import Things
    from vestige.engine.run import Run

SIZE = "dataset_size=..."
REPEATABLE = "repeatable noise: not private towards anyone who knows the seed"
REPEATABLE_BEFORE = (
    "another run on the ledger was in test mode: what all of them released is not private towards "
    "anyone who knows its seed"
)


def caveats(run: Run, adjacency: str, inherited: int, things: Things) -> list[str]:
    """All of them; `inherited` are releases of engines before, on whose ledger this one goes on."""
    plan, ledger = run.plan, run.door.ledger
    sentences = []
    if not plan.private:
        info = METHODS.get(plan.method)
        sentences.append(f"no guarantee: {info.guarantee if info else 'by its own account'}")
    if run.repeatable:
        sentences.append(REPEATABLE)
    if ledger.facts(but=run.door.run).test_mode:
        sentences.append(REPEATABLE_BEFORE)
    multipliers = plan.noise_multiplier
    if 0 in (multipliers if isinstance(multipliers, tuple) else (multipliers,)):
        sentences.append("no noise: nothing is private, epsilon is infinite")
    if adjacency != ADJACENCY:
        sentences.append(f"epsilon holds for another adjacency: {adjacency}")
    if plan.count_noise == 0:
        sentences.append("no noise on the counts: nothing is private, epsilon is infinite")
    if run.door.observers:
        sentences.append(
            "the door is watched: whoever put an observer there sees sums before their noise, and "
            "is not covered"
        )
    if run.capture.tracker.shared:  # not their shapes, which may follow the records
        sentences.append(
            "the model is given tensors without the batch's rows: they are taken for public"
        )
    if run.ways.unchecked is not None:
        sentences.append(f"that examples do not mix was not checked: {run.ways.unchecked}")
    if not plan.size_declared:
        sentences.append(
            f"the number of {plan.counted}, {plan.dataset_size}, is treated as public (it was not "
            f"declared as {SIZE})"
        )
    return sentences + run.declared + run.losses.caveats + _lineage(run, inherited, things)


def _lineage(run: Run, inherited: int, things: Things) -> list[str]:
    """What epsilon contains of other engines' releases, and what it leaves out."""
    ledger, sentences = run.door.ledger, []
    if inherited:
        sentences.append(
            "this model or its optimizer was trained before by another engine of this process: "
            f"the {inherited} releases on its ledger are part of epsilon"
            + ("" if ledger.file else " (they are on no file that knows of this run)")
        )
    if run.gap:
        sentences.append(
            "the run went on from a saved state without a ledger file: what was released after "
            "that state was saved is part of epsilon only as far as this process knows of it "
            "(keep a file, PrivacyEngine(ledger=FILE))"
        )
    return sentences + things.left_out_of(ledger)
