"""`spill router`, and routing flags of `spill serve`: invalid combinations are rejected at once, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from spillover.cli.main import main

URL = "http://127.0.0.1:8001"


@pytest.mark.parametrize(("arguments", "words"), [
    (["router"], "give the servers to route to"),
    (["router", "127.0.0.1:8001"], "is not the address of a server"),
    (["router", "ftp://127.0.0.1"], "is not the address of a server"),
    (["router", "http://127.0.0.1:port"], "has no valid port"),
    (["router", URL, URL + "/v1"], "is given twice"),
    (["router", URL, "--routing-policy", "best"], "is not one of"),
    (["router", URL, "--kv-events-port", "5557"], "needs --tokenizer"),
    (["router", URL, "--kv-replay-port", "5558"], "needs --kv-events-port"),
    (["router", URL, URL[:-1], URL[:-2], *["--kv-events-port", "5557"] * 2, "--tokenizer", __file__],
     "given 2 times for 3 servers"),
    (["router", URL, "--tokenizer", "/nowhere/at/all"], "does not exist"),
    (["router", URL, "--max-request-bytes", "many"], "is not a size"),
    (["router", URL, "--retries", "11"], "11"),
    (["router", URL, "--api-key", ""], "an API key is empty"),
    (["router", URL, "--ssl-keyfile", "key.pem"], "needs --ssl-certfile"),
    (["router", URL, "--ssl-certfile", "/nowhere.pem"], "cannot be used"),
    (["serve", "--retries", "2"], "give --replicas N too"),
    (["serve", "--routing-policy", "prefix"], "give --replicas N too"),
    (["serve", "--replicas", "2", "--api-key-file", "keys"], "give keys as --api-key"),
    (["serve", "--replicas", "0"], "--replicas is from 1"),
    (["serve", "--replicas", "65"], "--replicas is from 1"),
    (["serve", "--max-replicas", "65"], "--max-replicas is from 1"),
    (["serve", "--min-replicas", "2"], "needs --max-replicas"),
    (["serve", "--replicas", "3", "--max-replicas", "2"], "must be in this order"),
    (["serve", "--min-replicas", "3", "--replicas", "2", "--max-replicas", "4"], "got 3, 2 and 4"),
    (["serve", "--scale-down-seconds", "9"], "give --max-replicas N too"),
    (["serve", "--replicas", "2", "--target-backlog-seconds", "9"], "give --max-replicas N too"),
    (["serve", "--ray-address", "10.0.0.7:6379"], "give --ray too"),
    (["serve", "--replicas", "2", "--ray-resources", "{}"], "give --ray too"),
    (["serve", "--ray", "--ray-resources", "GPU"], "is not JSON"),
    (["serve", "--ray", "--ray-resources", '{"GPU": "one"}'], "a number for each resource"),
    (["serve", "--ray", "--ray-resources", '{"GPU": -1}'], "a number for each resource"),
    (["serve", "--ray", "--replicas", "2", "--host-pool", "auto", "--disaggregation", "auto"], "needs --remote"),
    (["serve", "--simulate-step", "1,1"], "give --load-format null too"),
    (["serve", "--load-format", "null", "--simulate-step", "5"], "two numbers of milliseconds"),
    (["serve", "--load-format", "null", "--simulate-step", "5,-1"], "two numbers of milliseconds"),
])
def test_a_flag_that_cannot_be_is_answered_in_one_sentence(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert "Traceback" not in result.output


def test_a_config_file_may_hold_the_flags(tmp_path: Path) -> None:
    (tmp_path / "router.json").write_text('{"routing-policy": "prefix", "retry": 2}')
    result = CliRunner().invoke(main, ["router", "--config", str(tmp_path / "router.json"), URL])
    assert result.exit_code == 2
    assert "did you mean 'retries'?" in result.output
