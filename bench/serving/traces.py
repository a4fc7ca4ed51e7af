"""Recorded traffic replayed: when requests came, how long they were, and which beginnings they shared.

    Mooncake, JSONL     {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}
    Azure, CSV          TIMESTAMP,ContextTokens,GeneratedTokens

Prompts are not in such traces. Of a Mooncake line each block of `block_tokens` is made up from its hash id alone, so equal ids are
equal tokens and a prefix cache finds what it found then; an Azure line shares nothing. Does not know clocks.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.serving.files import lines_of
from bench.serving.requests import BenchRequest, checked_length
from bench.serving.writer import Writer
from contracts.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
_LONGEST_S = 366 * 86_400.0
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(path: Path, writer: Writer, block_tokens: int, most: int) -> tuple[BenchRequest, ...]:
    """The first `most` requests; times from the first. Raises ConfigError naming file and line."""
    requests: list[BenchRequest] = []
    begin_ms = 0.0
    for where, text in lines_of(path, most):
        try:
            line = msgspec.json.decode(text, type=_Line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{where}: {error}") from error
        blocks = -(-checked_length(where, "input_length", line.input_length) // block_tokens)
        if min(line.hash_ids, default=0) < 0:
            raise ConfigError(f"{where}: hash_ids {min(line.hash_ids)} must be at least 0")
        if len(line.hash_ids) != blocks:
            raise ConfigError(
                f"{where}: {len(line.hash_ids)} hash_ids for input_length {line.input_length}; must be {blocks}, one a block of "
                f"{block_tokens} tokens (--trace-block-size)"
            )
        begin_ms = line.timestamp if not requests else begin_ms
        parts = [
            writer.write((4, block), min(block_tokens, line.input_length - index * block_tokens))
            for index, block in enumerate(line.hash_ids)
        ]
        at_s = (line.timestamp - begin_ms) / 1e3
        output_len = max(1, checked_length(where, "output_length", line.output_length, least=0))
        requests.append(BenchRequest(writer.joined(parts), output_len, line.input_length, at_s))
    return _in_time(path, requests)


def read_azure(path: Path, writer: Writer, most: int) -> tuple[BenchRequest, ...]:
    """The first `most` requests; times from the first. Raises ConfigError naming file and line."""
    lines = lines_of(path, most + 1)
    header = next(lines)[1].lstrip("\ufeff")
    if tuple(name.strip() for name in header.split(",")) != _AZURE:
        raise ConfigError(f"{path}:1: {header[:80]!r} must be {','.join(_AZURE)}")
    requests = tuple(_azure_requests(lines, writer))
    if not requests:
        raise ConfigError(f"{path} has no requests")
    return _in_time(path, list(requests))


def _azure_requests(lines: Iterator[tuple[str, str]], writer: Writer) -> Iterator[BenchRequest]:
    begin: datetime.datetime | None = None
    for index, (where, text) in enumerate(lines):
        try:
            row = next(csv.reader([text]))
            moment, input_len, output_len = row
            at, length, new = datetime.datetime.fromisoformat(moment), int(input_len), int(output_len)
            begin = at if begin is None else begin
            at_s = (at - begin).total_seconds()
        except (ValueError, TypeError, csv.Error) as error:
            raise ConfigError(f"{where}: {text[:80]!r} must be a time and two numbers of tokens: {error}") from error
        checked_length(where, _AZURE[1], length)
        answer_len = max(1, checked_length(where, _AZURE[2], new, least=0))
        yield BenchRequest(writer.write((5, index), length), answer_len, length, at_s)


def _in_time(path: Path, requests: list[BenchRequest]) -> tuple[BenchRequest, ...]:
    times = [request.at_s or 0.0 for request in requests]
    if times != sorted(times):
        raise ConfigError(f"{path}: requests must be in order of time")
    if times[-1] > _LONGEST_S:
        raise ConfigError(
            f"{path}: the last request comes {times[-1]:g} s after the first; must be within {_LONGEST_S:g} s"
        )
    return tuple(requests)
