"""The simulator's constants, fitted to measurements. Needs SciPy (the extra `predictor`); changes no file."""
