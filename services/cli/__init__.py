"""The `cohort` command: one module per subcommand, each with `add_parser(subparsers)` and `run(options) -> int`."""
