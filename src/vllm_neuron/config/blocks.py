"""How many KV blocks a request needs, which bounds num_gpu_blocks_override."""

from collections.abc import Iterable


def request_blocks(windows: Iterable[int | None], tokens: int, step_tokens: int, block_size: int) -> int:
    """Blocks that a request of ``tokens`` tokens holds at most at a time, computed up to ``step_tokens`` in a step.

    ``windows`` has an entry per KV group: how many tokens its layers look back on, None for all. Those with a window
    give back at each step what lies before it.
    """
    reach = (tokens if window is None else window - 1 + step_tokens for window in windows)
    whole = -(-tokens // block_size)
    return sum(min(whole, -(-seen // block_size) + 1) for seen in reach)
