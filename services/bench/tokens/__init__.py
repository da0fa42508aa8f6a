"""What a streamed token costs in processor time, by process and thread; see `command.py`."""
