import json
import logging
import warnings
from collections.abc import Iterator

import pytest
import structlog
from grpc._cython import cygrpc

from everystop import log


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.captureWarnings(False)
    logging.root.handlers[:], logging.root.level = handlers, level
    structlog.reset_defaults()


def read_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    log.flush()
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_an_event_is_one_json_object_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json", "info")
    structlog.get_logger().info("request_finished", request_id="a", num_tokens=3)
    (line,) = read_lines(capsys)
    assert str(line.pop("timestamp")).endswith("Z")
    assert line == {"event": "request_finished", "level": "info", "request_id": "a", "num_tokens": 3}


def test_lines_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json", "warning")
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in read_lines(capsys)] == ["loud"]


def test_the_standard_library_speaks_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json", "info")
    logging.getLogger("grpc").error("broken %s", "pipe")
    logging.getLogger("grpc").info("chatter of libraries is dropped")
    (line,) = read_lines(capsys)
    assert (line["event"], line["level"], line["logger"]) == ("broken pipe", "error", "grpc")


def test_warnings_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json", "info")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old news", UserWarning, stacklevel=1)
    (line,) = read_lines(capsys)
    assert "old news" in str(line["event"])


def test_exceptions_are_structured(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json", "info")
    try:
        raise ValueError("why")
    except ValueError:
        structlog.get_logger().exception("failed")
    (line,) = read_lines(capsys)
    assert line["exception"][0]["exc_value"] == "why"  # type: ignore[index]


def test_auto_is_json_unless_stderr_is_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.configure("auto", "info")
    structlog.get_logger().info("piped")
    assert [line["event"] for line in read_lines(capsys)] == ["piped"]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    log.configure("auto", "info")
    structlog.get_logger().info("seen", request_id="a")
    log.flush()
    text = capsys.readouterr().err
    assert "seen" in text
    assert not text.startswith("{")


def test_a_client_that_hangs_up_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("grpc._cython.cygrpc")
    for level, expected in (("info", ["a bug"]), ("debug", ["gone", "a bug"])):
        log.configure("json", level)
        library.error("gone", exc_info=cygrpc.ExecuteBatchError("execute_batch failed"))
        library.error("a bug", exc_info=ZeroDivisionError())
        assert [line["event"] for line in read_lines(capsys)] == expected
