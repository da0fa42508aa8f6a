"""The simulator's constants, fitted to measurements. For `cohort profile`; needs SciPy (the extra `predictor`)."""
