"""Plans and results survive the way over the wire, at the edges of what they hold."""

from everystop import plan_codec
from everystop.executor.v1 import executor_pb2 as pb
from everystop.plan import StepResult, StepTimings


def test_an_executor_may_have_stood_idle_for_months() -> None:
    timings = StepTimings(waited_us=10**13, forward_us=10**10, sample_us=10**10)
    result = StepResult(step_id=1, token_ids=[5], timings=timings)
    message = plan_codec.encode_result(result)
    assert plan_codec.decode_result(pb.StepResult.FromString(message.SerializeToString())) == result
