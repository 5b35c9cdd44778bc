"""Attacks on our own mechanisms: lower bounds on epsilon to hold against the claimed upper bound.

    canary.py      worst-case gradients in one run, read off the releases: `audit(method, ...)`
    published.py   the methods that were published as private and are not, on adversarial data
    one_run.py     loss-based: one training run, many canaries, nothing but the final model
    bounds.py      from error rates to epsilon, with a stated confidence
    transcript.py  what the attacker sees: a narrow hook on the door
    replay.py      record and replay on neighbouring data
    neighbours.py  how far one record moves the clipped sum of any model: `sensitivity(model, ...)`
    rows_check.py  the same for rows that are folded with positions, views and heads
    rows_attack.py what it costs if rows are attributed to the wrong record
    noise_check.py the law of the noise against the ledger
    lots_check.py  lots against the rate that they are charged at
    verify.py      all of them on anybody's method: `vestige verify`

docs/audit.md says what each bound assumes and what it does not show. Nothing heavy is imported
here: `from vestige.audit.canary import audit`.
"""
