"""Whether plots can be drawn here. Asked by every command with `--plot` before it measures or simulates anything."""

from __future__ import annotations

from cohort.common.errors import ConfigError


def check_available() -> None:
    """Raises `ConfigError` without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'cohort-serve[bench]'") from error
