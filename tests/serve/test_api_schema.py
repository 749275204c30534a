"""Requests that schemathesis makes out of our own OpenAPI document: each is answered as that says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from served import message, served

from nanok3.serve.http_gate import GateSettings
from nanok3.serve.server import ServerSettings

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
pytestmark = pytest.mark.usefixtures("unchecked")
ADMIN = {"Authorization": "Bearer root"}


@pytest.fixture(scope="module")
def stub():
    gate = GateSettings(admin_key="root")
    with served(message(thought="", content="x"), context=512, server=ServerSettings(("stub",), gate=gate)) as server:
        yield server
        assert server.is_free()


@pytest.fixture(scope="module")
def document(stub):
    return schemathesis.openapi.from_asgi("/openapi.json", stub.app)


def checks():
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    return [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("few", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_request_of_the_document_brings_a_fault(document, few):
    """501 is what a server without a folder says of saving, 504 what a request gets that asked for less time than it
    takes: documented, and no faults."""
    asked = set()
    for found in document.get_all_operations():
        ask(found.ok(), few)
        asked.add(found.ok().label)
    assert "POST /v1/chat/completions" in asked and len(asked) > 15


def ask(operation, few):
    @settings(max_examples=few, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy())
    def one(case):
        response = case.call(headers=ADMIN, timeout=300)  # 128 answers on a busy machine
        case.validate_response(response, checks=checks()[response.status_code in (501, 504) :])

    one()
