"""Certificates of the webhook: made, renewed in an order that never fails a call, and refused by name."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from kvcellar_operator.certificates import (
    AUTHORITY_LIFE,
    SERVING_LIFE,
    Bundle,
    Serving,
    UnusableCertificate,
    expires_at,
    new_serving,
    next_bundle,
    problem_of,
)
from kvcellar_operator.cluster import Api
from kvcellar_operator.objects import Key
from kvcellar_operator.serving import LiveCertificate
from kvcellar_operator.trust import TrustKeeper

NAMES = ["kvcellar-webhook.kvcellar.svc", "127.0.0.1"]
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def fresh(now: datetime = NOW) -> Bundle:
    """The bundle that is made of nothing."""
    bundle = next_bundle(None, NAMES, now)
    assert bundle is not None
    return bundle


def authorities(bundle: Bundle) -> list[x509.Certificate]:
    """Its authorities, newest first."""
    return x509.load_pem_x509_certificates(bundle.authorities)


def is_trusted(bundle: Bundle, authority: x509.Certificate) -> bool:
    """Whether the authority signed what is served."""
    serving = x509.load_pem_x509_certificate(bundle.serving.certificate)
    try:
        serving.verify_directly_issued_by(authority)
    except (ValueError, InvalidSignature):
        return False
    return True


def test_a_new_bundle_is_good_and_needs_no_successor() -> None:
    bundle = fresh()
    assert problem_of(bundle.serving, NAMES, NOW) == ""
    assert is_trusted(bundle, authorities(bundle)[0])
    assert next_bundle(bundle, NAMES, NOW) is None
    assert next_bundle(bundle, NAMES, NOW + SERVING_LIFE / 2) is None
    assert expires_at(bundle.serving) == NOW + SERVING_LIFE


def test_an_old_serving_certificate_is_renewed_under_the_same_authority() -> None:
    bundle = fresh()
    later = NOW + SERVING_LIFE * 0.7
    renewed = next_bundle(bundle, NAMES, later)
    assert renewed is not None
    assert renewed.authorities == bundle.authorities
    assert renewed.serving != bundle.serving
    assert expires_at(renewed.serving) == later + SERVING_LIFE
    assert next_bundle(renewed, NAMES, later) is None


def test_a_new_authority_is_trusted_for_a_while_before_it_signs() -> None:
    old = fresh()
    now = NOW + AUTHORITY_LIFE * 0.7
    bundle = replace(old, serving=signed_by(old, now))

    overlapping = next_bundle(bundle, NAMES, now)
    assert overlapping is not None
    assert len(authorities(overlapping)) == 2
    assert overlapping.serving == bundle.serving
    assert is_trusted(overlapping, authorities(overlapping)[1])
    assert next_bundle(overlapping, NAMES, now + timedelta(minutes=9)) is None

    moved = next_bundle(overlapping, NAMES, now + timedelta(minutes=11))
    assert moved is not None
    assert moved.authorities == overlapping.authorities
    assert is_trusted(moved, authorities(moved)[0])
    assert next_bundle(moved, NAMES, now + timedelta(minutes=11)) is None

    # When the old one has expired it leaves the list, and only that changes.
    end = NOW + AUTHORITY_LIFE + timedelta(days=1)
    lasting = replace(moved, serving=signed_by(moved, end))
    cleaned = next_bundle(lasting, NAMES, end)
    assert cleaned is not None
    assert len(authorities(cleaned)) == 1
    assert cleaned.serving == lasting.serving


def test_a_serving_certificate_that_grows_old_meanwhile_waits_as_well() -> None:
    old = fresh()
    now = NOW + AUTHORITY_LIFE * 0.7
    bundle = replace(old, serving=signed_by(old, now - SERVING_LIFE * 0.7))
    overlapping = next_bundle(bundle, NAMES, now)
    assert overlapping is not None
    assert next_bundle(overlapping, NAMES, now + timedelta(minutes=9)) is None


def signed_by(bundle: Bundle, now: datetime) -> Serving:
    """A serving certificate that the bundle's newest authority made at a time."""
    key = serialization.load_pem_private_key(bundle.authority_key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return new_serving(authorities(bundle)[0], key, NAMES, now)


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: replace(good, authorities=b"no certificate"),
        lambda good: replace(good, authority_key=b"no key"),
        lambda good: replace(good, authority_key=good.serving.key),
        lambda good: replace(good, serving=Serving(b"", b"")),
        lambda good: replace(good, serving=Serving(good.serving.certificate, fresh().serving.key)),
        lambda good: replace(good, serving=fresh().serving),
    ],
)
def test_whatever_is_damaged_is_made_anew(damage: object) -> None:
    assert callable(damage)
    renewed = next_bundle(damage(fresh()), NAMES, NOW)
    assert renewed is not None
    assert problem_of(renewed.serving, NAMES, NOW) == ""
    assert is_trusted(renewed, authorities(renewed)[0])
    assert next_bundle(renewed, NAMES, NOW) is None


