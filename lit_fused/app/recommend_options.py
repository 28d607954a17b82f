"""The options of ``mode=recommend``."""

from dataclasses import dataclass

from lit_fused.errors import UserError


@dataclass(frozen=True)
class RecommendOptions:
    """Says which users get how many items.

    Attributes:
        users: a .parquet or .csv file with a column of users whom the run's data have; or with their histories, as the
            run's data; None for all users of the run's data.
        output: the Parquet file that is written; None for recommendations.parquet in the run's folder.
        k: items for each user.
        exclude_seen: leave out what a user had before.
        batch_size: users at a time.
    """

    users: str | None = None
    output: str | None = None
    k: int = 10
    exclude_seen: bool = True
    batch_size: int = 1024

    def __post_init__(self) -> None:
        for name in ("k", "batch_size"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise UserError(f"recommend.{name} must be a whole number of 1 or more, got {getattr(self, name)!r}")
