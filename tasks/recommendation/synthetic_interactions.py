"""Synthetic interactions: users and items that have tastes in common."""

from __future__ import annotations

import dataclasses
import functools

import gin
import numpy as np

from meshwright.framework.modeling.checks import Checked, bounded, check_number
from meshwright.tasks.recommendation.interactions import Interactions


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticInteractions(Checked):
    """Each user takes some items, one by one, by taste and popularity.

    Users and items have random vectors. A user takes an item next with a probability
    in proportion to exp(taste * u.v / sqrt(tastes) + popularity * p), where p is a
    random number of the item, and no item twice: a model that finds the vectors ranks
    better than by popularity, and no model is always right.

    Args:
      users: number of users.
      items: number of items.
      per_user: items that each user takes, the last of which is held out.
      tastes: size of a vector.
      taste: how much the vectors matter.
      popularity: how much popularity matters.
      seed: seed of everything.

    Raises:
      ValueError: a number out of range.
    """

    users: int = bounded(2000, at_least=1)
    items: int = bounded(500, at_least=1)
    per_user: int = 30
    tastes: int = bounded(8, at_least=1)
    taste: float = bounded(3.0, at_least=0)
    popularity: float = bounded(0.5, at_least=0)
    seed: int = bounded(0, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "per_user", at_least=2, at_most=self.items)

    def read(self) -> Interactions:
        """The interactions; made once in a process, and always the same.

        Items that nobody took have no number, as in a file.
        """
        return _made(self)


@functools.cache
def _made(given: SyntheticInteractions) -> Interactions:
    rng = np.random.default_rng(given.seed)
    v = given.taste * rng.standard_normal([given.items, given.tastes])
    v /= np.sqrt(given.tastes)
    popularity = given.popularity * rng.standard_normal(given.items)
    taken = []
    for _ in range(given.users):
        logits = v @ rng.standard_normal(given.tastes) + popularity
        # The largest of logits with Gumbel noise are draws without replacement.
        noisy = logits + rng.gumbel(size=given.items)
        taken.append(np.argsort(-noisy)[: given.per_user])
    item = np.concatenate(taken)
    user = np.repeat(np.arange(given.users), given.per_user)
    # The last item should be like the others, not the one that the user likes least.
    time = rng.permutation(len(item))
    return Interactions.from_events(user, item, time, source="SyntheticInteractions")
