"""What `diptych up` makes for a cluster's security: checked first, kept while it runs, taken away by whoever comes next."""

import asyncio
import datetime

import pytest
from cryptography import x509

from cli.clustersecurity import Certificates, cluster_security
from contracts.clock import VirtualClock
from contracts.errors import ConfigError
from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE, Authority, Period

PLAIN = {"protect_metrics": False, "tls": False, "tls_dir": None}


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    """Where temporary files are."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_cluster_left_is_taken_away_and_what_a_living_one_has_stays(tmp):
    left = tmp / "diptych-secrets-left"
    left.mkdir()
    (left / "lock").touch()
    (left / "cluster-secret").write_text("old")
    somebody = tmp / "diptych-secrets-begins"  # not locked yet
    somebody.mkdir()
    with cluster_security("127.0.0.1", None, **PLAIN) as first:
        assert not left.exists() and somebody.exists()
        with cluster_security("127.0.0.1", None, **PLAIN) as second:
            assert first.secret.exists() and second.secret.exists()
    assert list(tmp.iterdir()) == [somebody]


def test_a_link_in_its_place_is_not_followed(tmp):
    mine = tmp / "mine"
    mine.mkdir()
    (mine / "lock").touch()
    (tmp / "diptych-secrets-link").symlink_to(mine)
    with cluster_security("127.0.0.1", None, **PLAIN):
        assert (mine / "lock").exists()


def test_a_key_file_that_cannot_be_used_is_told_before_anything_is_made(tmp):
    with (
        pytest.raises(ConfigError, match=r"keys.json: No such file"),
        cluster_security("127.0.0.1", tmp / "keys.json", **PLAIN),
    ):
        pass
    assert not list(tmp.iterdir())


def ends(folder) -> datetime.datetime:
    return x509.load_pem_x509_certificate((folder / CERT_FILE).read_bytes()).not_valid_after_utc


async def test_certificates_are_renewed_by_the_same_authority_long_before_they_end(tmp):
    folder, clock, day = tmp / "tls", VirtualClock(), 86_400.0
    certificates = Certificates(folder, Authority.new("test", Period.of_days(3650)), ("localhost",))
    certificates.write()
    before = {name: (folder / name).read_bytes() for name in (CA_FILE, CERT_FILE, KEY_FILE)}
    assert datetime.timedelta(29) < ends(folder) - datetime.datetime.now(datetime.UTC) <= datetime.timedelta(30)
    keeping = asyncio.ensure_future(certificates.keep(clock))
    await asyncio.sleep(0)
    await clock.advance(9 * day)
    assert (folder / CERT_FILE).read_bytes() == before[CERT_FILE]
    await clock.advance(2 * day)
    async with asyncio.timeout(10):
        while (folder / KEY_FILE).read_bytes() == before[KEY_FILE]:
            await asyncio.sleep(0.001)
    assert (folder / CERT_FILE).read_bytes() != before[CERT_FILE]
    assert (folder / CA_FILE).read_bytes() == before[CA_FILE]
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


async def test_a_renewal_that_cannot_be_written_is_tried_again(tmp, caplog):
    folder, clock = tmp / "tls", VirtualClock()
    certificates = Certificates(folder, Authority.new("test", Period.of_days(3650)), ("localhost",))
    folder.touch()  # a file, where the folder is to be
    keeping = asyncio.ensure_future(certificates.keep(clock))
    await asyncio.sleep(0)
    await clock.advance(11 * 86_400.0)
    async with asyncio.timeout(10):
        while "could not be renewed" not in caplog.text:
            await asyncio.sleep(0.001)
        folder.unlink()
        while not (folder / CERT_FILE).exists():
            await clock.advance(3600.0)
            await asyncio.sleep(0.001)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
