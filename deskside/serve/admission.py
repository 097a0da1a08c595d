"""Admission of requests: at most a fixed number of choices at a time, and none once the server is stopping.

A choice counts from the admission of its request until the response is complete (if streamed, sent) or the client
disconnects. Requests beyond the limit get 429 with Retry-After, and a request that exceeds it alone gets 400. Once the
server is draining, admitted requests finish and new ones get 503.
"""

from deskside.serve.protocol import ApiError

RETRY_SECONDS = 1


class Admission:
    """Counts the admitted choices. For the event loop's thread only.

    draining: set when the server is stopping, never cleared. running: admitted choices that have not ended.
    """

    def __init__(self, max_choices: int):
        self.draining = False
        self.running = 0
        self._max_choices = max_choices

    def admit(self, num_choices: int, field: str) -> None:
        """Count the choices of a new request. `release` must follow. Raises ApiError; `field` decides their number."""
        most = self._max_choices
        if self.draining:
            raise ApiError(503, "the server is stopping; try again in a moment", retry_after=RETRY_SECONDS)
        if num_choices > most:
            raise ApiError(400, f"{field}: {num_choices} choices exceed the maximum of {most}", param=field)
        if self.running + num_choices > most:
            raise ApiError(
                429,
                f"the server is at capacity ({most} choices); try again in a moment",
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )
        self.running += num_choices

    def release(self, num_choices: int) -> None:
        """Uncount the choices of a request that has ended."""
        self.running -= num_choices
