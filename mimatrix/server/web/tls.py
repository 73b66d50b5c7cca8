"""The certificate and key of TLS, checked before anything is served, with readable errors."""

import ssl
from pathlib import Path

from mimatrix.core.errors import UserError

_MAKE = "openssl req -x509 -newkey rsa:2048 -nodes -days 365 -keyout key.pem -out cert.pem"


def check_certificate(cert: Path, key: Path) -> None:
    """Refuse a certificate and a key that cannot be used together.

    Raises:
        UserError: One of them is missing, unreadable, encrypted or damaged, or they do not match.
    """
    _check_part(cert, b"-----BEGIN CERTIFICATE-----", "certificate", "--tls-cert")
    text = _check_part(key, b"PRIVATE KEY-----", "key", "--tls-key")
    if b"ENCRYPTED" in text:
        raise UserError(
            f'the key "{key}" asks for a password; take it off: openssl pkey -in {key.name} -out open-{key.name}'
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UserError(
                f'"{key}" is the key of another certificate than "{cert}"; give two that were made together'
            ) from None
        raise UserError(f'"{cert}" or "{key}" is damaged or too weak; obtain or create them again: {_MAKE}') from None


def _check_part(file: Path, mark: bytes, what: str, option: str) -> bytes:
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f'"{file}" is not there; name the file in PEM format') from None
    except OSError as error:
        raise UserError(
            f'the {what} "{file}" cannot be read ({error.strerror}); let the user of the server read it'
        ) from None
    if mark not in text:
        raise UserError(f'"{file}" holds no {what} in PEM format; give {option} a file that has one')
    return text
