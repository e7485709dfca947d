"""Protocol of secure sums: properties of its parts, and refusals of requests by a malicious server."""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl import Keyring, NoUsableReply, Registry
from fl.secure import AuthenticationError, MissingCryptography, ProtocolError, SecureSums, _crypto, _shamir
from fl.secure._session import ClientSession
from fl.secure._signed_messages import KeyBundle, RoundContext, sign_bundle
from tests.fl.secure_protocol import ProtocolRun, correlation, plain, recover
from tests.refused import refused

POINTS, SECRET = (
    "points must be different numbers from 1 to prime - 1; got",
    "secret must be a number of the field, from 0 to prime - 1",
)
FEW = settings(max_examples=20, deadline=None)


# Secret sharing.


@given(st.data(), st.integers(0, _shamir.PRIME - 1), st.integers(1, 9))
@FEW
def test_any_t_shares_recover_the_secret(data: st.DataObject, secret: int, count: int) -> None:
    threshold = data.draw(st.integers(1, count))
    points = data.draw(st.lists(st.integers(1, 2**40), min_size=count, max_size=count, unique=True))
    shares = dict(zip(points, _shamir.split(secret, points, threshold)))
    some = data.draw(st.permutations(points))[:threshold]
    assert recover({x: shares[x] for x in some}) == secret


@pytest.mark.parametrize(("prime", "count", "threshold"), [(5, 4, 3), (7, 4, 2), (5, 3, 3)])
def test_fewer_shares_are_independent_of_the_secret(prime: int, count: int, threshold: int) -> None:
    """Over all polynomials of a tiny field, t - 1 shares take every value equally often, for every secret."""
    points = list(range(1, count + 1))
    for some in itertools.combinations(range(count), threshold - 1):
        seen = []
        for secret in range(prime):
            found: Counter[tuple[int, ...]] = Counter()
            for coefficients in itertools.product(range(prime), repeat=threshold - 1):
                draws = iter(coefficients)
                shares = _shamir.split(secret, points, threshold, prime=prime, draw=lambda _, draws=draws: next(draws))
                found[tuple(shares[i] for i in some)] += 1
            seen.append(found)
        assert all(found == dict.fromkeys(itertools.product(range(prime), repeat=threshold - 1), 1) for found in seen)


def test_field_holds_every_key_and_has_prime_order() -> None:
    """Miller-Rabin test with forty bases; no number between 2^256 and the prime passes Fermat's test."""
    odd, twos = _shamir.PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1

    def passes(base: int) -> bool:
        x = pow(base, odd, _shamir.PRIME)
        return x in (1, _shamir.PRIME - 1) or any(pow(x, 2**i, _shamir.PRIME) == _shamir.PRIME - 1 for i in range(twos))

    assert all(passes(base) for base in range(2, 42))
    assert not [n for n in range(2**256 + 1, _shamir.PRIME, 2) if pow(3, n - 1, n) == 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1, [1, 2], 3), "threshold must be at most 2"), ((1, [1, 1], 1), POINTS), ((1, [0, 1], 1), POINTS),
        ((1, [_shamir.PRIME], 1), POINTS), ((-1, [1], 1), SECRET), ((_shamir.PRIME, [1], 1), SECRET),
    ],
)  # fmt: skip
def test_invalid_sharing_arguments_are_refused(arguments: tuple[int, list[int], int], said: str) -> None:
    refused(lambda: _shamir.split(*arguments), ValueError, said)


