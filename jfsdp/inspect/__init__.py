"""Reads programs: which collectives they run, over which axes, in which dtype, at what cost."""

from .collective import Collective as Collective
from .report import Report as Report
from .rows import Minimum as Minimum
from .rows import Row as Row
from .stablehlo import collectives as collectives
