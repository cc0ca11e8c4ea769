"""The soak of benchmarks/soak.py, short, on the shared server."""

import asyncio

from benchmarks.soak import KINDS, Limits, make_requests, soak
from tests.checkpoints import VOCAB_SIZE
from tests.server.harness import MODEL_NAME, Server

LIMITS = Limits(512, VOCAB_SIZE)


def test_requests_are_of_all_kinds_and_follow_the_seed() -> None:
    requests = make_requests(2000, LIMITS)
    assert {request.kind for request in requests} == set(KINDS)
    assert requests == make_requests(2000, LIMITS) != make_requests(2000, LIMITS, seed=1)


def test_server_is_after_mixed_requests_as_it_was_before(server: Server) -> None:
    report = asyncio.run(soak(server.url, server.process.pid, MODEL_NAME, LIMITS, 60, 16, compare=15))
    assert not report.faults, report
    assert report.ended.total() == 60 and report.ended.keys() == set(KINDS)