# The sum.


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_masks_cancel_exactly_with_any_dropouts(data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, 30), min_size=2, max_size=5, unique=True))
    threshold = data.draw(st.integers(len(numbers) // 2 + 1, len(numbers)))

    def some(of: list[int]) -> list[int]:
        return data.draw(st.permutations(of))[: data.draw(st.integers(threshold, len(of)))]

    word = st.integers(-(2**63), 2**63 - 1)
    length = data.draw(st.integers(0, 9))
    vectors = {
        k: torch.tensor(data.draw(st.lists(word, min_size=length, max_size=length)), dtype=torch.int64) for k in numbers
    }
    run = ProtocolRun(numbers, threshold)
    run.announce()
    dealt = some(numbers)
    run.deal(dealt)
    survivors = some(dealt)
    run.mask(vectors, survivors)
    signed = some(survivors)
    run.assent(survivors)
    run.signatures = {k: run.signatures[k] for k in signed}
    run.disclose(some(signed))
    wanted = torch.stack([vectors[k] for k in survivors]).sum(0)
    assert torch.equal(run.sum(), wanted)


def test_mask_is_one_stream_for_any_length() -> None:
    long, short = torch.zeros(2 * _crypto._WORDS + 5, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    _crypto.add_mask(long, bytes(range(32)), 1)
    _crypto.add_mask(short, bytes(range(32)), 1)
    assert torch.equal(long[:7], short)
    assert len(set(long[:: _crypto._WORDS // 4].tolist())) == len(long[:: _crypto._WORDS // 4])
    _crypto.add_mask(long, bytes(range(32)), -1)
    assert not long.any()


def test_chacha20_matches_the_rfc() -> None:
    """RFC 8439, appendix A.1, test vector 1: key stream of a zero key, nonce and counter."""
    first = torch.zeros(2, dtype=torch.int64)
    _crypto.add_mask(first, bytes(32), 1)
    stream = b"".join(w.to_bytes(8, "little", signed=True) for w in first.tolist())
    assert stream.hex() == "76b8e0ada0f13d90405d6ae55386bd28"


# What the server sees.


def test_vectors_pairs_and_triples_are_independent_of_the_values() -> None:
    """Even with the disclosed seeds, only the sum over all clients is unmasked."""
    vectors = plain(range(4))
    run = ProtocolRun(range(4), 3).run_until("disclose", vectors)
    opened = {k: run.masked[k].clone() for k in range(4)}
    for k in range(4):  # everybody's own mask, which the server does recover
        _crypto.add_mask(opened[k], run.secret(k), -1)
    for seen in (run.masked, opened):
        for size in (1, 2, 3):
            for some in itertools.combinations(range(4), size):
                for signs in itertools.product((1, -1), repeat=size):
                    total = sum(s * seen[k] for k, s in zip(some, signs))
                    true = sum(s * vectors[k] for k, s in zip(some, signs))
                    assert not (total == true).any()
                    assert abs(correlation(total, true)) < 5 / len(true) ** 0.5
    assert torch.equal(sum(opened[k] for k in range(4)), sum(vectors[k] for k in range(4)))


def test_late_vector_stays_masked_after_its_mask_key_was_recovered() -> None:
    """The reason for two masks: its vector arrives after the others have disclosed its mask key."""
    vectors = plain(range(4))
    run = ProtocolRun(range(4), 3).run_until("deal")
    run.mask(vectors, range(3))
    late = run.sessions[3].mask_vector(vectors[3], run.boxes_for(3))
    run.assent()
    run.disclose(range(3))
    assert torch.equal(run.sum(), vectors[0] + vectors[1] + vectors[2])
    key = run.secret(3)
    assert _crypto.agreement_public_key(key) == run.bundles[3].mask
    for other in range(3):
        mask = _crypto.derive_mask_key(key, run.bundles[other].mask, run.context.transcript(run.bundles))
        _crypto.add_mask(late, mask, 1)  # client 3 has subtracted those with smaller numbers
    assert not (late == vectors[3]).any()
    assert abs(correlation(late, vectors[3])) < 5 / len(late) ** 0.5


def test_masked_words_are_uniform_over_64_bits() -> None:
    masked = ProtocolRun(range(3), 2).run_until("mask", plain(range(3), 20000)).masked[1]
    counts = torch.bincount((masked >> 56) + 128, minlength=256).double()
    expected = len(masked) / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < 255 + 5 * (2 * 255) ** 0.5


# A server that lies.


def test_forged_keys_are_refused_by_name() -> None:
    run = ProtocolRun(range(4), 3).run_until("announce")
    stranger = _crypto.new_signing_key()
    keys = [_crypto.new_agreement_keys()[1] for _ in range(2)]
    run.bundles[2] = sign_bundle(run.context, 2, stranger, keys[0], keys[1], bytes(32))
    refused(lambda: run.deal([0]), AuthenticationError, "the keys of client 2 are not signed for this round")
    run.bundles[2] = KeyBundle(keys[0] + run.sessions[2].announce_keys()[32:])  # one key exchanged, the signature left
    refused(lambda: run.deal([1]), AuthenticationError, "client 2")
    own, other = run.sessions[2].keyring.signing_key(2), run.bundles[1]
    for pair in ((other.agreement, keys[1]), (keys[0], other.mask), (other.mask, keys[1])):
        run.bundles[2] = sign_bundle(run.context, 2, own, *pair, bytes(32))
        refused(lambda: run.deal([3]), ProtocolError, "two clients announce the same key")


def test_own_old_keys_are_detected() -> None:
    run = ProtocolRun(range(3), 2).run_until("announce")
    before = dict(run.bundles)
    run.announce()  # the round is run again
    run.bundles[0] = before[0]
    refused(lambda: run.deal([0]), ProtocolError, "passes on keys of client 0 that it did not announce")


def test_strangers_and_too_few_participants_are_refused() -> None:
    run = ProtocolRun(range(5), 3).run_until("announce")
    with pytest.raises(ProtocolError, match="2 clients take part, and the threshold is 3"):
        run.sessions[0].share_secrets({k: run.bundles[k] for k in (0, 1)})
    six = ProtocolRun(range(6), 3).run_until("announce")
    refused(lambda: six.deal([0]), ProtocolError, "more than half")
    with pytest.raises(AuthenticationError, match="client 9 have no key in the registry"):
        run.sessions[0].share_secrets({**{k: run.bundles[k] for k in range(3)}, 9: run.bundles[4]})


def test_changed_foreign_reflected_and_old_boxes_are_refused() -> None:
    first = ProtocolRun(range(4), 3).run_until("deal")
    second = ProtocolRun(range(4), 3, number=2, before=first).run_until("deal")
    honest = second.boxes_for(0)
    changed, reflected = honest[1][:-1] + bytes([honest[1][-1] ^ 1]), second.boxes[0][1]
    mask = partial(second.sessions[0].mask_vector, plain([0])[0])
    for box in (first.boxes[1][0], second.boxes[1][2], second.boxes[2][0], changed, reflected):
        said = "^client 1: cannot open a box: it was changed, or comes from another client or round$"
        refused(partial(mask, {**honest, 1: box}), AuthenticationError, said)
    refused(partial(mask, {k: honest[k] for k in (0, 1)}), ProtocolError, "2 clients are left, below the threshold")
    refused(partial(mask, {**honest, 9: changed}), ProtocolError, "client 9 shared its secrets, which is impossible")
    refused(partial(mask, {k: honest[k] for k in (1, 2, 3)}), ProtocolError, "not say that client 0 shared its secrets")


def test_vector_is_masked_only_once_and_steps_of_another_round_are_refused() -> None:
    """Otherwise the difference of two masked vectors would be that of their values."""
    run = ProtocolRun(range(3), 2).run_until("mask")
    refused(lambda: run.mask(plain([1]), [1]), ProtocolError, "its last step is 'masked' of round 1")
    later = ProtocolRun(range(3), 2, number=2, before=run).sessions[0]
    other = ClientSession(run.keyring, run.registry, replace(run.context, seed=4), 0)
    for session, number in ((later, 2), (other, 1)):
        said = f"client 0 was .* after 'masked' of round {number}, and its last step is 'masked' of round 1: each"
        refused(partial(session.sign_survivors, [0, 1, 2]), ProtocolError, said)


def test_client_signs_one_sum_and_discloses_once() -> None:
    """So no client discloses both shares of another: not on a repeated request, nor for other survivors."""
    run = ProtocolRun(range(4), 3).run_until("assent")
    sign = partial(run.sessions[0].sign_survivors, [0, 1, 2])
    refused(sign, ProtocolError, "'assent' of round 1.*each step is taken once")
    run.disclose(range(4))
    for repeated in (partial(run.disclose, [0]), sign):
        refused(repeated, ProtocolError, "its last step is nothing")
    assert not run.keyring.sessions


def test_inconsistent_survivors_disclose_nothing() -> None:
    """The server tells two clients that client 3 is in the sum, and one that it is not: no share is disclosed."""
    run = ProtocolRun(range(4), 3).run_until("mask")
    signatures = {k: run.sessions[k].sign_survivors([0, 1, 2, 3] if k < 2 else [0, 1, 2]) for k in range(3)}
    for k in range(3):
        with pytest.raises(AuthenticationError, match="for another sum than this client's"):
            run.sessions[k].disclose_shares(signatures)
        with pytest.raises(ProtocolError, match="clients are left"):
            run.sessions[k].disclose_shares({j: signatures[j] for j in range(3) if (j < 2) == (k < 2)})


def test_one_kind_of_share_is_disclosed_of_each_client() -> None:
    run = ProtocolRun(range(5), 3).run_until("deal")
    vectors = plain(range(5))
    held = {k: dict(run.keyring.sessions[k]) for k in range(5)}
    run.mask(vectors, range(3))
    run.assent()
    many = {**run.signatures, 3: run.signatures[0]}
    refused(lambda: run.sessions[0].disclose_shares(many), ProtocolError, "client 3 has signed, which is impossible")
    run.disclose(range(3))
    for k in range(5):
        found = run.secret(k).hex()
        assert found == held[k]["seed" if k < 3 else "mask"]
        assert found != held[k]["mask" if k < 3 else "seed"]


def test_too_few_or_foreign_survivors_are_refused() -> None:
    run = ProtocolRun(range(4), 3).run_until("mask")
    for survivors, said in (
        ([0, 1], "2 clients are left, below the threshold of 3"),
        ([1, 2, 3], "the server does not say that client 0 is in the sum, but sends it a request"),
        ([0, 1, 7], "client 7 is in the sum"),
        ([0, 1, 8, 7], "client 7 is in the sum, which is impossible"),
        ([0, 1, 2, 1], "one client twice is in the sum, which is impossible"),
    ):
        refused(partial(run.sessions[0].sign_survivors, survivors), ProtocolError, said)


def test_false_share_is_detected() -> None:
    run = ProtocolRun(range(4), 3).run_until("disclose")
    run.shares[1][2] = bytes(32) + b"\1"
    refused(lambda: run.sum(), NoUsableReply, r"client 2's secret from clients \[0, 1, 2\] do not give the secret")


def test_keys_of_small_order_are_refused() -> None:
    derive = partial(_crypto.derive_mask_key, _crypto.new_agreement_keys()[0])
    refused(lambda: derive(bytes(32), b""), AuthenticationError, "not a valid public key for key agreement")


# Keys on disk.


def test_keyring_is_private_and_persistent(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "ring")
    registry = ring.registry(3)
    assert registry == Keyring(tmp_path / "ring").registry([0, 1, 2]) != Keyring(tmp_path / "other").registry(3)
    turned = Registry({client: ring.enroll(client) for client in (2, 1, 0)})
    assert (turned, hash(turned), repr(turned)) == (registry, hash(registry), repr(registry))
    for some in (registry, ring.registry([4, 1])):
        some.write(tmp_path / "registry.json")
        assert Registry.read(tmp_path / "registry.json") == some
    ring.save_session(1, {"step": "keys"})
    assert Keyring(tmp_path / "ring").load_session(1) == {"step": "keys"}
    files = [p for p in (tmp_path / "ring").rglob("*") if p.is_file()]
    assert {p.name for p in files} == {"identity", "session"}
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "ring").iterdir()} == {0o700}
    for _ in range(2):  # the second time, there is none
        ring.delete_session(1)
        assert ring.load_session(1) is None
    assert registry.of(1).hex() not in repr(registry)


def test_invalid_registries_are_refused(tmp_path: Path) -> None:
    key, other = "ab" * 32, "cd" * 32
    for keys, said in (({0: key}, "at least two"), ({0: key, 1: key}, "one key twice"), ({0: key, 1: "x"}, "64 hexa")):
        refused(partial(Registry, keys), ValueError, said)
    refused(lambda: Registry([key, other]), TypeError, "clients' numbers")
    (tmp_path / "x").write_text("[1]", encoding="utf-8")
    refused(lambda: Registry.read(tmp_path / "x"), ValueError, "is not a registry")
    assert repr(Registry({0: key, 1: other})) != repr(Registry({0: key, 1: f"{other[:-2]}00"}))
    for count, shown in ((2, "0, 1"), (4, "0, 1, 2, 3"), (5, "0, 1, 2, ..., 4")):
        few = Registry({client: f"{client:064}" for client in range(count)})
        said = rf"client 7 is not in the registry, which has {count} clients \({shown}\)"
        refused(partial(few.of, 7), LookupError, said)
    refused(lambda: Keyring(tmp_path).signing_key(3), LookupError, "client 3 has no key in its keyring")


def test_error_without_cryptography_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    said = r'^secure sums need cryptography 50 or later \(.*x25519.*\): pip install "distillkit\[secure\]"$'
    refused(lambda: SecureSums(Registry({0: "ab" * 32, 1: "cd" * 32}), threshold=2), MissingCryptography, said)


# Keys and nonces.


def test_signed_and_derived_bytes_depend_on_all_that_they_state() -> None:
    """Two clients share one secret in both directions, so the box's key must depend on the direction, too."""
    texts, lists = (b"a", b"b"), ([0, 1], [0, 2], [0], [1, 2], [2])
    bundles = [{0: KeyBundle(bytes(160)), k: KeyBundle(bytes(159) + raw)} for k in (1, 2) for raw in texts]
    contexts = [RoundContext(*parts) for parts in itertools.product((3, 4), (1, 2), (3, 4))]
    private, (_, public) = _crypto.new_agreement_keys()[0], _crypto.new_agreement_keys()
    cases = {
        "keys": [context.keys_digest(k, text) for context in contexts for k in (1, 2) for text in texts],
        "transcript": [context.transcript(some) for context in contexts for some in bundles],
        "sum": [RoundContext.sum_digest(*parts) for parts in itertools.product(texts, lists, lists)],
        "box": [RoundContext.box_context(*parts) for parts in itertools.product(texts, (0, 1), (0, 1))],
        "mask key": [_crypto.derive_mask_key(private, public, text) for text in texts],
        "box key": [_crypto.seal_box(private, public, bytes(32), text)[:32] for text in texts],
        "key": [_crypto._derive_key(*parts) for parts in itertools.product(texts, ("mask", "box"), texts)],
    }
    assert {name: len(set(found)) for name, found in cases.items()} == {n: len(found) for n, found in cases.items()}


def test_bytes_of_the_protocol_are_fixed() -> None:
    """Clients with different releases of the library can take part in one sum."""
    key, public = bytes(range(32)), _crypto.agreement_public_key(bytes(32))
    context = RoundContext(seed=3, number=1, threshold=2)
    bundle = sign_bundle(context, 5, key, public, key, bytes(32))
    found = (
        bundle.raw, context.transcript({5: bundle}), RoundContext.sum_digest(b"t", [1, 2], [2]),
        _crypto.derive_mask_key(key, public, b"t"),
        _crypto.seal_box(key, public, b"content", RoundContext.box_context(b"t", 1, 2)),
    )  # fmt: skip
    assert [_crypto.digest("", value).hex()[:16] for value in found] == [
        "bdc00ae81bfe2c03", "81d15989d38208aa", "9bfc06f9510c81a7", "4cf61c9349d6b070", "4061d5ca17a558ff",
    ]  # fmt: skip


def test_no_key_is_kept_once_it_was_used() -> None:
    run = ProtocolRun(range(3), 2).run_until("deal")
    keys = {k: [run.keyring.sessions[k][name] for name in ("agreement", "mask", "seed")] for k in range(3)}
    assert all(len(key) == 64 for own in keys.values() for key in own)
    run.mask(plain(range(3)), range(3))
    for k in range(3):
        assert not [key for key in keys[k] if key in json.dumps(run.keyring.sessions[k])]
    run.assent()
    run.disclose(range(3))
    assert run.keyring.sessions == {}


def test_secrets_are_synced_before_a_step_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), sync(handle))[1])
    ring = Keyring(tmp_path)
    for change in (lambda: ring.enroll(0), lambda: ring.save_session(0, {"step": "keys"})):
        synced.clear()
        change()
        assert len(synced) == 2  # the file, and its name in the folder
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(side_effect=OSError("full")))
        refused(partial(ring.save_session, 0, {"step": "shares"}), OSError, "full")
    assert {path.name for path in (tmp_path / "0").iterdir()} == {"identity", "session"}
    assert ring.load_session(0) == {"step": "keys"}
    synced.clear()
    ring.delete_session(0)
    assert len(synced) == 1
    assert ring.load_session(0) is None
