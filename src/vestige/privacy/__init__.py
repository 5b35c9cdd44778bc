"""What a run costs: events, ledgers, accountants, factorisations. No torch."""
