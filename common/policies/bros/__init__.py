"""BROS: real-time and best-effort requests on the same device, their KV in the same blocks (mechanisms R1-R15)."""
