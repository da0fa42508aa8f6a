import os
ON = {k: float(v or 1) for k, _, v in (t.partition("=") for t in os.environ.get("GAIN", "").split("+") if t)}
