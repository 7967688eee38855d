"""Reads programs: what they communicate, how much memory they need, for devices here or not."""

from .collective import Collective as Collective
from .contract import Departure as Departure
from .contract import PolicyViolation as PolicyViolation
from .contract import Promise as Promise
from .contract import Wire as Wire
from .difference import Difference as Difference
from .memory import Argument as Argument
from .memory import Memory as Memory
from .report import Report as Report
from .rows import Minimum as Minimum
from .rows import Row as Row
from .stablehlo import collectives as collectives
from .topology import topology as topology
