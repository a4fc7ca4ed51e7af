"""URLs of a Redis: what is taken, what is refused and how, and that a password is never shown."""

import pytest

from contracts.errors import ConfigError
from registry.config import RedisAddress, RedisConfig, parse_redis_url, with_credentials


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", RedisAddress("h")),
        ("redis://h:7/", RedisAddress("h", 7)),
        ("redis://h:7/3", RedisAddress("h", 7, 3)),
        ("redis://:p%40%2F:x@h:7/3", RedisAddress("h", 7, 3, None, "p@/:x")),
        ("redis://u:p@[::1]:7", RedisAddress("::1", 7, 0, "u", "p")),
        ("rediss://h", RedisAddress("h", tls=True)),
    ],
)
def test_what_is_taken(url, address):
    assert parse_redis_url(url) == address


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "must begin with redis:// or rediss://"),
        ("h:6379", "must begin with redis:// or rediss://"),
        ("http://h", "must begin with redis:// or rediss://"),
        ("redis://", "must be redis://host:port/db"),
        ("redis://:secret@", "must be redis://host:port/db"),
        ("redis://u:secret@h:70000", "port from 1 to 65535"),
        ("redis://u:secret@h:x", "port from 1 to 65535"),
        ("redis://u:secret@h:0", "must be redis://host:port/db"),
        ("redis://u:secret@h/x", "database 'x' must be a number"),
        ("redis://u:secret@h/-1", "database '-1' must be a number"),
        ("redis://u:secret@h/0/1", "database '0/1' must be a number"),
        ("redis://u:secret@h?password=secret", "'password' is not known"),
        ("redis://h?ssl_ca_certs=x", "'ssl_ca_certs' is not known"),
        ("rediss://u:secret@h?ssl_ca_certs=/no/such", "ssl_ca_certs: no such file: '/no/such'"),
        ("redis:/u:secret@h", "must be redis://host:port/db"),
        ("u:secret@h", "must begin with redis:// or rediss://"),
        ("redis://u:secret@[h", "must be redis://host:port/db"),
    ],
)
def test_what_is_refused_in_one_line_that_hides_the_password(url, said):
    with pytest.raises(ConfigError, match=r"^--registry: ") as caught:
        parse_redis_url(url)
    assert said in caught.value.message
    assert "secret" not in caught.value.message
    assert "\n" not in caught.value.message


def test_a_password_is_in_no_repr():
    address = parse_redis_url("redis://user:secret@h:7/3")
    for text in (str(address), repr(address), repr(RedisConfig(address))):
        assert "secret" not in text
    assert str(address) == "redis://h:7/3"


def test_credentials_come_from_the_url_else_a_file_else_the_environment(tmp_path):
    file = tmp_path / "password"
    file.write_text("of the file\n")
    variables = {"DIPTYCH_REDIS_PASSWORD": "of the environment", "DIPTYCH_REDIS_USERNAME": "user"}
    own, bare = RedisAddress("h", password="own", username="me"), RedisAddress("h")
    assert with_credentials(own, file, variables) == own
    found = with_credentials(bare, file, variables)
    assert (found.username, found.password) == ("user", "of the file")
    assert with_credentials(bare, None, variables).password == "of the environment"
    assert with_credentials(bare, None, {}).password is None


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), (b"\n", "is empty"), (b"\xff", "UTF-8")])
def test_a_password_file_that_is_no_use_is_named(tmp_path, content, said):
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--registry-password-file: {file}: .*{said}"):
        with_credentials(RedisAddress("h"), file, {})
