"""What a service process is told by flags and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.invocation import Invocation, holds_password
from headrace.secret import redis_url, secret

ENVIRON = {"HEADRACE_REDIS_URL": "redis://:secret@h:1/0", "HEADRACE_RUN": "r1", "HEADRACE_METRICS_PORT": "9100"}


def test_flags_go_before_the_environment() -> None:
    told = Invocation.of("producer", {}, ENVIRON)
    assert (told.url, told.run_id, told.metrics_port) == ("redis://:secret@h:1/0", "r1", 9100)
    assert told.name.startswith("producer-")
    assert "secret" not in repr(told)
    flags = {"redis_url": "redis://h:2", "run": "r2", "name": "p-1.a", "metrics_port": "0"}
    assert Invocation.of("producer", flags, ENVIRON) == Invocation("redis://h:2", "r2", "p-1.a", 0)


def test_secrets_may_stand_in_files(tmp_path: Path) -> None:
    url, token = tmp_path / "url", tmp_path / "token"
    url.write_text("redis://:secret@h:1/0\n")
    token.write_text("t0ken\n")
    environ = {"HEADRACE_REDIS_URL_FILE": str(url), "HEADRACE_METRICS_TOKEN_FILE": str(token), "HEADRACE_RUN": "r1"}
    told = Invocation.of("producer", {}, environ)
    assert (told.url, told.metrics_token) == ("redis://:secret@h:1/0", "t0ken")
    assert "secret" not in repr(told)
    assert "t0ken" not in repr(told)


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("redis://redis:6379/0", "redis://:p%2F%40%20%25@redis:6379/0"),
        (
            "rediss://user@[::1]:6379/0?ssl_ca_certs=%2Fca",
            "rediss://user:p%2F%40%20%25@[::1]:6379/0?ssl_ca_certs=%2Fca",
        ),
        ("redis://me%40home@redis", "redis://me%40home:p%2F%40%20%25@redis"),
        ("redis://user:own@redis", "redis://user:own@redis"),
        ("", ""),
    ],
)
def test_a_password_by_itself_goes_into_a_url_that_has_none(url: str, full: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("p/@ %\n")
    assert redis_url({"HEADRACE_REDIS_URL": url, "HEADRACE_REDIS_PASSWORD_FILE": str(file)}) == full
    assert redis_url({"HEADRACE_REDIS_URL": url}) == url


@pytest.mark.parametrize("flags", [{}, {"redis_url": "redis://[::1:6379"}])
def test_a_url_that_is_none_is_refused_and_not_shown(flags: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=r"HEADRACE_REDIS_URL is not a URL as redis://host:6379 \(Invalid IPv6"
    ) as told:
        Invocation.of("producer", flags, {**ENVIRON, "HEADRACE_REDIS_URL": "redis://:secret@[::1:6379"})
    assert "secret" not in str(told.value)


def test_a_password_goes_with_the_url_of_a_flag() -> None:
    told = Invocation.of("producer", {"redis_url": "redis://h"}, {**ENVIRON, "HEADRACE_REDIS_PASSWORD": "p"})
    assert told.url == "redis://:p@h"


@pytest.mark.parametrize(
    ("content", "also", "sentence"),
    [
        (None, {}, "SECRET_FILE names .*, which is missing; write the secret into a file there"),
        (b" \n", {}, "SECRET_FILE names .*, which is empty; write the secret into it"),
        (b"x" * 70_000, {}, "SECRET_FILE names .*, which is longer than 65536 letters; write the secret into it"),
        (b"\xff", {}, "SECRET_FILE names .*, which cannot be read"),
        (b"x", {"SECRET": "y"}, "SECRET and SECRET_FILE are both set; leave one of them out"),
    ],
)
def test_a_file_without_a_secret_is_one_sentence(
    content: bytes | None, also: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        secret("SECRET", {"SECRET_FILE": str(file), **also})


@pytest.mark.parametrize(
    ("flags", "environ", "sentence"),
    [
        ({"redis_url": "redis://:secret@h"}, ENVIRON, "--redis-url holds a password"),
        ({}, {"HEADRACE_RUN": "r1"}, "HEADRACE_REDIS_URL is not set"),
        ({"redis_url": "redis://h"}, {}, "no run is named; set HEADRACE_RUN or pass --run"),
        (
            {"name": "../x"},
            ENVIRON,
            "producer name '../x' must be 1 to 100 letters, digits, dots, underscores and dashes",
        ),
        ({"metrics_port": "70000"}, ENVIRON, "metrics port '70000' is not a number from 0 to 65535"),
    ],
)
def test_what_is_missing_or_wrong_is_one_sentence(
    flags: dict[str, str | bool | None], environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        Invocation.of("producer", flags, environ)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://u:p@h", "rediss://:p@h:1/0", "redis://h?password=p", "u:p@h", ":p@h:6379"])
def test_passwords_in_urls_are_seen(url: str) -> None:
    assert holds_password(url)


@pytest.mark.parametrize("url", ["", "redis://h:1/0", "redis://user@h", "unix:///tmp/redis.sock", "redis://h?db=1"])
def test_urls_without_a_password_pass(url: str) -> None:
    assert not holds_password(url)
