"""Options that several charts have, checked in one way."""

from __future__ import annotations

from stiefel.errors import ConfigurationError

__all__ = ["chart_label", "count_option"]


def chart_label(name: str, said: str | None = None) -> str:
    """What errors call a chart: by the word that the user wrote, with its name in brackets.

    Args:
        name: Name of the chart.
        said: The user's word for it; None where it is the name.

    Example:
        >>> from stiefel.parametrizations.options import chart_label
        >>> chart_label("cayley"), chart_label("cayley", "scornn")
        ("chart 'cayley'", "chart 'scornn' (cayley)")
    """
    return f"chart {name!r}" if said in (None, name) else f"chart {said!r} ({name})"


def count_option(
    chart: str,
    option: str,
    value: object,
    low: int,
    high: int | None = None,
    *,
    said: str | None = None,
) -> int:
    """Checks an option that counts something: a whole number, True and False are none.

    Args:
        chart: Name of the chart, for the message.
        option: Name of the option.
        value: What came.
        low: The least number allowed.
        high: The greatest; None for no bound.
        said: The user's word for the chart; None where it is the name.

    Returns:
        The value.

    Raises:
        ConfigurationError: If it is no whole number or out of range.

    Example:
        >>> from stiefel.parametrizations.options import count_option
        >>> count_option("cwy", "reflections", 3, 1, 7)
        3
        >>> count_option("cwy", "reflections", 8, 1, 7)
        Traceback (most recent call last):
        stiefel.errors.ConfigurationError: chart 'cwy': expected reflections= to be a whole number
        from 1 to 7, got 8. Leave it out for the chart's own choice
    """
    if type(value) is not int or value < low or (high is not None and value > high):
        span = f">= {low}" if high is None else f"from {low} to {high}"
        raise ConfigurationError(
            f"{chart_label(chart, said)}: expected {option}= to be a whole number {span}, got "
            f"{value!r}. Leave it out for the chart's own choice"
        )
    return value
