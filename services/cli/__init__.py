"""The `cohort` command: one module per subcommand, each with `add_arguments(parser)` and `run(options) -> int`."""
