"""How many rows of logits are computed at a time."""

# Every chunk reads and writes the whole gradient of the weight once (8 bytes per entry in float32) beside 6 C
# operations per entry: 8 V D / bandwidth against 6 C V D / arithmetic. On an H200 (4.3 TB/s, 770 TFLOP/s) both take
# the same time at C = 8 * 770 / (6 * 4.3) = 240, so smaller chunks are never made, whatever the budget.
MIN_CHUNK_ROWS = 256

# Products are computed in tiles of 128 rows; a chunk that is no multiple of it pays for rows that it does not have.
TILE_ROWS = 128


def chunk_rows(
    tokens: int, row_bytes: float, budget_mib: float, chunk_size: int | None = None, *, tile: int = TILE_ROWS
) -> int:
    """Return the rows of a chunk: as many as fit the budget, at most half of the tokens (whose last tile may be
    partly filled), and never fewer than 256; in whole tiles, and evened out. Or, in tiles of 128 rows, ``chunk_size``.
    """
    if chunk_size is not None:
        return -(-max(min(chunk_size, tokens), 1) // TILE_ROWS) * TILE_ROWS
    half = -(-tokens // (2 * tile)) * tile
    within_budget = min(int(budget_mib * 2**20 / row_bytes), half)
    rows = max(within_budget // tile * tile, MIN_CHUNK_ROWS)
    count = max(-(-tokens // rows), 1)
    return max(-(-tokens // (count * tile)) * tile, MIN_CHUNK_ROWS)


def chunks(tokens: int | slice, rows: int) -> list[slice]:
    """Return the chunks of all tokens, or of a slice of them."""
    start, stop = (0, tokens) if isinstance(tokens, int) else (tokens.start, tokens.stop)
    return [slice(first, min(first + rows, stop)) for first in range(start, stop, max(rows, 1))]
