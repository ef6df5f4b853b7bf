"""Small models as users write them, each with one construct that a planned strategy may lose, and
models of libraries."""

from zoo.base import ZooModel
from zoo.contexts import CONTEXTS
from zoo.habits import HABITS
from zoo.language import LANGUAGE
from zoo.layers import LAYERS
from zoo.libraries import LIBRARIES
from zoo.losses import LOSSES
from zoo.modules import MODULES
from zoo.samples import SAMPLES
from zoo.states import STATES
from zoo.users import OWN

__all__ = ["ZOO", "ZooModel"]

ZOO: dict[str, ZooModel] = {
    **CONTEXTS, **SAMPLES, **STATES, **LAYERS, **OWN, **HABITS, **LOSSES, **MODULES,
    **LANGUAGE, **LIBRARIES,
}  # fmt: skip
