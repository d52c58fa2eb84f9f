"""The webhook's certificates: made, checked and renewed. Pure: bytes and a clock in, bytes out.

A bundle is what the Secret holds: the authorities that the API server is to trust, newest first, the
newest one's key, and the serving certificate with its key. Its life, so that a call never fails::

    nothing, or unusable  -> new authority, new serving certificate
    serving is old        -> new serving certificate of the newest authority
    authority is old      -> a new authority goes in front; serving stays with the old one
    ... `_OVERLAP` later  -> new serving certificate of the newest authority: by now the API server
                             trusts it
    an authority expired  -> it leaves the list

Private keys stay inside these bytes; nothing here logs or shows them.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvcellar.errors import ConfigurationError

AUTHORITY_LIFE = timedelta(days=3650)
SERVING_LIFE = timedelta(days=90)
_OVERLAP = timedelta(minutes=10)
"""How long a new authority is only trusted before it signs; the API server is told within seconds."""
_SKEW = timedelta(minutes=5)
"""Certificates begin a little in the past, for clocks that are behind."""


class UnusableCertificate(ConfigurationError):
    """A certificate, key or authority that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What a TLS server needs, in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Authorities and serving certificate; see the module's docstring."""

    authorities: bytes
    authority_key: bytes = field(repr=False)
    serving: Serving


def next_bundle(bundle: Bundle | None, names: Sequence[str], now: datetime) -> Bundle | None:
    """The bundle that should follow, or None if the present one is good.

    Args:
        bundle: what there is; None for nothing.
        names: DNS names and IP addresses that the serving certificate has to be for.
        now: aware of its time zone.
    """
    if bundle is None:
        return _new_bundle(names, now)
    try:
        authorities = _load_chain(bundle.authorities, "the authorities")
        signing_key = _load_key(bundle.authority_key, "the authority's key")
    except UnusableCertificate:
        return _new_bundle(names, now)
    newest = authorities[0]
    if not isinstance(signing_key, ec.EllipticCurvePrivateKey) or not _is_valid(newest, now):
        return _new_bundle(names, now)
    if newest.public_key() != signing_key.public_key():
        return _new_bundle(names, now)
    if _is_old(newest, now):
        certificate, key = _new_authority(now)
        trusted = [certificate, *(each for each in authorities if _is_valid(each, now))]
        return replace(bundle, authorities=_chain_pem(trusted), authority_key=_key_pem(key))
    if _needs_serving(bundle, authorities, names, now):
        serving = new_serving(newest, signing_key, names, now)
        return replace(bundle, serving=serving)
    trusted = [each for each in authorities if _is_valid(each, now)]
    if len(trusted) < len(authorities):
        return replace(bundle, authorities=_chain_pem(trusted))
    return None


def problem_of(serving: Serving, names: Sequence[str], now: datetime) -> str:
    """What is wrong with a serving certificate, in one sentence; "" if nothing.

    Raises:
        UnusableCertificate: it is no certificate, or the key is none or not its own.
    """
    certificate = _load_chain(serving.certificate, "tls.crt")[0]
    if _load_key(serving.key, "tls.key").public_key() != certificate.public_key():
        raise UnusableCertificate("tls.key is not the key of tls.crt: give the pair")
    if now < certificate.not_valid_before_utc:
        return f"tls.crt is not valid before {certificate.not_valid_before_utc.isoformat()}"
    if now >= certificate.not_valid_after_utc:
        return f"tls.crt expired at {certificate.not_valid_after_utc.isoformat()}: renew it"
    present = _names_of(certificate)
    missing = [name for name in names if not _covers(present, name)]
    if missing:
        return (
            f"tls.crt is not for {missing[0]}, which the API server asks for, but for "
            f"{', '.join(sorted(present)) or 'no name'}: add it to the subject alternative names"
        )
    return ""


def expires_at(serving: Serving) -> datetime:
    """When the serving certificate ends.

    Raises:
        UnusableCertificate: it is no certificate.
    """
    return _load_chain(serving.certificate, "tls.crt")[0].not_valid_after_utc


# --- make -----------------------------------------------------------------------------------------------


def _new_bundle(names: Sequence[str], now: datetime) -> Bundle:
    authority, key = _new_authority(now)
    serving = new_serving(authority, key, names, now)
    return Bundle(_chain_pem([authority]), _key_pem(key), serving)


def _new_authority(now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # A serial in the name keeps two authorities apart where they are looked up by subject.
    serial = x509.random_serial_number()
    name = _common_name(f"kvcellar webhook authority {serial:x}"[:64])
    builder = (
        _builder(name, name, now, AUTHORITY_LIFE)
        .serial_number(serial)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return builder.sign(key, hashes.SHA256()), key


def new_serving(
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    now: datetime,
) -> Serving:
    """A serving certificate for these names, valid from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = (
        _builder(_common_name("kvcellar webhook"), authority.subject, now, SERVING_LIFE)
        .serial_number(x509.random_serial_number())
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_general_names(names)), critical=False)
        .add_extension(issuer_key, critical=False)
    )
    certificate = builder.sign(authority_key, hashes.SHA256())
    return Serving(_chain_pem([certificate]), _key_pem(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    return builder.not_valid_before(now - _SKEW).not_valid_after(now + life)


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_names(names: Sequence[str]) -> list[x509.GeneralName]:
    return [x509.IPAddress(ip) if (ip := _address(name)) else x509.DNSName(name) for name in names]


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


# --- look -----------------------------------------------------------------------------------------------


def _needs_serving(
    bundle: Bundle, authorities: list[x509.Certificate], names: Sequence[str], now: datetime
) -> bool:
    try:
        if problem_of(bundle.serving, names, now):
            return True
        certificate = _load_chain(bundle.serving.certificate, "tls.crt")[0]
    except UnusableCertificate:
        return True
    newest = authorities[0]
    if not any(_is_signed_by(certificate, each) for each in authorities):
        return True
    is_published = now >= newest.not_valid_before_utc + _SKEW + _OVERLAP
    return is_published and (_is_old(certificate, now) or not _is_signed_by(certificate, newest))


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_valid(certificate: x509.Certificate, now: datetime) -> bool:
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def _is_old(certificate: x509.Certificate, now: datetime) -> bool:
    """Two thirds of its life are over."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now >= begin + (end - begin) * 2 / 3


def _names_of(certificate: x509.Certificate) -> set[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    addresses = {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    return addresses | {name.lower() for name in names.get_values_for_type(x509.DNSName)}


def _covers(present: set[str], name: str) -> bool:
    name = str(_address(name) or name).lower()
    _, _, parent = name.partition(".")
    return name in present or (bool(parent) and f"*.{parent}" in present)


def _load_chain(pem: bytes, what: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise UnusableCertificate(f"{what} holds no certificate in PEM: {error}") from error


def _load_key(pem: bytes, what: str) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UnusableCertificate(f"{what} is no private key in PEM without a password") from error


def _chain_pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
