"""Experiments: tasks, methods, recipes and the training behind ``stiefel train``.

`tasks` makes data, losses and scores; `methods` lists what one word such as ``cwy`` or
``rgd-c-c`` stands for; `recipes` holds the defaults of each task; `training` runs it all and
leaves a run folder. `stiefel.experiments.training` needs the extra ``stiefel[experiments]``; the
rest imports without it.
"""

from stiefel.experiments.methods import METHODS, Method
from stiefel.experiments.recipes import RECIPES, Recipe
from stiefel.experiments.tasks import TASKS, Task

__all__ = ["METHODS", "RECIPES", "TASKS", "Method", "Recipe", "Task"]
