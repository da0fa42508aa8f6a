"""Sections of `cohort bench gpu-check`: each proves or measures one thing on a GPU, in a process of its own.

`python -m cohort.services.bench.gpu_check SECTION` runs one; `runner` runs all, with deadlines, and prints the table.
With `--device cpu` a section does the same with tiny shapes on the processor: nothing of that is a measurement, but no
line of it waits for a GPU to be run for the first time.
"""
