"""Options of all commands that serve HTTP: address, limits, TLS, shutdown, log."""

from __future__ import annotations

from typing import Any

import click

from spillover.errors import SpilloverError

OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True,
                 help="Address to listen on; 0.0.0.0 lets other machines in."),
    click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535),
                 help="Port to listen on; 0 picks a free one."),
    click.option("--api-key", "api_keys", multiple=True, metavar="KEY", envvar="SPILLOVER_API_KEY",
                 help="Require this key from clients; may be given more than once.  [env: SPILLOVER_API_KEY]"),
    click.option("--max-request-bytes", default="4MiB", show_default=True, metavar="SIZE",
                 help="Maximum size of a request body."),
    click.option("--max-connections", default=4096, show_default=True, type=click.IntRange(min=1),
                 help="Maximum open connections; beyond it the longest idle one is closed."),
    click.option("--client-timeout", default=30.0, show_default=True, type=click.FloatRange(min=0.1), metavar="SECONDS",
                 help="Maximum time that a request may take to arrive; a body may take 1 s more per 16 KiB."),
    click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN",
                 help="Let pages from this origin send requests; may be given more than once."),
    click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
                 help="Accept requests for this host name, in addition to IP addresses and this machine's names; * "
                      "accepts all."),
    click.option("--ssl-certfile", default=None, metavar="FILE", help="Serve HTTPS with this certificate (PEM)."),
    click.option("--ssl-keyfile", default=None, metavar="FILE",
                 help="The certificate's key (PEM), if it is not in the same file."),
    click.option("--drain-seconds", default=30.0, show_default=True, type=click.FloatRange(min=0),
                 help="Maximum time for running requests to finish after Ctrl-C or SIGTERM."),
    click.option("--shutdown-delay-seconds", default=0.0, show_default=True, type=click.FloatRange(min=0),
                 help="Keep accepting requests for this long after SIGTERM while /readyz already answers 503, so that "
                      "load balancers notice first."),
    click.option("--log-requests/--no-log-requests", default=True, show_default=True, help="Log one line per request."),
    click.option("--log-format", default="text", show_default=True, type=click.Choice(("text", "json")),
                 help="How log lines are written to stderr."),
)


def http_options(command: Any) -> Any:
    """Add these options to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Refuse a certificate and key that HTTPS cannot be served with, before anything is loaded."""
    import ssl

    if certificate is None:
        if key is not None:
            raise SpilloverError("--ssl-keyfile needs --ssl-certfile, the certificate it belongs to")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise SpilloverError(f"--ssl-certfile {certificate}{f' with --ssl-keyfile {key}' if key else ''} cannot be "
                             f"used: {reason}; both are PEM files without a password") from None
