"""How long requests take, as the metrics tell it: observed as it happens, from what the scheduler knows anyway."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everystop.histogram import Histogram
from scheduler_svc.core.request import Request, RequestStats

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_NUM_TOKENS = tuple(mantissa * 10**exponent for exponent in range(7) for mantissa in (1, 2, 5))


@dataclass(slots=True, eq=False)
class TokenClock:
    """When a request arrived and when its last token did, in seconds. Its stream carries it."""

    arrival_time: float
    last_token_time: float | None = None


class Latencies:
    """Seconds; the token counts beside them are those of the same requests."""

    def __init__(self) -> None:
        self.first_token = Histogram(_FIRST_TOKEN_S)
        """From arrival to the first token."""
        self.inter_token = Histogram(_TOKEN_S)
        """From one token of a request to its next."""
        self.total = Histogram(_REQUEST_S)
        """From arrival to the end, of requests whose answer is complete; so are those below."""
        self.queued = Histogram(_REQUEST_S)
        """From arrival to the first step."""
        self.prefill = Histogram(_REQUEST_S)
        """From the first step to the first token."""
        self.decode = Histogram(_REQUEST_S)
        """From the first token to the end."""
        self.inference = Histogram(_REQUEST_S)
        """From the first step to the end."""
        self.num_prompt_tokens = Histogram(_NUM_TOKENS)
        self.num_output_tokens = Histogram(_NUM_TOKENS)
        self.max_tokens = Histogram(_NUM_TOKENS)

    def tokens_arrived(self, clocks: Iterable[TokenClock], now: float) -> None:
        """One token arrived for each of `clocks` at `now`."""
        # Sequences that decode side by side have equal intervals: a few observations stand for all of them.
        num_waited_since: dict[float, int] = {}
        for clock in clocks:
            last_time, clock.last_token_time = clock.last_token_time, now
            if last_time is None:
                self.first_token.observe(now - clock.arrival_time)
            else:
                num_waited_since[last_time] = num_waited_since.get(last_time, 0) + 1
        for last_time, num_tokens in num_waited_since.items():
            self.inter_token.observe(now - last_time, num_tokens)

    def completed(self, request: Request, stats: RequestStats, num_output_tokens: int, now: float) -> None:
        """The answer to a request is complete at `now`."""
        self.total.observe(now - stats.arrival_time)
        self.num_prompt_tokens.observe(len(request.prompt_token_ids))
        self.num_output_tokens.observe(num_output_tokens)
        self.max_tokens.observe(request.max_tokens)
        if stats.first_scheduled_time is not None and stats.first_token_time is not None:
            self.queued.observe(stats.first_scheduled_time - stats.arrival_time)
            self.prefill.observe(stats.first_token_time - stats.first_scheduled_time)
            self.decode.observe(now - stats.first_token_time)
            self.inference.observe(now - stats.first_scheduled_time)
