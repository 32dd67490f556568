"""The tasks, by the word that names them on the command line."""

from stiefel.experiments.tasks.base import Batch, Scores, Task
from stiefel.experiments.tasks.copying import LAYOUTS, Copying
from stiefel.experiments.tasks.moving_digits import FRAME_SIZES, MovingDigits
from stiefel.experiments.tasks.pixel_mnist import PermutedMnist, PixelMnist, pixel_permutation

__all__ = [
    "FRAME_SIZES",
    "LAYOUTS",
    "TASKS",
    "Batch",
    "Copying",
    "MovingDigits",
    "PermutedMnist",
    "PixelMnist",
    "Scores",
    "Task",
    "pixel_permutation",
]

#: Task classes by name.
TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Copying, PixelMnist, PermutedMnist, MovingDigits)
}
