"""`cohort reproduce`: the papers' figures run anew, the verdicts on their rows, and the page that is made of them.

The room knows `figures/`, `core/` and `hardware/`.
"""
