"""The measuring wing, `cohort bench WHAT`; nothing here serves.

    http        any OpenAI-style server, seen from a client; what `cohort bench` without a WHAT measures
    live        live pipelines, for `cohort compare --live` and for what breaks or profiles them
    engine      the CPU engine's steps; `inside` is the measuring process, where torch is
    links       the KV links between two processes
    decisions   what one decision of a policy costs, without model or processes
    gpu_check   everything that only a GPU can prove, for `scripts/gpu_check`
    fit         a machine's constants for the simulator, by `cohort profile`

Every other package has a module with `add_arguments(parser)` and `run(args)` that is cheap to import; modules that need
torch are imported, or started as a process, only when it runs. `rounds`, `output` and `child` are shared by all.
"""
