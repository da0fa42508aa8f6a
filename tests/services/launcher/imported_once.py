"""The process that imported it."""

import os

PID = os.getpid()
