"""How many blocks tokens take. A window is how many tokens a token looks back on, its own included; None is all."""

TABLE_UNIT = 128
"""Tokens that the attention kernels read at once: trimmed block tables span a multiple of it where blocks allow."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


def round_up_to_blocks(tokens: int, block_size: int) -> int:
    """``tokens`` rounded up to whole blocks."""
    return blocks_for(tokens, block_size) * block_size


def first_visible(position: int, window: int | None) -> int:
    """The first position that a token at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1)


def table_blocks(rows: int, context: int, window: int | None, block_size: int) -> int:
    """Blocks that a request's block table needs for steps of ``rows`` tokens in up to ``context`` tokens.

    With a window these are only the blocks that the window of some row reaches, wherever in a block it begins.
    """
    blocks = blocks_for(context, block_size)
    if window is None:
        return blocks
    seen = window - 1 + rows
    reached = blocks_for(seen - 1, block_size) + 1
    unit = TABLE_UNIT // block_size if TABLE_UNIT % block_size == 0 else 1
    return min(blocks, round_up_to_blocks(reached, unit))
