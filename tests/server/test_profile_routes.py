"""`spill bench serve --profile` gets a trace from a real server; one without profiling says how to enable it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from spillover.cli.main import main
from spillover.engine.profiling.profile_session import ProfileSession
from spillover.errors import SpilloverError
from support.servers.running_server import Server, running


def bench(server: Server, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", "serve", "--base-url", server.url, "--num-prompts", "2",
                                       "--random-input-len", "8", "--num-warmups", "0", *words])
    return result.exit_code, result.output


def test_a_served_model_is_profiled(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    with running("--max-model-len", "512", "--profiler-dir", str(traces)) as server, server.http() as http:
        code, output = bench(server, "--random-output-len", "6", "--profile")
        assert code == 0, output
        (file,) = traces.iterdir()
        assert str(file) in output
        names = {event.get("name", "") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert any("linear" in name for name in names)
        refused = http.post("/stop_profile")
        assert refused.status_code == 400
        assert "no profile is running" in refused.json()["error"]["message"]
        assert http.post("/start_profile").status_code == 200  # the server shuts down cleanly during a profile
    assert len(list(traces.iterdir())) == 1


def test_a_profile_ends_by_itself_and_is_told_to_whoever_asks(tmp_path: Path) -> None:
    session = ProfileSession("cpu", max_steps=3)
    with pytest.raises(SpilloverError, match="no profile is running"):
        session.stop()
    session.stepped(10)  # without a running profile, nothing is counted
    session.start(str(tmp_path))
    with pytest.raises(SpilloverError, match="running already"):
        session.start(str(tmp_path))
    session.stepped(2)
    assert not list(tmp_path.iterdir())
    session.stepped(1)
    session.stepped(5)
    (trace,) = tmp_path.iterdir()
    assert session.stop() == {"trace": str(trace), "steps": 3}
    with pytest.raises(SpilloverError, match="no profile is running"):
        session.stop()
    session.start(str(tmp_path))
    session.close()
    assert list(tmp_path.iterdir()) == [trace]
    with pytest.raises(SpilloverError, match="cannot write a trace"):
        session.start(str(trace / "below a file"))


def test_a_server_without_a_folder_for_traces_says_so(null_server: Server) -> None:
    with null_server.http() as http:
        for path in ("/start_profile", "/stop_profile"):
            answer = http.post(path)
            assert answer.status_code == 404
            assert "--profiler-dir" in answer.json()["error"]["message"]
    code, output = bench(null_server, "--random-output-len", "2", "--profile")
    assert code == 2
    assert "--profiler-dir" in output


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["serve", "--port", "0", "--profiler-dir", str(tmp_path / "file" / "traces")])
    assert result.exit_code == 2
    assert "--profiler-dir" in result.output


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiling_needs_the_key(guarded_server: Server, path: str) -> None:
    with guarded_server.http() as http:
        assert http.post(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
