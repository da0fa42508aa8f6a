"""Structured logs: one event per line on stderr, JSON for machines or coloured for a terminal.

Called once by `service.py` at start; `log_levels.py` changes it. Every event carries service, instance and,
while one is handled, the request's id; lines of the standard library's logging (aiohttp, asyncio, uvloop) take the same
way. Also decides that no error vanishes: unhandled exceptions of tasks, threads and callbacks are logged with their
traceback.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any, TextIO

import msgspec
import structlog

from cohort.common.config import LoggingConfig

_QUIET = ("aiohttp.access", "asyncio")  # below warning these say nothing that our own events do not


def configure_logging(
    config: LoggingConfig, *, service: str, instance: str, stream: TextIO | None = None
) -> structlog.stdlib.BoundLogger:
    """Set structlog and stdlib logging up for this process and return the service's logger. Repeating it replaces."""
    stream = stream or sys.stderr
    console = config.format == "console" or (config.format == "auto" and stream.isatty())

    def name_the_process(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("service", service)
        event.setdefault("instance", instance)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        name_the_process,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    render: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    )
    handler = logging.StreamHandler(stream)

    root = logging.getLogger()

    def write(logger: Any, method: str, event: Any) -> Any:
        """Write a line of ours without a record of the standard library's, which takes longer than all the rest."""
        if root.handlers != [handler]:  # somebody else listens
            return structlog.stdlib.ProcessorFormatter.wrap_for_formatter(logger, method, event)
        handler.acquire()  # the library's lines come between ours, not within
        try:
            with suppress(Exception):
                for step in render:
                    event = step(logger, method, event)
                stream.write(f"{event}\n")
                stream.flush()
        finally:
            handler.release()
        raise structlog.DropEvent

    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    set_log_level(config.level)
    logging.raiseExceptions = False  # a log whose reader is gone must not become errors of the service
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.PositionalArgumentsFormatter(), *shared, write],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(f"cohort.{service}").bind()  # not at every line
    _catch_the_unhandled(logger)
    return logger


def set_log_level(level: str) -> None:
    """Set the least severe level that this process writes: debug, info, warning or error."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def log_level() -> str:
    return logging.getLevelName(logging.getLogger().level).lower()


def log_loop_errors(loop: asyncio.AbstractEventLoop, logger: structlog.stdlib.BoundLogger) -> None:
    """Log errors that asyncio would drop or print: a task's unread exception, a failed callback."""

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        details = {key: repr(value) for key, value in context.items() if key not in ("message", "exception")}
        logger.error(str(context.get("message", "error on the event loop")), exc_info=error, **details)

    loop.set_exception_handler(handle)


def _catch_the_unhandled(logger: structlog.stdlib.BoundLogger) -> None:
    def in_main(kind: type[BaseException], error: BaseException, _: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            logger.critical("unhandled exception", exc_info=error)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        logger.error(
            "unhandled exception in a thread", thread=getattr(args.thread, "name", None), exc_info=args.exc_value
        )

    def in_finaliser(args: sys.UnraisableHookArgs) -> None:
        logger.error("exception that could not be raised", where=repr(args.object), exc_info=args.exc_value)

    sys.excepthook = in_main
    threading.excepthook = in_thread
    sys.unraisablehook = in_finaliser


def _to_json(event: Mapping[str, Any], **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
