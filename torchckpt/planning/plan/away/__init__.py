"""Plans that send blocks to a host.

    search            how many blocks of each rank go, how many are recomputed
    moves             where they leave and come back
    bound             what no plan goes below
"""
from torchckpt.planning.plan.away.bound import bound_seconds
from torchckpt.planning.plan.away.search import AwayPlan, offload_only, planned_away

__all__ = ["AwayPlan", "bound_seconds", "offload_only", "planned_away"]
