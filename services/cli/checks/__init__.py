"""The checks of `cohort doctor`: small functions that look at one thing each and say what is wrong and what helps.

    finding.py    what a check says
    machine.py    this machine, for a configuration that is about to be served
    files.py      the files it names: model, certificate, profile; packages and devices
    pipeline.py   a pipeline that runs: from one reading of its monitor and its processes
    reading.py    that reading

A check never changes anything. Its inputs are arguments, so that a test can break each of them.
"""
