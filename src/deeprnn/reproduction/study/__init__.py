"""A study: contenders with one grid, chosen on validation, then trained with new seeds and scored on test once.

study = read_study("depth")                       # the plan, decided before the first run
run_study(study, settings, ledger)                # goes on where it stopped
print(text(results(study, ledger)))
"""
