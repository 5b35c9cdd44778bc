"""Attacks on our own mechanisms: lower bounds on epsilon to hold against the claimed upper bound.

    options.py   what is audited: `AuditOptions`
    loop.py      the training loop of every check and attack
    tape.py      what an attacker, or a check, sees: an observer at the door
    attack/      canaries, one run, published methods, mis-attributed rows
    bounds.py    from error rates to epsilon, with a stated confidence
    result.py    from scores to an `AuditResult`; plot.py and table.py show it
    mixing.py    the known covariance of correlated noise
    verify/      the checks on anybody's method: `vestige verify`

docs/audit.md says what each bound assumes and what it does not show. Nothing heavy is imported
here: `from vestige.audit.attack import audit`.
"""
