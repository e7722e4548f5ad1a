import pytest

from everystop.options import ConfigError
from everystop.settings import ExecutorConfig, SchedulerConfig


@pytest.mark.parametrize("config_type", [SchedulerConfig, ExecutorConfig])
def test_what_watches_is_off_by_default(config_type: type[SchedulerConfig | ExecutorConfig]) -> None:
    config = config_type()
    assert (config.metrics_listen, config.otlp_endpoint) == ("", "")


@pytest.mark.parametrize("config_type", [SchedulerConfig, ExecutorConfig])
@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("metrics_listen", "9464", "--metrics-listen: '9464' is not host:port"),
        ("metrics_listen", "127.0.0.1:99999", "--metrics-listen"),
        ("otlp_endpoint", "collector:4317", "--otlp-endpoint: 'collector:4317' is not a URL"),
    ],
)
def test_a_wrong_value_names_its_flag(
    config_type: type[SchedulerConfig | ExecutorConfig], setting: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_type(**{setting: value})
