"""`--ssl-certfile` and `--ssl-keyfile`, checked."""

from __future__ import annotations

from spillover.errors import SpilloverError


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Refuse a certificate and key that HTTPS cannot be served with; before anything is loaded."""
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