def test_another_name_brings_another_serving_certificate() -> None:
    bundle = fresh()
    renewed = next_bundle(bundle, [*NAMES, "other.kvcellar.svc"], NOW)
    assert renewed is not None
    assert renewed.authorities == bundle.authorities
    assert problem_of(renewed.serving, ["other.kvcellar.svc"], NOW) == ""


def test_problems_are_said_by_name() -> None:
    serving = fresh().serving
    assert "is not for other.svc" in problem_of(serving, ["other.svc"], NOW)
    assert "kvcellar-webhook.kvcellar.svc" in problem_of(serving, ["other.svc"], NOW)
    assert "expired at" in problem_of(serving, NAMES, NOW + SERVING_LIFE)
    assert "not valid before" in problem_of(serving, NAMES, NOW - timedelta(days=1))
    with pytest.raises(UnusableCertificate, match=r"tls\.crt holds no certificate"):
        problem_of(Serving(b"", serving.key), NAMES, NOW)
    with pytest.raises(UnusableCertificate, match=r"tls\.key is no private key"):
        problem_of(Serving(serving.certificate, b""), NAMES, NOW)
    with pytest.raises(UnusableCertificate, match="not the key of"):
        problem_of(Serving(serving.certificate, _key_of_another_kind()), NAMES, NOW)


def _key_of_another_kind() -> bytes:
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def test_keys_are_not_shown() -> None:
    bundle = fresh()
    assert "PRIVATE" not in repr(bundle)
    assert "PRIVATE" not in repr(bundle.serving)


# --- what is served, and trusted ------------------------------------------------------------------------


def test_a_pair_that_cannot_be_used_leaves_the_present_one_trusted() -> None:
    live = LiveCertificate(NAMES)
    first, second = fresh(datetime.now(UTC)), fresh(datetime.now(UTC))
    live.take(first.serving, first.authorities)
    live.take(Serving(second.serving.certificate, first.serving.key), second.authorities)
    assert "not the key" in live.problem
    assert live.authorities == first.authorities


class OneConfiguration:
    """An API server with one webhook configuration, which every keeper sees at once."""

    def __init__(self) -> None:
        self.webhook: dict[str, Any] = {"name": "inject.kvcellar.dev", "clientConfig": {}}
        self.keepers: list[tuple[TrustKeeper, LiveCertificate]] = []
        self.n_patches = 0

    def show(self) -> None:
        """What a watch would bring."""
        body = {"metadata": {"name": "zz"}, "webhooks": [self.webhook]}
        for keeper, live in self.keepers:
            keeper.cache.objects[Key("", "zz")] = body
            live.changed.set()

    async def patch(self, _path: str, changes: list[dict[str, Any]], _kind: str) -> None:
        """Set the one field."""
        await asyncio.sleep(0)
        self.n_patches += 1
        self.webhook = {**self.webhook, "clientConfig": {"caBundle": changes[1]["value"]}}
        self.show()


def test_replicas_that_hold_different_files_for_a_while_do_not_fight_over_the_trust() -> None:
    # A kubelet renews a mounted Secret within a minute or two, each at a time of its own.
    server = OneConfiguration()

    async def both() -> None:
        for _ in range(2):
            bundle, live = fresh(datetime.now(UTC)), LiveCertificate(NAMES)
            live.take(bundle.serving, bundle.authorities)
            server.keepers.append((TrustKeeper("zz", live), live))
        server.show()
        runs = asyncio.gather(*(keeper.run(cast("Api", server)) for keeper, _ in server.keepers))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runs, 0.5)

    asyncio.run(both())
    assert server.n_patches == 2
