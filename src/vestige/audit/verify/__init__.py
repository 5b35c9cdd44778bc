"""`load("MODULE:factory")` finds a method, `verify(method)` runs every check that Vestige runs on
its own methods, on the real engine with small data of its own:

    claim    it claims a guarantee, and what it plans to be charged is what a run is charged
    replay   a neighbouring data set changes nothing but the sums, and those within the bound
    rows     a record moves its own clipped gradient and nothing else, however rows are folded;
             of the engine, with any method
    noise    the noise of releases has the law that the ledger was charged for
    lots     lots are drawn as they are charged
    audit    canaries: no empirical lower bound on epsilon above the claim

Guarantee: none. A failure is a counterexample (replay, rows, claim) or evidence at the stated rate
of false alarms (noise, lots, audit). A pass says that these attacks found nothing.
"""

from vestige.audit.verify.findings import Finding, Report
from vestige.audit.verify.loading import load
from vestige.audit.verify.verdict import CHECKS, TRIALS, Verdict, verify

__all__ = ["CHECKS", "TRIALS", "Finding", "Report", "Verdict", "load", "verify"]
