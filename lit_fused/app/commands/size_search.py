"""Find the largest size that fits, in few trials: double it, then narrow it down along a line through the peaks."""

from collections.abc import Callable


def largest(
    fits: Callable[[int], float | None],
    start: int,
    most: int,
    *,
    fixed_gib: float,
    limit_gib: float | None,
    careful: bool,
    unit: Callable[[int], int] = lambda low: 1,
) -> int:
    """Return the largest size that fits; 0 if ``start`` does not.

    Args:
        fits: tries a size and returns its peak in GiB; None if it does not fit.
        start: the smallest size.
        most: the largest size to be tried.
        fixed_gib: about what a step of size zero would take.
        limit_gib: the memory there is. The next trial is where a line through two sizes' peaks reaches it.
        careful: do not even try a size whose peak is expected to be beyond the limit.
        unit: how exact the answer need be, near a size.
    """
    peaks = {0: fixed_gib}
    low, high = 0, most + 1  # fits, does not fit
    size, width = start, high
    while True:
        beyond = careful and limit_gib is not None and _expected(peaks, size) > limit_gib
        peak = None if beyond else fits(size)
        if peak is None:
            high = size
        else:
            peaks[size], low = peak, size
        if not low or high - low <= unit(low):
            return low
        halved, width = high - low <= width // 2, high - low
        guess = limit_gib if halved or high > most else None  # a guess that did not help is not followed twice
        size = _next_size(peaks, low, high, most, guess, unit(low))


def _next_size(peaks: dict[int, float], low: int, high: int, most: int, limit_gib: float | None, unit: int) -> int:
    """Return twice the size, or the middle, unless a line through the two largest sizes gives a better guess."""
    size = min(2 * low, most) if high > most else (low + high) // 2
    a, b = sorted(peaks)[-2:]
    slope = (peaks[b] - peaks[a]) / (b - a)
    if limit_gib is not None and slope > 0:
        reached = int(b + (limit_gib - peaks[b]) / slope)
        size = min(max(reached, low + unit), size if high > most else high - 1)
    size = max(size // unit * unit, low + 1)
    return min(size, high - 1)


def _expected(peaks: dict[int, float], size: int) -> float:
    """Predict the peak of a size from those of smaller ones.

    Take a line through the last two, or a parabola through the last three if that predicts more: attention without a
    fused kernel grows with the square of the sequence.
    """
    if len(peaks) < 2:
        return peaks[0]
    *before, a, b = sorted(peaks)
    slope = (peaks[b] - peaks[a]) / (b - a)
    line = peaks[b] + slope * (size - b)
    if not before:
        return line
    z = before[-1]
    bend = (slope - (peaks[a] - peaks[z]) / (a - z)) / (b - z)
    return line + max(bend, 0.0) * (size - a) * (size - b)
