"""Where the program starts: signals and streams are in order before anything heavy is imported."""

from normjax.runs import signals


def run() -> None:
    """Carry out the command line of this process and exit."""
    signals.install()
    code = _code()
    signals.finish()
    raise SystemExit(code)


def _code() -> int:
    import os
    import sys

    from normjax.runs import edge, streams

    streams.install()
    edge.quiet()
    known = edge.given()
    signals.say(lambda name, forced: edge.interrupted(name, forced, known))
    # What a notebook says to programs that it starts is not meant for one without a display.
    os.environ["MPLBACKEND"] = "agg"
    try:
        from experiments import cli

        cli.main(known)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException as error:
        return edge.tell(error, known)
