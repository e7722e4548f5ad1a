"""The setting `--policy` offers what the core has, so that a wrong name is refused at the start."""

from everystop.options import settings
from everystop.settings import SchedulerConfig
from scheduler_svc.core.policies import POLICIES


def test_the_setting_offers_every_policy() -> None:
    (policy,) = [setting for setting in settings(SchedulerConfig) if setting.name == "policy"]
    assert set(policy.choices) == POLICIES.keys()
