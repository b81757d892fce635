"""Schemathesis: requests made from /openapi.json, valid and invalid; no answer may be a 5xx."""

from checks import DIRECTORY, URL, check, main, run_tool

MAX_EXAMPLES = "30"
CONFIG = """
[generation]
deterministic = true
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""
"""504 is the documented end of a request with a `timeout`; each other 5xx is a failure."""


def run_schemathesis(*options: str) -> None:
    (DIRECTORY / "schemathesis.toml").write_text(CONFIG)
    run_tool(
        *("schemathesis", "run", URL + "/openapi.json", "--no-color", *options),
        *("--max-examples", MAX_EXAMPLES, "--workers", "2", "--request-timeout", "60"),
    )


@check
def no_server_error_and_no_undeclared_status() -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    run_schemathesis("--checks", checks)


@check
def answers_follow_their_schemas() -> None:
    run_schemathesis("--checks", "response_schema_conformance", "--mode", "positive")


if __name__ == "__main__":
    main()
