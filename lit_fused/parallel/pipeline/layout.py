"""``Layout``: the stages that a pipeline has under a schedule, and the rank of each."""

from dataclasses import dataclass

from lit_fused.errors import UserError

_SINGLE = ("1F1B", "GPipe")  # one stage on each rank
_LOOP = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # several: 0 1 0 1
_V = ("ZBVZeroBubble", "DualPipeV")  # two: 0 1 1 0
SPLIT_BACKWARD = ("InterleavedZeroBubble", *_V)  # gradients of inputs first, those of weights later
SCHEDULES = (*_SINGLE, *_LOOP, *_V)


@dataclass(frozen=True)
class Layout:
    """The stages of a pipeline.

    Attributes:
        schedule: one of :data:`SCHEDULES`, the names of torch.distributed.pipelining.
        ranks: number of ranks in the pipeline.
        stages_per_rank: number of stages on each of them.
    """

    schedule: str
    ranks: int
    stages_per_rank: int

    @classmethod
    def of(cls, schedule: str, ranks: int, stages_per_rank: int | None) -> "Layout":
        """Return a layout, with the schedule's usual number of stages on each rank if ``stages_per_rank`` is None.

        Raises:
            UserError: an unknown schedule, too few ranks, or a number of stages that the schedule does not have.
        """
        if schedule not in SCHEDULES:
            raise UserError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        if ranks < 2:
            raise UserError(f"pipeline_parallel_size must be at least 2, got {ranks}; one device needs no pipeline")
        usual = 1 if schedule in _SINGLE else 2
        stages = usual if stages_per_rank is None else stages_per_rank
        fits = stages >= 2 if schedule in _LOOP else stages == usual
        if not fits:
            wanted = "two or more stages" if schedule in _LOOP else f"{usual} stage{'s' if usual > 1 else ''}"
            raise UserError(f"schedule={schedule} has {wanted} on each device, got stages_per_rank={stages}")
        return cls(schedule, ranks, stages)

    @property
    def num_stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def __str__(self) -> str:
        return f"{self.schedule} with {self.num_stages} stages on {self.ranks} devices"

    def has_same_stages(self, other: "Layout") -> bool:
        """Return whether each rank has the same stages in both layouts."""
        return [self.stages_of(rank) for rank in range(self.ranks)] == [
            other.stages_of(rank) for rank in range(other.ranks)
        ]

    def stages_of(self, rank: int) -> list[int]:
        """Return the indices of a rank's stages, in order."""
        if self.schedule in _V:
            return [rank, self.num_stages - 1 - rank]
        return list(range(rank, self.num_stages, self.ranks))

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        return next(rank for rank in range(self.ranks) if stage in self.stages_of(rank))
