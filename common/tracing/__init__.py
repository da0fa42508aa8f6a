"""OpenTelemetry traces: one per request, over all processes it goes through.

    traceparent.py   the W3C header: it comes from clients and rides in `Request` and `PredictLength`
    spans.py         spans of one process: made by the SDK, exported by a thread over OTLP/HTTP
    observed.py      a machine whose events and effects become spans; the machine itself where tracing is off
    manager.py       spans of the manager: queue, placement, binding, lost attempts
    worker.py        spans of a worker: wait, prefill iterations, KV transfers, decode

`services/gateway/generation/request_trace.py` has the gateway's. Nothing here decides anything: a request without a
traceparent is not traced, and the gateway alone gives one.
"""
